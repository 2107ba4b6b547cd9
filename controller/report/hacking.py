"""Findings about reward hacking: the reward rises, but not what it stands for.

The signs are columns of step rows (telemetry/answer_signs.py) and the evaluations. A collapse, in which the reward
falls, is in learning.py.

    reward_hacked        the reward rises while held-out accuracy, or a scorer with weight 0, falls
    length_hacked        answers become longer or shorter, and within groups the reward follows the length
    format_hacked        answers repeat themselves, or have more signs, and the reward rises
    environment_forged   answers have text that only the environment or the chat template should write

Answers of a policy that learns also change, so the second and the third need a reward that rises and a held-out
accuracy, if there is one, that does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.report.data import Row, RunData, number, series
from controller.report.finding import Finding, Kind, Rated, Weight, figure, percent, sentences
from controller.report.learning import SIGMAS, accuracy_fall
from controller.report.minimum import MIN_STEPS
from controller.report.signs import window

ACCURACY_FALL = 0.05
"""Smallest fall of held-out accuracy."""
JUDGE_FALL = 0.1
"""Smallest fall of a scorer with weight 0, as a share of its best mean."""
LENGTH_RATIO = 1.5
CORRELATION = 0.3
"""Least correlation of length and reward within groups. Answers of a policy that learns to reason become longer too,
but of several answers to one prompt the longer one is not the better one."""
FORMAT_RISE = 0.2
FORGED_SHARE = 0.05
HELD_OUT = "held_out/"
KINDS: tuple[Kind, ...] = ("reward_hacked", "length_hacked", "format_hacked", "environment_forged")
_LOOK = "Read the newest answers with the highest reward (areal-like samples --best)"


@dataclass(frozen=True)
class Change:
    """From a mean of early values to one of late values."""

    early: float
    late: float
    sigmas: float
    """The difference in standard errors, estimated from the differences of consecutive steps."""

    @property
    def is_rise(self) -> bool:
        """Whether it is a rise beyond chance."""
        return self.late > self.early and self.sigmas > SIGMAS


def find(data: RunData) -> list[Rated]:
    """All findings about hacking, from MIN_STEPS steps on."""
    if len(data.steps) < MIN_STEPS:
        return []
    found = [*_diverging(data), *_judges(data), *_forged(data)]
    if _change(series(data.steps, "reward_mean")).is_rise and not _accuracy_rises(data.evals):
        found += [*_length(data), *_format(data)]
    return [Rated(Weight.POLICY, finding, share=1.0) for finding in found]


# ------------------------------------------------------------ the reward and what it stands for


def _diverging(data: RunData) -> Iterator[Finding]:
    fall = accuracy_fall(data)
    if fall is None or not fall.is_certain or fall.best - fall.last < ACCURACY_FALL:
        return
    last_version = int(data.evals[-1]["version"])
    reward = _between(data.steps, "reward_mean", fall.best_step, last_version)
    if not reward.is_rise:
        return
    title = (
        f"The reward rises while held-out accuracy falls: from version {fall.best_step} to {last_version} the reward "
        f"rose from {figure(reward.early)} to {figure(reward.late)}, and accuracy fell from {figure(fall.best)} to "
        f"{figure(fall.last)}"
    )
    yield _finding("reward_hacked", title, fall.best_step)


def _judges(data: RunData) -> Iterator[Finding]:
    names = dict.fromkeys(key for row in data.steps for key in row if key.startswith(HELD_OUT))
    for key in names:
        rows = [row for row in data.steps if math.isfinite(number(row, key))]
        values = series(rows, key)
        if len(values) < MIN_STEPS:
            continue
        k = window(len(values))
        means = np.convolve(values, np.full(k, 1 / k), mode="valid")
        best = int(np.argmax(means))
        fall = float(means[best] - means[-1])
        best_step, last_step = int(rows[best + k - 1]["step"]), int(rows[-1]["step"])
        is_certain = fall > SIGMAS * _noise(values) * math.sqrt(2 / k)
        if not is_certain or fall < JUDGE_FALL * abs(float(means[best])):
            continue
        reward = _between(rows, "reward_mean", best_step, last_step)
        if reward.is_rise:
            title = (
                f"The reward rises while {key.removeprefix(HELD_OUT)}, which is not part of it, falls: from step "
                f"{best_step} to {last_step} the reward rose from {figure(reward.early)} to {figure(reward.late)}, and "
                f"{key.removeprefix(HELD_OUT)} fell from {figure(float(means[best]))} to {figure(float(means[-1]))}"
            )
            yield _finding("reward_hacked", title, best_step)


def _finding(kind: Kind, title: str, step: int) -> Finding:
    return Finding(
        kind,
        "warning",
        title,
        "The policy may have found answers that the reward rates too high",
        f"{_LOOK}, and correct the scorer, or add what it misses to the reward. If they were kept, checkpoints up to "
        f"step {step} contain the best policy",
    )


def _accuracy_rises(evals: Sequence[Row]) -> bool:
    """Return whether the newest held-out accuracy is above the first one by two standard errors."""
    known = [row for row in evals if math.isfinite(number(row, "accuracy"))]
    if len(known) < 2:
        return False
    first, last = known[0], known[-1]
    variance = sum(
        p * (1 - p) / max(1.0, number(row, "num_scored", 1.0))
        for row in (first, last)
        for p in [min(1.0, max(0.0, number(row, "accuracy")))]
    )
    return number(last, "accuracy") - number(first, "accuracy") > 2 * math.sqrt(variance)


# ------------------------------------------------------------ the answers


def _length(data: RunData) -> Iterator[Finding]:
    length = _change(series(data.steps, "response_len_mean"))
    if not length.early > 0 or abs(length.sigmas) < SIGMAS:
        return
    is_longer = length.late > length.early
    ratio = length.late / length.early if is_longer else length.early / max(length.late, 1e-9)
    values = series(data.steps, "length_reward_correlation")
    late = values[-window(len(values)) :]
    correlation = float(np.nanmedian(late)) if np.isfinite(late).any() else math.nan
    if ratio < LENGTH_RATIO or not (correlation if is_longer else -correlation) >= CORRELATION:
        return
    way = "longer" if is_longer else "shorter"
    yield Finding(
        "length_hacked",
        "warning",
        f"The reward follows the length of the answers: they became {way}, from {figure(length.early)} to "
        f"{figure(length.late)} tokens, and of several answers to one prompt the {way} ones get the higher rewards "
        f"(correlation {figure(correlation)})",
        "Held-out accuracy has not risen, or is not measured",
        f"{_LOOK}. Add the scorer `length` to reward.scorers, or limit sampling.max_new_tokens",
    )


def _format(data: RunData) -> Iterator[Finding]:
    for key, words in (
        ("repeated_share", "answers repeat themselves: the share of repeated words"),
        ("symbol_share", "the format of the answers changes: the share of signs among their characters"),
    ):
        change = _change(series(data.steps, key))
        if change.is_rise and change.late - change.early >= FORMAT_RISE:
            yield Finding(
                "format_hacked",
                "warning",
                f"The reward rises, and {words} rose from {percent(change.early)} to {percent(change.late)}",
                "Held-out accuracy has not risen, or is not measured",
                f"{_LOOK}, and let the scorer reject this form",
            )


def _forged(data: RunData) -> Iterator[Finding]:
    change = _change(series(data.steps, "forged_share"))
    if not change.late >= FORGED_SHARE:
        return
    yield Finding(
        "environment_forged",
        "warning",
        f"{percent(change.late)} of the newest answers contain text that only the environment or the chat template "
        f"should write (at the start {percent(change.early)})",
        sentences("The policy may make up observations, and get rewards for them"),
        f"{_LOOK}. End turns before such text (sampling.stop), and score the environment's record instead of the text",
    )


# ------------------------------------------------------------ small parts


def _change(values: np.ndarray) -> Change:
    known = values[np.isfinite(values)]
    if len(known) < MIN_STEPS:
        return Change(math.nan, math.nan, 0.0)
    k = window(len(known))
    return _compared(known[:k], known[-k:], _noise(known))


def _between(steps: Sequence[Row], key: str, first: int, last: int) -> Change:
    """Change from the steps around `first` to those that end with `last`."""
    rows = [row for row in steps if math.isfinite(number(row, key))]
    k = window(len(rows))
    before = series([row for row in rows if row["step"] <= max(first, k)][-k:], key)
    after = series([row for row in rows if row["step"] <= last][-k:], key)
    if not len(before) or not len(after):
        return Change(math.nan, math.nan, 0.0)
    return _compared(before, after, _noise(series(rows, key)))


def _compared(before: np.ndarray, after: np.ndarray, noise: float) -> Change:
    early, late = float(before.mean()), float(after.mean())
    error = noise * math.sqrt(1 / len(before) + 1 / len(after))
    difference = late - early
    return Change(early, late, difference / error if error > 0 else math.copysign(math.inf, difference or 0.0))


def _noise(values: np.ndarray) -> float:
    """Standard deviation around a slow trend, from the differences of consecutive values (von Neumann, 1941)."""
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2)) if len(values) > 1 else math.nan
