"""Does the policy learn or fall apart? From the series of the steps and evaluations.

Owns: trends over the steps, collapse, unstable updates. Refuses: whether the samples can teach anything (teaching.py),
waits (waits.py).

A collapse is judged by its outcome (reward or accuracy fell by half and by more than chance) and explained by what goes
with it: entropy, weights, gradients, answer lengths. Those signs alone are a warning. They compare a run with itself,
early steps with late ones, or are shares and KL, which have no scale: they hold for any reward, model and machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from controller.report.data import RunData, number, series
from controller.report.finding import Finding, Rated, Severity, Weight, capital, figure, percent, sentences

MIN_TREND_STEPS = 6
"""Below this an early and a late mean of two steps each overlap almost: only what needs no trend is told before."""
REWARD_FALL_BAD = 0.5
"""Half of the best reward is gone: no schedule or harder prompt does that by itself."""
REWARD_FALL_NOTABLE = 0.2
SIGMAS = 3.0
"""Standard errors that a fall must exceed: the best of many windows is high by chance."""
ENTROPY_COLLAPSED = 0.1
"""Late entropy as a share of the early one. A policy that learns well loses much too (the quickstart ends at 0.13 to
0.25), so alone this warns only where the reward did not rise."""
ENTROPY_EXPLODED = 3.0
ESS_FALL = 0.025
"""Effective share of the samples under the correction weights, below that of the first steps, whose samples are of
their own policy: what is lost there is the engine's other arithmetic. Median of ESS_STEPS steps. On seeds 3 to 10 of
benchmarks/divergence.py every run that fell apart passed it by its step 7, and sound ones lost 0.019 in single steps at
most; in benchmarks/staleness.py, of five at bound 16 the two that lost as much on average ended lowest.
"""
ESS_STEPS = 3
ESS_FALL_PER_VERSION = 0.005
"""The same in the very first steps, per version of the samples' staleness, since samples are not old yet: on seeds 3 to
16 runs that fell apart passed it by step 4 or 5, and sound ones stayed below 0.001 there. Later it would tell too much.
"""
KL_LARGE = 0.03
"""Nats a token between the policy that sampled and the one that trains, above the first steps', median of KL_STEPS: a
single large step is common and harmless. Sound runs with four mini-batches stay below 0.016.
"""
KL_LARGE_NAIVE = 0.01
"""The same for ordinary PPO, whose clipping holds the policy near the one that sampled: sound runs stay below 0.005."""
KL_STEPS = 5
WEIGHT_CUT_LARGE = 0.1
"""Share of tokens whose correction weight was truncated or masked: healthy runs have 0.001."""
CLIP_LARGE = 0.4
"""Share of tokens outside the trust region; 0.1 to 0.2 is usual with several mini-batches."""
RATIO_LARGE = 50.0
"""Largest ratio of the step's policy to the one it started from, median of RATIO_STEPS: one token in one step may be
anywhere (1,199 in a run that ended at 1.000); a few is usual with several mini-batches."""
RATIO_STEPS = 3
GRAD_GROWTH = 10.0
"""Gradient norm against that of the first steps, medians of GRAD_STEPS: in single steps of sound runs it is 20 times as
large."""
GRAD_STEPS = 3
GRAD_SPIKE = 100.0
"""Largest gradient norm against the median one."""
SKIPPED_NOTABLE = 0.01
"""Share of updates refused because the gradient was not finite."""
LENGTH_CHANGE = 3.0
"""Mean length of the late answers against the early ones; one that learns to reason may double it."""
CUT_RISE = 0.5
"""Half of the answers ended by themselves before, and do not any more."""


@dataclass(frozen=True)
class Trend:
    """One number over the steps: means of its first and last few values, NaN where it is not known."""

    early: float
    late: float
    values: np.ndarray

    @property
    def ratio(self) -> float:
        """late / early; NaN where early is not positive."""
        return self.late / self.early if self.early > 0 else math.nan


@dataclass(frozen=True)
class Fall:
    """From the best mean of a few values to the last one."""

    best: float
    last: float
    best_step: int
    since_step: int
    """Where half of the fall was done."""
    share: float
    """Of the best."""
    is_certain: bool
    """More than chance."""

    @property
    def is_notable(self) -> bool:
        """Large enough to tell, and more than chance."""
        return self.is_certain and self.share >= REWARD_FALL_NOTABLE


@dataclass(frozen=True)
class Sign:
    """Something that goes with a collapse; `step`: the first step that shows it, 0 where none can be named."""

    words: str
    step: int
    cause: str
    """`lr`, `stale`, `ratio`, `entropy`, `length`: what to turn."""


def find(data: RunData) -> list[Rated]:
    """What is to be said of the policy."""
    signs = _signs(data) if len(data.steps) >= MIN_TREND_STEPS else [*_too_far_at_once(data), *_away(data)]
    found = _collapse(data, signs) or _unstable(data, signs)
    return [*found, *_skipped(data)]


def trend(data: RunData, key: str) -> Trend:
    """Early and late mean of one number of the steps."""
    values = series(data.steps, key)
    k = window(len(values))
    return Trend(_mean(values[:k]), _mean(values[-k:]), values)


def window(num_steps: int) -> int:
    """Steps in one mean: a fifth of the run, at least 2, at most 20."""
    return max(2, min(20, num_steps // 5))


def reward_fall(data: RunData) -> Fall | None:
    """How far the mean reward fell from its best; None where too little is known."""
    rows = [row for row in data.steps if math.isfinite(number(row, "reward_mean"))]
    k = window(len(rows))
    if len(rows) < MIN_TREND_STEPS:
        return None
    smooth = np.convolve(series(rows, "reward_mean"), np.full(k, 1 / k), mode="valid")
    # Groups are the independent draws; their samples share a prompt.
    errors = series(rows, "reward_std") / np.sqrt(np.maximum(1.0, np.nan_to_num(series(rows, "groups"), nan=1.0)) * k)
    squares = np.convolve(np.nan_to_num(errors) ** 2, np.full(k, 1 / k), mode="valid")
    best = int(np.argmax(smooth))
    fall = float(smooth[best] - smooth[-1])
    half = smooth[best] - fall / 2
    after = np.nonzero(smooth[best:] <= half)[0]
    since = best + int(after[0]) if len(after) else len(smooth) - 1
    return Fall(
        best=float(smooth[best]),
        last=float(smooth[-1]),
        best_step=int(rows[best + k - 1]["step"]),
        since_step=int(rows[since + k - 1]["step"]),
        share=fall / abs(float(smooth[best])) if smooth[best] else 0.0,
        is_certain=fall > SIGMAS * math.sqrt(float(squares[best] + squares[-1])) and fall > 0,
    )


def accuracy_fall(data: RunData) -> Fall | None:
    """How far held-out accuracy fell from its best evaluation to the last one."""
    rows = [row for row in data.evals if math.isfinite(number(row, "accuracy"))]
    if len(rows) < 2:
        return None
    best = max(rows, key=lambda row: number(row, "accuracy"))
    last = rows[-1]
    high, low = number(best, "accuracy"), number(last, "accuracy")
    variance = sum(
        p * (1 - p) / max(1.0, number(row, "num_scored", 1.0))
        for row in (best, last)
        for p in [min(1.0, max(0.0, number(row, "accuracy")))]
    )
    since = next(row for row in rows[rows.index(best) :] if number(row, "accuracy") <= (high + low) / 2)
    return Fall(
        best=high,
        last=low,
        best_step=int(best["version"]),
        since_step=int(since["version"]),
        share=(high - low) / abs(high) if high else 0.0,
        is_certain=high - low > SIGMAS * math.sqrt(variance),
    )


# ------------------------------------------------------------ collapse


def _collapse(data: RunData, signs: Sequence[Sign]) -> list[Rated]:
    falls = [("reward", "step", reward_fall(data)), ("held-out accuracy", "version", accuracy_fall(data))]
    certain = [(name, unit, fall) for name, unit, fall in falls if fall is not None and fall.is_notable]
    if not certain:
        return []
    certain.sort(key=lambda one: -one[2].share)
    words = [
        f"{name} fell from {figure(fall.best)} ({unit} {fall.best_step}) to {figure(fall.last)}"
        for name, unit, fall in certain
    ]
    worst = certain[0][2]
    is_bad = worst.share >= REWARD_FALL_BAD
    title = ("The policy collapsed: " if is_bad else "The policy is getting worse: ") + " and ".join(words)
    finding = Finding(
        "bad" if is_bad else "warning",
        title,
        sentences(f"Half of the fall was done by {certain[0][1]} {worst.since_step}", _sign_words(signs)),
        _cure(data, signs, certain[0][2].best_step),
    )
    return [Rated(Weight.POLICY, finding, worst.share)]


def _unstable(data: RunData, signs: Sequence[Sign]) -> list[Rated]:
    """The reward has not fallen (yet), but updates look as they do before it does."""
    rise = trend(data, "reward_mean")
    serious = [sign for sign in signs if sign.cause != "entropy" or not rise.late > rise.early]
    if not serious:
        return []
    severity: Severity = "bad" if len({sign.words.split()[0] for sign in serious}) >= 3 else "warning"
    title = f"Updates are unstable: {serious[0].words}"
    finding = Finding(severity, title, _sign_words(serious[1:]), _cure(data, serious, serious[0].step))
    return [Rated(Weight.POLICY, finding, len(serious))]


def _sign_words(signs: Sequence[Sign]) -> str:
    if not signs:
        return ""
    first = min((sign for sign in signs if sign.step), key=lambda sign: sign.step, default=None)
    begin = f"; the first sign came at step {first.step}" if first is not None else ""
    return sentences(f"With it: {', '.join(sign.words for sign in signs)}{begin}")


def _cure(data: RunData, signs: Sequence[Sign], step: int) -> str:
    causes = {sign.cause for sign in signs}
    lr, bound = data.setting("trainer.optimizer.lr"), data.setting("staleness.max_staleness")
    ways = []
    if not causes or causes & {"lr", "stale", "ratio", "length"}:
        change = f" from {lr:g} to {lr / 10:g} or less" if isinstance(lr, int | float) and lr > 0 else ""
        ways.append(f"lower trainer.optimizer.lr{change} (with warmup_steps)")
    if "stale" in causes and isinstance(bound, int) and bound > 1:
        ways.append(f"lower staleness.max_staleness from {bound} to {bound // 2}")
    if "stale" in causes and _is_naive(data):
        ways.append("take the decoupled loss (trainer.loss.proximal: recompute, trainer.loss.weight.mode: truncate)")
    elif "stale" in causes and data.setting("trainer.loss.weight.mode") == "exact":
        ways.append("bound the correction weight (trainer.loss.weight.mode: truncate)")
    if "ratio" in causes and data.setting("trainer.loss.dual_clip") is None:
        ways.append("bound what one token can do (trainer.loss.dual_clip: 3)")
    if "entropy" in causes:
        ways.append("keep entropy up (trainer.loss.entropy_coef, or eps_high above eps_low)")
    if not data.setting("trainer.loss.kl_coef", 0.0):
        ways.append("hold the policy near its start (trainer.loss.kl_coef)")
    if "length" in causes:
        ways.append("see whether the reward pays for long or empty answers (areal-like samples)")
    return f"{capital('; '.join(ways))}. What was learned lies in the checkpoints up to step {step}, if kept"


def _signs(data: RunData) -> list[Sign]:
    """What goes with a collapse, most telling first."""
    found = _away(data)
    outside = series(data.steps, "clip_fraction")
    truncated, masked = (series(data.steps, f"weight_{how}_share") for how in ("truncated", "masked"))
    for values, words, is_over, cause in (
        (outside, "share of tokens outside the trust region rose to", lambda v: v >= CLIP_LARGE, "lr"),
        (truncated, "share of tokens with a truncated weight rose to", lambda v: v >= WEIGHT_CUT_LARGE, "stale"),
        (masked, "share of tokens with a masked weight rose to", lambda v: v >= WEIGHT_CUT_LARGE, "stale"),
    ):
        found += _beyond(data, values, words, is_over, cause)
    ratios, words = series(data.steps, "ratio_max"), "largest ratio within a step rose to"
    found += _lasting(data, ratios, RATIO_STEPS, words, lambda v: v >= RATIO_LARGE, "ratio")
    found += _entropy(data) + _gradients(data) + _lengths(data) + _cut(data)
    return found


def _is_naive(data: RunData) -> bool:
    """Ordinary PPO: the policy that sampled is the one its ratios count from."""
    return data.setting("trainer.loss.proximal") == "behaviour"


def _too_far_at_once(data: RunData) -> list[Sign]:
    """Within its first steps the policy leaves the one that sampled, by the weights, faster than versions age."""
    ess = series(data.steps, "ess")
    falls = (_ess_at_first(ess) - ess) / np.maximum(series(data.steps, "staleness_mean"), 1.0)
    words = "effective sample size of the weights falls with each version by"
    return _lasting(data, falls, ESS_STEPS, words, lambda v: v >= ESS_FALL_PER_VERSION)


def _ess_at_first(ess: np.ndarray) -> float:
    """The best of the first steps, whose samples are of their own policy; NaN where none is known."""
    return max(_known(ess[:ESS_STEPS]), default=math.nan)


def _away(data: RunData) -> list[Sign]:
    """The policy that trains is far from the one that sampled.

    By the weights, and by KL: at the beginning of the step, or in ordinary PPO, which has no weights and does not look
    at that one, on average over its updates.
    """
    ess = series(data.steps, "ess")
    enough = _ess_at_first(ess) - ESS_FALL
    found = _lasting(data, ess, ESS_STEPS, "effective sample size of the weights fell to", lambda v: v <= enough)
    is_naive = _is_naive(data)
    if is_naive and not any(_known(series(data.steps, "staleness_mean"))):
        return found  # that KL would be of the step's own updates
    drift = series(data.steps, "kl_proximal_current" if is_naive else "kl_behaviour_proximal")
    limit = min(_known(drift[:KL_STEPS]), default=math.nan) + (KL_LARGE_NAIVE if is_naive else KL_LARGE)
    return found + _lasting(data, drift, KL_STEPS, "KL to the sampling policy rose to", lambda v: v >= limit)


def _lasting(
    data: RunData,
    values: np.ndarray,
    num_steps: int,
    words: str,
    is_over: Callable[[float], bool],
    cause: str = "stale",
) -> list[Sign]:
    """The median of so many steps is past a threshold, now or in a fifth of the run."""
    if len(values) < num_steps:
        return []
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, num_steps), axis=1)
    over = np.array([is_over(value) for value in medians], dtype=bool)  # NaN compares as False
    if not over.any() or not (over[-1] or over.mean() >= 0.2):
        return []
    first = int(data.steps[int(np.argmax(over)) + num_steps - 1]["step"])
    worst = medians[over].min() if is_over(-math.inf) else medians[over].max()
    return [Sign(f"{words} {figure(float(worst))}", first, cause)]


def _beyond(data: RunData, values: np.ndarray, words: str, is_over: Callable[[float], bool], cause: str) -> list[Sign]:
    """A number past its threshold: the mean of the late ones, or a fifth of all."""
    over = np.array([is_over(value) for value in values], dtype=bool)  # NaN compares as False
    k = window(len(values))
    if not over.any() or not (is_over(_mean(values[-k:])) or over.mean() >= 0.2):
        return []
    return [Sign(f"{words} {figure(float(np.nanmax(values[over])))}", _first_step(data, over), cause)]


def _entropy(data: RunData) -> list[Sign]:
    found = trend(data, "entropy")
    words = f"from {figure(found.early)} to {figure(found.late)}"
    if found.ratio <= ENTROPY_COLLAPSED:
        return [Sign(f"entropy collapsed {words}", _first_step(data, found.values <= found.early / 4), "entropy")]
    if found.ratio >= ENTROPY_EXPLODED:
        return [Sign(f"entropy exploded {words}", _first_step(data, found.values >= found.early * 2), "lr")]
    return []


def _gradients(data: RunData) -> list[Sign]:
    values = series(data.steps, "grad_norm_max")
    early = float(np.median(_known(values[:GRAD_STEPS]) or [math.nan]))
    words = f"gradient norm grew from {figure(early)} to"
    if grown := _lasting(data, values, GRAD_STEPS, words, lambda v: v >= GRAD_GROWTH * early > 0, "lr"):
        return grown
    positive = values[values > 0]
    median = float(np.median(positive)) if len(positive) else math.nan
    over = values >= GRAD_SPIKE * median
    if over.any():
        words = f"gradient norm reached {figure(float(np.nanmax(values)))}, where {figure(median)} is usual"
        return [Sign(words, _first_step(data, over), "lr")]
    return []


def _lengths(data: RunData) -> list[Sign]:
    found = trend(data, "response_len_mean")
    words = f"from {figure(found.early)} to {figure(found.late)} tokens"
    if found.ratio >= LENGTH_CHANGE:
        return [Sign(f"answers grew {words}", _first_step(data, found.values >= found.early * 2), "length")]
    if found.ratio <= 1 / LENGTH_CHANGE:
        return [Sign(f"answers shrank {words}", _first_step(data, found.values <= found.early / 2), "length")]
    return []


def _cut(data: RunData) -> list[Sign]:
    found = trend(data, "cut_share")
    if not found.late - found.early >= CUT_RISE:
        return []
    words = f"cut answers rose from {percent(found.early)} to {percent(found.late)}"
    return [Sign(words, _first_step(data, found.values >= found.early + CUT_RISE), "length")]


def _skipped(data: RunData) -> list[Rated]:
    skipped, applied = (float(np.nansum(series(data.steps, key))) for key in ("skipped_updates", "updates"))
    lost = sum("loss" in row and row["loss"] is None for row in data.steps)
    share = skipped / (skipped + applied) if skipped else lost / max(1, len(data.steps))
    if share < SKIPPED_NOTABLE:
        return []
    severity: Severity = "bad" if share >= 0.5 else "warning"
    finding = Finding(
        severity,
        f"{percent(share)} of the updates were skipped: loss or gradient was not a finite number",
        "The policy did not change in them; the samples are used up all the same",
        "Lower trainer.optimizer.lr; on a GPU try trainer.precision: float32 to see whether the precision is at fault",
    )
    return [Rated(Weight.POLICY, finding, share)]


# ------------------------------------------------------------ small parts


def _mean(values: np.ndarray) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan


def _known(values: np.ndarray) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def _first_step(data: RunData, is_over: np.ndarray) -> int:
    places = np.nonzero(is_over)[0]
    return int(data.steps[places[0]]["step"]) if len(places) else 0
