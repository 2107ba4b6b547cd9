"""Findings about the policy: collapse and unstable updates, from the series of steps and evaluations.

The signs are in signs.py; whether the samples can teach anything is in teaching.py.

A collapse is determined by its outcome (reward or accuracy fell by half and by more than chance) and explained by the
signs that accompany it: entropy, weights, gradients, answer lengths. The signs alone are a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.report.data import RunData, number, series
from controller.report.finding import Finding, Rated, Severity, Weight, capital, figure, percent, sentences
from controller.report.minimum import MIN_STEPS
from controller.report.paired import compare, known
from controller.report.signs import Sign, early_signs_of, is_naive_ppo, signs_of, window

MIN_TREND_STEPS = 6
"""Minimum of steps for a trend: with fewer, an early and a late mean of two steps each nearly overlap. Only findings
that need no trend are reported before.
"""
REWARD_FALL_BAD = 0.5
"""A fall by half of the best reward, which a schedule or harder prompts alone do not cause."""
REWARD_FALL_NOTABLE = 0.2
SIGMAS = 3.0
"""Standard errors that a fall must exceed, because the best of many windows is high by chance."""
SKIPPED_NOTABLE = 0.01
"""Share of updates skipped because the gradient was not finite."""


COSINE_MEASURED = 5
"""Measurements of the cosine between consecutive gradients, all of which must be large: by chance, where the median of
the measurements is smaller, in at most 1 of 2^5 cases."""
COSINE_LARGE = 0.5
"""Half of the squared length of both gradients is common to them. For gradients m + n_i with independent n_i of equal
size the expected cosine is about |m|^2 / (|m|^2 + |n|^2). Not calibrated on runs that diverged."""


@dataclass(frozen=True)
class Fall:
    """From the best mean of a few values to the last one."""

    best: float
    last: float
    best_step: int
    since_step: int
    """Step at which half of the fall had happened."""
    share: float
    """Relative to the best."""
    is_certain: bool
    """Whether it exceeds chance."""

    @property
    def is_notable(self) -> bool:
        """Whether it is large enough to report, and exceeds chance."""
        return self.is_certain and self.share >= REWARD_FALL_NOTABLE


def find(data: RunData) -> list[Rated]:
    """Findings about the policy."""
    signs = signs_of(data) if len(data.steps) >= MIN_TREND_STEPS else early_signs_of(data)
    found = _collapse(data, signs) or ([] if _is_short(data) else _unstable(data, signs))
    return [*found, *_skipped(data), *_aligned(data)]


def _is_short(data: RunData) -> bool:
    """Whether the run is configured with so few steps that signs are not meaningful."""
    planned, kind = number(data.config, "num_steps"), data.where.kind if data.where is not None else ""
    is_over = kind in ("finished", "stopped")
    return planned < MIN_STEPS or (is_over and len(data.steps) < MIN_STEPS)


def reward_fall(data: RunData) -> Fall | None:
    """Fall of the mean reward from its best; None if there is too little data."""
    rows, k = _rewarded(data)
    if len(rows) < MIN_TREND_STEPS:
        return None
    smooth, squares = _rewards(rows, k)
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


def is_learning(data: RunData) -> bool:
    """Whether the reward has risen by more than chance, and has not fallen since by more than chance."""
    rows, k = _rewarded(data)
    fall = reward_fall(data)
    if fall is None or fall.is_certain:
        return False
    smooth, squares = _rewards(rows, k)
    return float(smooth[-1] - smooth[0]) > SIGMAS * math.sqrt(float(squares[0] + squares[-1]))


def _rewarded(data: RunData) -> tuple[list[dict[str, Any]], int]:
    """Steps with a reward, and the number of steps in a mean."""
    rows = [row for row in data.steps if math.isfinite(number(row, "reward_mean"))]
    return rows, window(len(rows))


def _rewards(rows: Sequence[dict[str, Any]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of the reward over k steps, and the squares of their standard errors."""
    smooth = np.convolve(series(rows, "reward_mean"), np.full(k, 1 / k), mode="valid")
    # Groups are the independent draws; their samples share a prompt.
    errors = series(rows, "reward_std") / np.sqrt(np.maximum(1.0, np.nan_to_num(series(rows, "groups"), nan=1.0)) * k)
    return smooth, np.convolve(np.nan_to_num(errors) ** 2, np.full(k, 1 / k), mode="valid")


def accuracy_fall(data: RunData) -> Fall | None:
    """Fall of held-out accuracy from its best evaluation to the last one, over the rows that both have."""
    *earlier, last = known(data.evals) or [{}]
    compared = [(row, same) for row in earlier if (same := compare(row, (last,))) is not None]
    if not compared:
        return None
    best, same = max(compared, key=lambda pair: pair[1].fall)
    high, low = same.early, same.late[0]
    after = [row for row in known(data.evals) if row["version"] >= best["version"]]
    since = next((row for row in after if number(row, "accuracy") <= (high + low) / 2), last)
    return Fall(
        best=high,
        last=low,
        best_step=int(best["version"]),
        since_step=int(since["version"]),
        share=(high - low) / abs(high) if high else 0.0,
        is_certain=same.is_certain(len(compared)),
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
        "policy_collapsed" if is_bad else "policy_worse",
        "bad" if is_bad else "warning",
        title,
        sentences(f"Half of the decrease had occurred by {certain[0][1]} {worst.since_step}", _sign_words(signs)),
        _cure(data, signs, certain[0][2].best_step),
    )
    return [Rated(Weight.POLICY, finding, worst.share)]


