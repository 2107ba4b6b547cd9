"""Findings about reward hacking: the reward rises, but not what it stands for.

The signs are columns of step rows (telemetry/answer_signs.py) and the evaluations. A collapse, in which the reward
falls, is in learning.py.

    reward_hacked        the reward rises while held-out accuracy, or a scorer with `held_out: true`, falls
    length_hacked        answers become longer or shorter, and within groups the reward follows the length
    format_hacked        answers repeat themselves, or have more signs, and the reward rises
    environment_forged   answers have text that only the environment or the chat template should write

Answers of a policy that learns also change, so the second and the third need a reward that rises and a held-out
accuracy that does not: one evaluation before the change and two after it. Without them they are only remarks.

The best of several means is high by chance. The level of a fall is therefore divided by the number of means among which
the best one is chosen (Bonferroni), for evaluations also by the number of looks, and the fall must also be seen in the
mean before the last one. Evaluations are compared on the rows that they share (paired.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from controller.report.data import Row, RunData, number, series
from controller.report.finding import Finding, Kind, Rated, Severity, Weight, figure, percent, sentences
from controller.report.learning import SIGMAS
from controller.report.minimum import MIN_STEPS
from controller.report.paired import ACCURACY, HELD_OUT, compare, held_out_names, known, sigmas
from controller.report.signs import window

ACCURACY_FALL = 0.05
"""Smallest fall of held-out accuracy."""
JUDGE_FALL = 0.1
"""Smallest fall of a held-out scorer, as a share of its best mean."""
MIN_JUDGED = 20
"""Steps from which the noise of a held-out scorer can be distinguished from its trend."""
MAX_CORRELATION = 0.97
"""Largest correlation of consecutive steps that is assumed."""
LENGTH_RATIO = 1.5
CORRELATION = 0.3
"""Least correlation of length and reward within groups. Answers of a policy that learns to reason become longer too,
but of several answers to one prompt the longer one is not the better one."""
FORMAT_RISE = 0.2
FORGED_SHARE = 0.05
HELD_OUT_ERROR = "held_out_error/"
"""Prefix of the standard error of a held-out scorer's mean, in step rows: from the means of the step's groups."""
WAVERING = 1.0
"""Standard errors of the autocovariance of a held-out scorer from which the policy itself is taken to waver."""
WAVERING_CORRELATION = 0.9
"""Assumed correlation of consecutive steps of that wavering."""
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
    """A fall of held-out accuracy, or of a held-out scorer, from the best evaluation to the last two, over the rows
    that all three have.
    """
    evals = known(data.evals)
    for key in (ACCURACY, *held_out_names(evals)) if len(evals) >= 3 else ():
        *earlier, before, last = evals
        compared = [(row, same) for row in earlier if (same := compare(row, (before, last), key)) is not None]
        if not compared:
            continue
        best, same = max(compared, key=lambda pair: pair[1].fall)
        least = ACCURACY_FALL if key == ACCURACY else JUDGE_FALL * abs(same.early)
        # The best of as many evaluations, at as many looks.
        if same.early - max(same.late) < least or not same.is_certain(len(compared) * len(evals)):
            continue
        best_version, last_version = int(best["version"]), int(last["version"])
        reward = _between(data.steps, "reward_mean", best_version, last_version)
        if reward.is_rise:
            what, short = ("held-out accuracy", "accuracy") if key == ACCURACY else (key.removeprefix(HELD_OUT),) * 2
            title = (
                f"The reward rises while {what} falls: from version {best_version} to {last_version} the "
                f"reward rose from {figure(reward.early)} to {figure(reward.late)}, and {short} fell from "
                f"{figure(same.early)} to {figure(same.late[-1])}"
            )
            yield _finding("reward_hacked", title, best_version)
            return


def _judges(data: RunData) -> Iterator[Finding]:
    names = dict.fromkeys(key for row in data.steps for key in row if key.startswith(HELD_OUT))
    for key in names:
        rows = [row for row in data.steps if math.isfinite(number(row, key))]
        values = series(rows, key)
        if len(values) < MIN_JUDGED:
            continue
        k = window(len(values))
        errors = series(rows, f"{HELD_OUT_ERROR}{key.removeprefix(HELD_OUT)}")
        best = _fall_of_means(values, k) if not np.isfinite(errors).any() else _fall_of_means(values, k, num_rules=2)
        if best is None and _falls_steadily(values, errors):
            best = 0
        if best is None:
            continue
        high, low = float(values[best : best + k].mean()), float(values[-k:].mean())
        best_step, last_step = int(rows[best + k - 1]["step"]), int(rows[-1]["step"])
        reward = _between(rows, "reward_mean", best_step, last_step)
        if reward.is_rise:
            title = (
                f"The reward rises while {key.removeprefix(HELD_OUT)}, which is not part of it, falls: from step "
                f"{best_step} to {last_step} the reward rose from {figure(reward.early)} to {figure(reward.late)}, and "
                f"{key.removeprefix(HELD_OUT)} fell from {figure(high)} to {figure(low)}"
            )
            yield _finding("reward_hacked", title, best_step)


def _fall_of_means(values: np.ndarray, k: int, num_rules: int = 1) -> int | None:
    """Place of the best mean of k steps, if the last two means are below it by more than chance; else None. The noise
    is estimated from the means of the steps alone.

    num_rules: number of rules that look for a fall.
    """
    means = np.convolve(values, np.full(k, 1 / k), mode="valid")
    best = int(np.argmax(means[: -k - 1]))
    fall = float(means[best] - max(means[-1], means[-k - 1]))
    if fall < JUDGE_FALL * abs(float(means[best])):
        return None
    error, freedom = _error_of_mean(values, k)
    return best if fall > sigmas(num_rules * len(means), freedom) * error * math.sqrt(2) else None


def _falls_steadily(values: np.ndarray, errors: np.ndarray) -> bool:
    """Whether the line through all steps falls by more than chance. The errors of the steps' means are known from the
    numbers and values of their samples, so this needs far fewer steps than `_fall_of_means`.

    A policy that wavers from step to step adds to these errors. Its part is estimated from the autocovariance of the
    steps, plus two standard errors; if it is clearly there, this rule does not apply.
    """
    n = len(values)
    x = np.arange(n) - (n - 1) / 2
    power = float(x @ x)
    slope = float(x @ values) / power
    start = float(values.mean()) - slope * (n - 1) / 2
    if not np.isfinite(errors).any() or -slope * (n - 1) < JUDGE_FALL * abs(start):
        return False
    sampling = float(np.nanmean(errors**2))
    rest = _around_two_lines(values)
    variance = float(rest @ rest) / (n - 4)
    lags = (1, 2)
    # Residuals of four fitted numbers have a covariance of about -2 variance / n.
    covariance = sum(float(rest[lag:] @ rest[:-lag]) / (n - lag) for lag in lags) / len(lags) + 2 * variance / n
    error = variance / math.sqrt(n * len(lags))
    if covariance > WAVERING * error:
        return False
    wavering = max(0.0, covariance + 2 * error) / WAVERING_CORRELATION**1.5
    correlation = WAVERING_CORRELATION ** np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    of_slope = math.sqrt(sampling * power + wavering * float(x @ correlation @ x)) / power
    return -slope > sigmas(2) * of_slope


def _finding(kind: Kind, title: str, step: int) -> Finding:
    return Finding(
        kind,
        "warning",
        title,
        "The policy may have found answers that the reward rates too high",
        f"{_LOOK}, and correct the scorer, or add a scorer for what it does not measure. The best policy is in the "
        f"checkpoints up to step {step}, if these were kept",
    )


def _accuracy_rises(evals: Sequence[Row]) -> bool:
    """Return whether the newest held-out accuracy is above the first one of the same rows by two standard errors."""
    *earlier, last = known(evals) or [{}]
    same = next((one for row in earlier if (one := compare(row, (last,))) is not None), None)
    return same is not None and -same.fall > 2 * same.error


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
    severity = _severity(data, "response_len_mean", length)
    if severity is None:
        return
    way = "longer" if is_longer else "shorter"
    yield Finding(
        "length_hacked",
        severity,
        f"The reward follows the length of the answers: they became {way}, from {figure(length.early)} to "
        f"{figure(length.late)} tokens, and among the answers to one prompt, the {way} ones get the higher rewards "
        f"(correlation {figure(correlation)})",
        _what_is_known(severity),
        f"{_LOOK}. Add the scorer `length` to reward.scorers, or limit sampling.max_new_tokens",
    )


def _format(data: RunData) -> Iterator[Finding]:
    for key, words in (
        ("repeated_share", "answers repeat themselves: the share of repeated words"),
        ("symbol_share", "the format of the answers changes: the share of symbols among their characters"),
    ):
        change = _change(series(data.steps, key))
        if not change.is_rise or change.late - change.early < FORMAT_RISE:
            continue
        severity = _severity(data, key, change)
        if severity is not None:
            yield Finding(
                "format_hacked",
                severity,
                f"The reward rises, and {words} rose from {percent(change.early)} to {percent(change.late)}",
                _what_is_known(severity),
                f"{_LOOK}, and make the scorer reject such answers",
            )


def _severity(data: RunData, key: str, change: Change) -> Severity | None:
    """A warning if evaluations before and after the change show no rise of accuracy, and a remark if there are none;
    None: the evaluations that would show it are not finished yet.
    """
    rows = [row for row in data.steps if math.isfinite(number(row, key))]
    k = window(len(rows))
    means = np.convolve(series(rows, key), np.full(k, 1 / k), mode="valid")
    is_past = (means - (change.early + change.late) / 2) * (change.late - change.early) >= 0
    step = int(rows[int(np.argmax(is_past)) + k - 1]["step"])
    versions = [int(row["version"]) for row in known(data.evals)]
    if not any(version < step for version in versions):
        return "info"
    if sum(version >= step for version in versions) >= 2:
        return "warning"
    is_awaited = isinstance(every := data.setting("eval.every_steps"), int) and every > 0 and not data.is_over
    return None if is_awaited else "info"


def _what_is_known(severity: Severity) -> str:
    return "Held-out accuracy has not risen" if severity == "warning" else "Held-out accuracy is not measured"


def _forged(data: RunData) -> Iterator[Finding]:
    change = _change(series(data.steps, "forged_share"))
    if not change.late >= FORGED_SHARE or not change.late > change.early:
        return
    yield Finding(
        "environment_forged",
        "warning",
        f"{percent(change.late)} of the newest answers contain text that only the environment or the chat template "
        f"should write ({percent(change.early)} at the start)",
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


def _error_of_mean(values: np.ndarray, k: int) -> tuple[float, float]:
    """Standard error of a mean of k consecutive values, and its degrees of freedom. The values are those of an
    autoregression of order 1 around two straight lines, so that a hack is not taken for noise, whether it comes slowly
    or at once.

    The estimate of the correlation r has the bias -(6 + 12 r) / n, measured on simulated series of 20 to 200 values.
    One standard error is added to it, because an error that is too small gives false warnings.
    """
    n = len(values)
    rest = _around_two_lines(values)
    power = float(rest[:-1] @ rest[:-1])
    if not power > 1e-24 * float(values @ values):
        return 0.0, float(n)
    estimate = float(rest[1:] @ rest[:-1]) / power
    error = math.sqrt(max(0.0, 1 - estimate**2) / n)
    r = min(MAX_CORRELATION, max(0.0, (estimate + error + 6 / n) / (1 - 12 / n)))
    shocks = rest[1:] - estimate * rest[:-1]
    variance = float(shocks @ shocks) / (n - 8) / (1 - r * r)
    lags = np.arange(1, k)
    of_mean = variance / k * (1 + 2 * float(((1 - lags / k) * r**lags).sum()))
    return math.sqrt(of_mean), max(2.0, (n - 8) * (1 - r * r) / (1 + r * r))


def _around_two_lines(values: np.ndarray) -> np.ndarray:
    """Differences of the values to the closest pair of straight lines, of which the second one begins between 20 and 80
    % of the values.
    """
    n = len(values)
    x = np.arange(n) / n
    found = []
    for share in np.linspace(0.2, 0.8, 7):
        is_late = x >= share
        lines = np.stack([np.ones(n), x, is_late, is_late * (x - share)], axis=1)
        found.append(values - lines @ np.linalg.lstsq(lines, values, rcond=None)[0])
    return min(found, key=lambda rest: float(rest @ rest))
