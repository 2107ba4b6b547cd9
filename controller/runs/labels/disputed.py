"""Decides from several answers to a row whether its label is likely wrong: they agree with one another and not with it.

Answers are compared as scorer `math` compares them. Where answers come from is in answers.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from controller.wiring.gold_checks import are_same_answers

COMPARE_LIMIT_S = 1.0
"""Processor time of one comparison; two answers that take longer are different."""


@dataclass(frozen=True)
class Answers:
    """The answers to one row. where: its file and line, or empty; key: its id or prompt, if there is no place.

    finals: final answer of each answer, newest first; None: it has none. names: of the samples, aligned, may be empty.
    """

    where: str
    key: str
    prompt: str
    label: str
    finals: Sequence[str | None]
    names: Sequence[str] = ()
    versions: tuple[int, int] | None = None
    """Oldest and newest version that gave them."""


@dataclass(frozen=True)
class Disputed:
    """A row whose label is likely wrong, with the evidence; `decision` is filled in by a person."""

    where: str
    key: str
    prompt: str
    label: str
    answer: str
    """The final answer that most answers agree on."""
    num_answers: int
    """Answers that have a final answer."""
    num_agree: int
    num_label: int
    """Answers that agree with the label."""
    versions: tuple[int, int] | None = None
    samples: tuple[str, ...] = ()
    """Names of the samples that agree with one another."""
    decision: str | None = None
    """`accept`: the answer becomes the label; `reject`: the label stays; `remove`: the row is left out."""

    def as_dict(self) -> dict[str, Any]:
        """For one line of JSON."""
        return asdict(self)


@dataclass
class Found:
    """What was found in all rows."""

    disputed: list[Disputed] = field(default_factory=list)
    """Strongest evidence first."""
    num_rows: int = 0
    num_judged: int = 0
    """Rows with enough answers."""
    num_agreeing: int = 0
    """Rows whose answers agree with their label."""


def find_disputed(
    rows: Iterable[Answers], *, min_answers: int, min_agreement: float, show: Callable[[int], None] = lambda _: None
) -> Found:
    """Judge every row.

    Args:
        rows: answers by row.
        min_answers: a row with fewer final answers is not judged.
        min_agreement: share of a row's final answers that must agree with one another.
        show: called with the number of rows that were judged.
    """
    found = Found()
    for row in rows:
        found.num_rows += 1
        finals = [(number, final) for number, final in enumerate(row.finals) if final is not None]
        if len(finals) < min_answers:
            continue
        found.num_judged += 1
        show(found.num_judged)
        groups = _grouped(finals)
        answer, members = max(groups, key=lambda group: len(group[1]))
        matching = [members for text, members in groups if _same(row.label, text)]
        num_label = sum(map(len, matching))
        found.num_agreeing += num_label > len(finals) / 2
        if len(members) < min_agreement * len(finals) or _same(row.label, answer):
            continue
        names = tuple(row.names[number] for number in members) if row.names else ()
        found.disputed.append(
            Disputed(
                where=row.where,
                key=row.key,
                prompt=row.prompt,
                label=row.label,
                answer=answer,
                num_answers=len(finals),
                num_agree=len(members),
                num_label=num_label,
                versions=row.versions,
                samples=names,
            )
        )
    # The lower bound of the share, by the rule of succession: 16 of 16 is stronger evidence than 4 of 4.
    found.disputed.sort(key=lambda one: -(one.num_agree + 1) / (one.num_answers + 2))
    return found


def _grouped(finals: Sequence[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """Equal answers together: a text, and positions of the answers that equal it."""
    groups: list[tuple[str, list[int]]] = []
    for number, final in finals:
        for text, members in groups:
            if _same(text, final):
                members.append(number)
                break
        else:
            groups.append((final, [number]))
    return groups


@functools.lru_cache(maxsize=100_000)
def _same(gold: str, other: str) -> bool:
    return are_same_answers(gold, other, COMPARE_LIMIT_S)
