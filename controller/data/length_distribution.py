"""Parses the distribution of simulated answer lengths: a name, numbers, a file, or a run.

Lengths are drawn in areal_like/emulation/lengths.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from areal_like.emulation.lengths import Lengths, thinking
from areal_like.errors import UserError
from controller.ledger.sample_reader import Unreadable, read_samples
from controller.run_folder.run_folder import RunFolder

THINKING = "thinking"


def parse_lengths(text: str, cap: int, where: str = "--lengths") -> Lengths:
    """`thinking`, `MEAN`, `MEAN:CV`, a run's folder, or a JSON file with a list of lists of lengths (key `groups`
    allowed); `@MEAN` after all but the second and third scales the mean. where: the setting, for errors. Raises
    UserError.
    """
    name, _, wanted = text.partition("@")
    path = Path(name)
    if name == THINKING:
        return thinking(cap, _positive(wanted, where) if wanted else None)
    if path.is_dir():
        found = Lengths(path.name, groups=_of_run(path), cap=cap)
    elif path.suffix == ".json":
        found = Lengths(path.name, groups=_of_file(path), cap=cap)
    else:
        return _log_normal(text, cap, where)
    if not wanted:
        return found
    plain = sum(map(sum, found.groups)) / sum(map(len, found.groups))
    return Lengths(text, groups=found.groups, cap=cap, scale=_positive(wanted, where) / plain)


def _log_normal(text: str, cap: int, where: str) -> Lengths:
    mean, _, cv = text.partition(":")
    spread = _positive(cv, where) if cv else 0.9
    return Lengths(f"log-normal {text}", mean=_positive(mean, where), cv=spread, cap=cap)


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise UserError(
            f"{text!r} is neither a file nor a positive number",
            where=where,
            remedy="use `thinking`, MEAN, MEAN:CV, the folder of a run, or a JSON file with the answer lengths of "
            "groups; append @MEAN to scale the distribution",
        )
    return value


def _of_file(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        found = json.loads(path.read_bytes())
        groups = found["groups"] if isinstance(found, dict) else found
        checked = tuple(tuple(int(length) for length in group) for group in groups if len(group))
        if not checked or min(map(min, checked)) < 1:
            raise ValueError("each length must be at least 1, and there must be at least one length")
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = "expected a list of lists of numbers" if isinstance(error, KeyError | TypeError) else error
        remedy = "write a list with the answer lengths of each group, such as [[120, 95], [310, 288]]"
        raise UserError(f"the lengths cannot be read ({reason})", where=str(path), remedy=remedy) from error
    return checked


def _of_run(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        stats = read_samples(RunFolder(path).ledger, max_samples=20_000)
    except Unreadable as error:
        raise UserError(f"the ledger cannot be read: {error}", where=str(path)) from error
    if stats is None or not len(stats.group):
        remedy = "choose a run that has finished at least one step"
        raise UserError("no step of this run has used any samples", where=str(path), remedy=remedy)
    groups: dict[int, list[int]] = {}
    for group, length in zip(stats.group.tolist(), stats.length.tolist(), strict=True):
        groups.setdefault(group, []).append(max(1, length))
    return tuple(map(tuple, groups.values()))