def _unstable(data: RunData, signs: Sequence[Sign]) -> list[Rated]:
    """Updates show the signs that precede a fall of the reward, which has not fallen yet."""
    is_sound = is_learning(data)
    if not signs or (is_sound and all(sign.is_usual for sign in signs)):
        return []
    # While the reward rises, a lower entropy is what learning does, and `answers_cut` is a remark.
    serious = [sign for sign in signs if not (is_sound and sign.cause in ("entropy", "cut"))]
    if not serious:
        return []
    severity: Severity = "bad" if len({sign.words.split()[0] for sign in serious}) >= 3 else "warning"
    title = f"Updates are unstable: {serious[0].words}"
    cure = _cure(data, serious, serious[0].step)
    finding = Finding("policy_unstable", severity, title, _sign_words(serious[1:]), cure)
    return [Rated(Weight.POLICY, finding, len(serious))]


def _sign_words(signs: Sequence[Sign]) -> str:
    if not signs:
        return ""
    first = min((sign for sign in signs if sign.step), key=lambda sign: sign.step, default=None)
    begin = f"; the first sign appeared at step {first.step}" if first is not None else ""
    return sentences(f"At the same time: {', '.join(sign.words for sign in signs)}{begin}")


def _cure(data: RunData, signs: Sequence[Sign], step: int) -> str:
    causes = {sign.cause for sign in signs}
    lr, bound = data.setting("trainer.optimizer.lr"), data.setting("staleness.max_staleness")
    ways = []
    if not causes or causes & {"lr", "stale", "ratio", "length", "cut"}:
        change = f" from {lr:g} to {lr / 10:g} or less" if isinstance(lr, int | float) and lr > 0 else ""
        ways.append(f"lower trainer.optimizer.lr{change} (with warmup_steps)")
    if "stale" in causes and isinstance(bound, int) and bound > 1:
        ways.append(f"lower staleness.max_staleness from {bound} to {bound // 2}")
    if "stale" in causes and is_naive_ppo(data):
        ways.append("use the decoupled loss (trainer.loss.proximal: recompute, trainer.loss.weight.mode: truncate)")
    elif "stale" in causes and data.setting("trainer.loss.weight.mode") == "exact":
        ways.append("bound the correction weight (trainer.loss.weight.mode: truncate)")
    if "ratio" in causes and data.setting("trainer.loss.dual_clip") is None:
        ways.append("limit the influence of one token (trainer.loss.dual_clip: 3)")
    if "entropy" in causes:
        ways.append("keep the entropy high (trainer.loss.entropy_coef, or eps_high above eps_low)")
    if not data.setting("trainer.loss.kl_coef", 0.0):
        ways.append("keep the policy close to the starting model (trainer.loss.kl_coef)")
    if causes & {"length", "cut"}:
        ways.append("check whether the reward favours long or empty answers (areal-like samples)")
    return f"{capital('; '.join(ways))}. The best policy is in the checkpoints up to step {step}, if these were kept"


def _skipped(data: RunData) -> list[Rated]:
    skipped, applied = (float(np.nansum(series(data.steps, key))) for key in ("skipped_updates", "updates"))
    lost = sum("loss" in row and row["loss"] is None for row in data.steps)
    share = skipped / (skipped + applied) if skipped else lost / max(1, len(data.steps))
    if share < SKIPPED_NOTABLE:
        return []
    severity: Severity = "bad" if share >= 0.5 else "warning"
    finding = Finding(
        "updates_skipped",
        severity,
        f"{percent(share)} of the updates were skipped, because the loss or the gradient was not a finite number",
        "The skipped updates did not change the policy, but their samples were consumed",
        "Reduce trainer.optimizer.lr; on a GPU, try trainer.precision: float32 to check whether the precision is the "
        "cause",
    )
    return [Rated(Weight.POLICY, finding, share)]


def _aligned(data: RunData) -> list[Rated]:
    """Consecutive gradients point the same way, now: of the newest measurements."""
    measured = [row for row in data.steps if "gradient_cosine" in row]
    newest = series(measured[-COSINE_MEASURED:], "gradient_cosine")
    if len(newest) < COSINE_MEASURED or not (newest >= COSINE_LARGE).all():
        return []
    if not float(np.nanmax(series(data.steps, "staleness_mean"))) > 0:
        return []  # without staleness they agree because there is one thing to learn
    bound = data.setting("staleness.max_staleness")
    ways = ["lower trainer.optimizer.lr", "set trainer.lr_by_ess: {}"]
    if isinstance(bound, int) and bound > 1:
        ways.insert(0, f"lower staleness.max_staleness from {bound} to {bound // 2}")
    finding = Finding(
        "gradients_aligned",
        "warning",
        "Gradients of consecutive updates point in the same direction: their cosine similarity stays at "
        f"{figure(np.median(newest))}",
        f"This is the median of the newest {COSINE_MEASURED} measurements, all of which are {COSINE_LARGE:g} or more. "
        "Updates on samples from the same old policy are partly redundant; with a low learning rate or large batches, "
        "gradients also agree without staleness",
        capital("; ".join(ways)),
    )
    return [Rated(Weight.POLICY, finding, float(np.median(newest)))]
