"""Signs that accompany or precede a collapse of the policy, in the series of the steps.

Computes trends, applies thresholds and finds the first step that shows a sign. Findings are made in learning.py.

Signs compare a run with itself, early steps with late ones, or are shares and KL divergences, which have no scale. They
therefore apply to any reward, model and machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from controller.report.data import RunData, series
from controller.report.finding import figure, percent

ENTROPY_COLLAPSED = 0.1
"""Late entropy as a share of the early one. A policy that learns well also loses much entropy (the quickstart ends at
0.13 to 0.25), so alone this is a warning only if the reward did not rise.
"""
ENTROPY_EXPLODED = 3.0
ESS_FALL = 0.025
"""Decrease of the effective share of the samples under the correction weights, relative to the first steps, whose
samples are on-policy: the loss there is due to the engine's different arithmetic. Median of ESS_STEPS steps. On seeds 3
to 10 of benchmarks/divergence.py every diverging run exceeded it by its step 7, and stable runs lost at most 0.019 in
single steps; in benchmarks/staleness.py, of five at bound 16 the two that lost as much on average ended lowest.
"""
ESS_STEPS = 3
ESS_USUAL = 0.9
"""Above this share a run whose reward rises is not reported: configs/own_data.yaml falls to 0.94 while its reward rises
from 0.05 to 0.35.
"""
ESS_FALL_PER_VERSION = 0.005
"""The same in the very first steps, per version of the samples' staleness, since samples are not old yet: on seeds 3 to
16 diverging runs exceeded it by step 4 or 5, and stable runs stayed below 0.001 there. In later steps it would cause
false alarms.
"""
KL_LARGE = 0.03
"""KL divergence in nats per token between the sampling and the trained policy, above that of the first steps. Median of
KL_STEPS: a single large step is common and harmless. Stable runs with four mini-batches stay below 0.016.
"""
KL_LARGE_NAIVE = 0.01
"""The same for ordinary PPO, whose clipping keeps the policy near the sampling policy: stable runs stay below 0.005."""
KL_STEPS = 5
WEIGHT_CUT_LARGE = 0.1
"""Share of tokens whose correction weight was truncated or masked: healthy runs have 0.001."""
CLIP_LARGE = 0.4
"""Share of tokens outside the trust region; 0.1 to 0.2 is usual with several mini-batches."""
RATIO_LARGE = 50.0
"""Largest ratio of the step's policy to the one it started from, median of RATIO_STEPS: a single token in one step may
have any ratio (1,199 in a run that ended at 1.000); values of a few are usual with several mini-batches.
"""
RATIO_STEPS = 3
GRAD_GROWTH = 10.0
"""Gradient norm against that of the first steps, medians of GRAD_STEPS: in single steps of stable runs it is 20 times
as large, and in some that end at 1.000 it stays ten times as large for a while. Alone it is reported only if the reward
does not rise.
"""
GRAD_STEPS = 3
GRAD_SPIKE = 100.0
"""Ratio of the largest gradient norm to the median one, and the ratio that is reported alone."""
LENGTH_CHANGE = 3.0
"""Ratio of the mean length of late answers to early ones; a policy that learns to reason may double it."""
CUT_RISE = 0.5
"""Increase of the share of answers cut at the limit, from at most half before."""


@dataclass(frozen=True)
class Trend:
    """Trend of one number over the steps: means of its first and last few values, NaN if not known."""

    early: float
    late: float
    values: np.ndarray

    @property
    def ratio(self) -> float:
        """late / early; NaN if early is not positive."""
        return self.late / self.early if self.early > 0 else math.nan


@dataclass(frozen=True)
class Sign:
    """A sign of a collapse; `step`: the first step that shows it, 0 if unknown."""

    words: str
    step: int
    cause: str
    """Which settings to change: `lr`, `stale`, `ratio`, `entropy`, `length`, `cut`."""
    is_usual: bool = False
    """Stable runs may show it too: it is reported if the reward does not rise, or together with a sign that they do not
    show.
    """


def trend(data: RunData, key: str) -> Trend:
    """Early and late mean of one number of the steps."""
    values = series(data.steps, key)
    k = window(len(values))
    return Trend(_mean(values[:k]), _mean(values[-k:]), values)


def window(num_steps: int) -> int:
    """Steps in one mean: a fifth of the run, at least 2, at most 20."""
    return max(2, min(20, num_steps // 5))


def signs_of(data: RunData) -> list[Sign]:
    """All signs of a run, most significant first."""
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
    """Signs that need no trend, for a run that has just started."""
    return [*_too_far_at_once(data), *_away(data)]


def is_naive_ppo(data: RunData) -> bool:
    """Return whether the objective is ordinary PPO: its ratios are relative to the sampling policy."""
    return data.setting("trainer.loss.proximal") == "behaviour"


def _too_far_at_once(data: RunData) -> list[Sign]:
    """In the first steps the policy diverges from the sampling policy, by the weights, faster than versions age."""
    ess = series(data.steps, "ess")
    falls = (_ess_at_first(ess) - ess) / np.maximum(series(data.steps, "staleness_mean"), 1.0)
    words = "effective sample size of the weights falls with each version by"
    return _lasting(data, falls, ESS_STEPS, words, lambda v: v >= ESS_FALL_PER_VERSION)


def _ess_at_first(ess: np.ndarray) -> float:
    """The best value of the first steps, whose samples are on-policy; NaN if none is known."""
    return max(_known(ess[:ESS_STEPS]), default=math.nan)


def _away(data: RunData) -> list[Sign]:
    """The trained policy is far from the sampling policy.

    Measured by the weights, and by KL: at the beginning of the step, or for ordinary PPO, which has no weights, on
    average over the updates.
    """
    ess = series(data.steps, "ess")
    enough = _ess_at_first(ess) - ESS_FALL
    words = "effective sample size of the weights fell to"
    low = _lasting(data, ess, ESS_STEPS, words, lambda v: v <= min(enough, ESS_USUAL))
    found = low or [
        replace(sign, is_usual=True) for sign in _lasting(data, ess, ESS_STEPS, words, lambda v: v <= enough)
    ]
    is_naive = is_naive_ppo(data)
    if is_naive and not any(_known(series(data.steps, "staleness_mean"))):
        return found  # this KL would be due to the step's own updates
    name = "kl_proximal_current" if is_naive else "kl_behaviour_proximal"
    if data.setting("trainer.loss.proximal") == "version":  # its proximal policy is close to the sampling policy
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
    """The median of the given number of steps exceeds a threshold, now or in a fifth of the run."""
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
    """A number exceeds its threshold: the mean of the late values, or a fifth of all values."""
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
    words = f"the share of truncated answers rose from {percent(found.early)} to {percent(found.late)}"
    return [Sign(words, _first_step(data, found.values >= found.early + CUT_RISE), "cut")]


# ------------------------------------------------------------ small parts


def _mean(values: np.ndarray) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan


def _known(values: np.ndarray) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def _first_step(data: RunData, is_over: np.ndarray) -> int:
    places = np.nonzero(is_over)[0]
    return int(data.steps[places[0]]["step"]) if len(places) else 0
