"""What goes with a collapse of the policy, or comes before it: signs in the series of the steps.

Owns: trends over the steps, thresholds, which step showed a sign first. Refuses: whether that is worth a word
(learning.py).

Signs compare a run with itself, early steps with late ones, or are shares and KL, which have no scale: they hold for
any reward, model and machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from controller.report.data import RunData, series
from controller.report.finding import figure, percent

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
large, and it stays ten times as large for a while in some that end at 1.000: reported alone where the reward does not
rise.
"""
GRAD_STEPS = 3
GRAD_SPIKE = 100.0
"""Largest gradient norm against the median one, and what tells by itself."""
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
class Sign:
    """Something that goes with a collapse; `step`: the first step that shows it, 0 where none can be named."""

    words: str
    step: int
    cause: str
    """`lr`, `stale`, `ratio`, `entropy`, `length`: what to turn."""
    is_usual: bool = False
    """Sound runs have it too: reported where the reward does not rise, or alongside a sign that they do not have."""


def trend(data: RunData, key: str) -> Trend:
    """Early and late mean of one number of the steps."""
    values = series(data.steps, key)
    k = window(len(values))
    return Trend(_mean(values[:k]), _mean(values[-k:]), values)


def window(num_steps: int) -> int:
    """Steps in one mean: a fifth of the run, at least 2, at most 20."""
    return max(2, min(20, num_steps // 5))


def signs_of(data: RunData) -> list[Sign]:
    """All that a run shows, most telling first."""
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


def early_signs_of(data: RunData) -> list[Sign]:
    """Those that need no trend, of a run that has only begun."""
    return [*_too_far_at_once(data), *_away(data)]


def is_naive_ppo(data: RunData) -> bool:
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
    is_naive = is_naive_ppo(data)
    if is_naive and not any(_known(series(data.steps, "staleness_mean"))):
        return found  # that KL would be of the step's own updates
    name = "kl_proximal_current" if is_naive else "kl_behaviour_proximal"
    if data.setting("trainer.loss.proximal") == "version":  # whose p is near the sampling policy, however old that is
        name = "kl_staleness"
    drift = series(data.steps, name)
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
        since = _first_step(data, found.values <= found.early / 4)
        return [Sign(f"entropy collapsed {words}", since, "entropy", is_usual=True)]
    if found.ratio >= ENTROPY_EXPLODED:
        return [Sign(f"entropy exploded {words}", _first_step(data, found.values >= found.early * 2), "lr")]
    return []


def _gradients(data: RunData) -> list[Sign]:
    values = series(data.steps, "grad_norm_max")
    early = float(np.median(_known(values[:GRAD_STEPS]) or [math.nan]))

    def growth(times: float) -> list[Sign]:
        words = f"gradient norm grew from {figure(early)} to"
        return _lasting(data, values, GRAD_STEPS, words, lambda v: v >= times * early > 0, "lr")

    alone = growth(GRAD_SPIKE) or _spike(data, values)
    return [replace(sign, is_usual=not alone) for sign in growth(GRAD_GROWTH)] or alone


def _spike(data: RunData, values: np.ndarray) -> list[Sign]:
    positive = values[values > 0]
    median = float(np.median(positive)) if len(positive) else math.nan
    over = values >= GRAD_SPIKE * median
    if not over.any():
        return []
    words = f"gradient norm reached {figure(float(np.nanmax(values)))}, where {figure(median)} is usual"
    return [Sign(words, _first_step(data, over), "lr")]


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


# ------------------------------------------------------------ small parts


def _mean(values: np.ndarray) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan


def _known(values: np.ndarray) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def _first_step(data: RunData, is_over: np.ndarray) -> int:
    places = np.nonzero(is_over)[0]
    return int(data.steps[places[0]]["step"]) if len(places) else 0
