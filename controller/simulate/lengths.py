"""How long simulated answers are, by group: answers to one prompt resemble each other.

Owns: distributions of group lengths and where they come from. Refuses: prompts' texts, time.

Between-group share. Of the variance of measured reasoning lengths 60 to 80 % lies between prompts; a pooled histogram
would make groups too even and each step's longest answer too rare. So groups are drawn whole where groups are known,
and the log-normal form splits its variance (`between`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from areal_like.errors import UserError
from controller.report.samples import Unreadable, read_samples
from controller.run_folder import RunFolder

BETWEEN = 0.65
"""Share of the log variance between prompts, where nothing is known."""


@dataclass(frozen=True)
class Lengths:
    """Draws the answer lengths of one group after the other; the same seed, the same lengths."""

    name: str
    groups: tuple[tuple[int, ...], ...] = ()
    """Measured groups, drawn whole; their answers are drawn anew within the group. Empty: log-normal."""
    mean: float = 2000.0
    cv: float = 0.9
    """Standard deviation over mean, of the log-normal form."""
    between: float = BETWEEN
    scale: float = 1.0
    """Measured lengths are multiplied by this."""
    cap: int = 1 << 30
    """Longest answer: longer ones are cut there."""

    def draw(self, rng: np.random.Generator, group_size: int) -> list[int]:
        """Answer lengths of one group, in tokens, each at least 1."""
        if self.groups:
            group = self.groups[int(rng.integers(len(self.groups)))]
            found = np.asarray(group, dtype=np.float64)[rng.integers(len(group), size=group_size)] * self.scale
        else:
            sigma2 = math.log(1 + self.cv**2)
            centre = math.log(self.mean) - sigma2 / 2
            centre += math.sqrt(self.between * sigma2) * rng.standard_normal()
            found = np.exp(centre + math.sqrt((1 - self.between) * sigma2) * rng.standard_normal(group_size))
        clipped: list[int] = np.clip(np.rint(found), 1, self.cap).astype(np.int64).tolist()
        return clipped

    def mean_length(self, seed: int = 0, groups: int = 4000) -> float:
        """Mean of what is drawn, cut included; estimated with `groups` draws."""
        rng = np.random.default_rng(seed)
        return float(np.mean([self.draw(rng, 8) for _ in range(groups)]))


def parse_lengths(text: str, cap: int) -> Lengths:
    """`MEAN`, `MEAN:CV`, a run's folder, or a JSON file with a list of lists of lengths (key `groups` allowed), with
    `@MEAN` behind a file or folder to scale its mean. Raises UserError."""
    name, _, wanted = text.partition("@")
    path = Path(name)
    if path.is_dir():
        found = Lengths(path.name, groups=_of_run(path), cap=cap)
    elif path.suffix == ".json":
        found = Lengths(path.name, groups=_of_file(path), cap=cap)
    else:
        return _log_normal(text, cap)
    if not wanted:
        return found
    plain = sum(map(sum, found.groups)) / sum(map(len, found.groups))
    return Lengths(text, groups=found.groups, cap=cap, scale=_positive(wanted) / plain)


def _log_normal(text: str, cap: int) -> Lengths:
    mean, _, cv = text.partition(":")
    return Lengths(f"log-normal {text}", mean=_positive(mean), cv=_positive(cv) if cv else 0.9, cap=cap)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise UserError(
            f"{text!r} is neither a file nor a positive number",
            where="--lengths",
            remedy="MEAN, MEAN:CV, a run's folder, or a JSON file of groups; @MEAN behind the latter scales them",
        )
    return value


def _of_file(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        found = json.loads(path.read_bytes())
        groups = found["groups"] if isinstance(found, dict) else found
        checked = tuple(tuple(int(length) for length in group) for group in groups if len(group))
        if not checked or min(map(min, checked)) < 1:
            raise ValueError("it wants a list of lists of lengths, each at least 1")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"no lengths can be read here ({error})", where=str(path)) from error
    return checked


def _of_run(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        stats = read_samples(RunFolder(path).ledger, max_samples=20_000)
    except Unreadable as error:
        raise UserError(f"the ledger cannot be read: {error}", where=str(path)) from error
    if stats is None or not len(stats.group):
        raise UserError("no step of this run used a sample", where=str(path))
    groups: dict[int, list[int]] = {}
    for group, length in zip(stats.group.tolist(), stats.length.tolist(), strict=True):
        groups.setdefault(group, []).append(max(1, length))
    return tuple(map(tuple, groups.values()))
