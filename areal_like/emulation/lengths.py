"""Lengths of emulated answers. Answers to one prompt have similar lengths, so lengths are drawn by group.

Share of the variance between groups: of the variance of measured reasoning lengths 60 to 80 % lies between prompts; a
pooled histogram would make groups too similar and long answers too rare in each step. So measured groups are drawn as a
whole, and the other forms split their variance (`between`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BETWEEN = 0.65
"""Default share of the log variance that is between prompts."""

THINKING_QUANTILES = (
    410, 829, 1126, 1447, 1669, 1872, 2106, 2384, 2536, 2674, 2842, 3102, 3258, 3514, 3784, 4045, 4314, 4590, 4825,
    5052, 5373, 5719, 5991, 6331, 6611, 6948, 7188, 7559, 7982, 8512, 9182, 10167, 11013, 11779, 13168, 14749, 16355,
    19910, 21989, 25862, 32769,
)  # fmt: skip
"""Tokens of a thinking model's answers at 41 even quantiles: 75 MMLU-Pro questions x 10 samples, gemma-4-12B-it,
temperature 1.0, cut at 32,768 (mean 7,345, coefficient of variation 0.87). Computed from the counts that
github.com/tobypullan/logit_cot_overthinking publishes at commit f02cd56
(outputs/matched_controls_gemma4_12b_extended/mmlu_pro, field generated_token_count). The questions were chosen by
outcome (a third correct, a third wrong, a third unfinished), so they are harder, and their answers longer, than in a
random sample."""
THINKING_BETWEEN = 0.75
"""Share of the log variance between prompts in the same counts."""
MAX_GROUPS = 4096
"""Groups whose common part `NamedDraws` caches; more than a usual run has in flight."""

Draws = Callable[[np.random.Generator, int], np.ndarray]
"""Function that draws the lengths of a number of answers of one group."""


@dataclass(frozen=True)
class Lengths:
    """Draws the answer lengths of groups; the same seed gives the same lengths."""

    name: str
    groups: tuple[tuple[int, ...], ...] = ()
    """Measured groups: a group is drawn as a whole, then answers are drawn within it. Empty: see `quantiles`."""
    quantiles: tuple[int, ...] = ()
    """Pooled lengths at even quantiles from 0 to 1; groups by a Gaussian copula. Empty: log-normal."""
    mean: float = 2000.0
    cv: float = 0.9
    """Coefficient of variation (standard deviation over mean) of the log-normal form."""
    between: float = BETWEEN
    scale: float = 1.0
    """Measured lengths are multiplied by this."""
    cap: int = 1 << 30
    """Longest answer; longer ones are truncated."""

    def draw(self, rng: np.random.Generator, group_size: int) -> list[int]:
        """Answer lengths of one group, in tokens, each at least 1."""
        return self.cut(self.group(rng)(rng, group_size))

    def group(self, rng: np.random.Generator) -> Draws:
        """Draw what all answers to one prompt have in common; the returned function draws the rest (see `cut`)."""
        if self.groups:
            chosen = np.asarray(self.groups[int(rng.integers(len(self.groups)))], dtype=np.float64)
            return lambda own, count: chosen[own.integers(len(chosen), size=count)] * self.scale
        common = math.sqrt(self.between) * rng.standard_normal()
        apart = math.sqrt(1 - self.between)
        if self.quantiles:
            return lambda own, count: self._at(common + apart * own.standard_normal(count))
        return lambda own, count: self._log_normal(common + apart * own.standard_normal(count))

    def draw_groups(self, rng: np.random.Generator, group_size: int, count: int) -> list[list[int]]:
        """Draw `count` groups at once: the same distribution as `draw`, but in another order."""
        if self.groups:
            return [self.draw(rng, group_size) for _ in range(count)]
        common = math.sqrt(self.between) * rng.standard_normal((count, 1))
        normal_GS = common + math.sqrt(1 - self.between) * rng.standard_normal((count, group_size))
        drawn = self._at(normal_GS) if self.quantiles else self._log_normal(normal_GS)
        found: list[list[int]] = np.clip(np.rint(drawn), 1, self.cap).astype(np.int64).tolist()
        return found

    def cut(self, lengths: np.ndarray) -> list[int]:
        """Round to whole tokens, at least 1 and at most `cap`."""
        clipped: list[int] = np.clip(np.rint(lengths), 1, self.cap).astype(np.int64).tolist()
        return clipped

    def mean_length(self, seed: int = 0, groups: int = 4000) -> float:
        """Mean length after truncation, estimated with `groups` draws."""
        rng = np.random.default_rng(seed)
        return float(np.mean([self.draw(rng, 8) for _ in range(groups)]))

    def _log_normal(self, normal: np.ndarray) -> np.ndarray:
        """Map standard normal numbers to lengths of the log-normal form."""
        sigma = math.sqrt(math.log(1 + self.cv**2))
        return np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * normal)

    def _at(self, normal: np.ndarray) -> np.ndarray:
        """Map standard normal numbers to quantiles, interpolated linearly in the logarithm between those of the
        table.
        """
        shares = np.asarray([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in normal.ravel().tolist()])
        shares = shares.reshape(normal.shape)
        places = np.linspace(0, 1, len(self.quantiles))
        return np.exp(np.interp(shares, places, np.log(self.quantiles))) * self.scale


class NamedDraws:
    """Length of each answer by group and sample number: the same seed, group and sample always give the same length."""

    def __init__(self, lengths: Lengths, seed: int) -> None:
        self.lengths, self._seed = lengths, seed
        self._groups: dict[int, Draws] = {}

    def __call__(self, group: int, sample: int) -> int:
        """Tokens of the whole answer. group: any number from 0; sample: from 1, since numpy treats a seed with a
        trailing zero as the same seed: sample 0 would draw from its group's own stream.
        """
        draws = self._groups.get(group)
        if draws is None:
            if len(self._groups) >= MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
            draws = self._groups[group] = self.lengths.group(np.random.default_rng((self._seed, group)))
        return self.lengths.cut(draws(np.random.default_rng((self._seed, group, sample)), 1))[0]


def thinking(cap: int = 1 << 30, mean: float | None = None) -> Lengths:
    """The shipped table of a thinking model; mean: scaled to this mean before truncation."""
    places = np.linspace(0, 1, len(THINKING_QUANTILES))
    fine = np.exp(np.interp(np.linspace(0, 1, 10_001), places, np.log(THINKING_QUANTILES)))
    return Lengths(
        "thinking model" if mean is None else f"thinking model, scaled to {mean:g}",
        quantiles=THINKING_QUANTILES,
        between=THINKING_BETWEEN,
        scale=1.0 if mean is None else mean / float(fine.mean()),
        cap=cap,
    )
