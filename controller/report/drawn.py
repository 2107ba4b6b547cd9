"""The table of a report that compares what was trained on with what was drawn: lengths, sources, and lost tokens.

The counts are in ledger/sample_lengths.py and ledger/sample_sources.py; the summary has them at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from controller.report.data import RunData, number
from controller.report.finding import Finding, Rated, Weight, figure, percent
from controller.report.length_shift import SHIFT_NOTABLE, Z_NOTABLE


class Line(NamedTuple):
    """One line: a quantity among all drawn samples of ended groups, and among trained ones."""

    name: str
    drawn: str
    trained: str


class Comparison(NamedTuple):
    """The table, and what it shows in one sentence. Without lines: nothing was trained, or the run goes on."""

    lines: tuple[Line, ...]
    words: str


def comparison(data: RunData) -> Comparison:
    """Compare drawn and trained samples of a run that has ended."""
    lengths, sources = _part(data, "lengths"), _part(data, "sources")
    drawn, trained = _dict(lengths.get("drawn")), _dict(lengths.get("trained"))
    if not drawn or not trained:
        return Comparison((), "available after a run with training steps has ended")
    lines = [
        Line(name, figure(number(drawn, key)), figure(number(trained, key)))
        for name, key in (
            ("answers", "samples"), ("sampled tokens", "tokens"), ("mean tokens of an answer", "mean"),
            ("median", "p50"), ("99th percentile", "p99"),
        )
        if key in drawn
    ]  # fmt: skip
    lines += _source_lines(sources)
    return Comparison(tuple(lines), " ".join([_verdict(data), *_losses(data)]))


def find(data: RunData) -> list[Rated]:
    """A warning if the trained groups of a source are fewer or more than losses by chance would leave."""
    sources = _part(data, "sources")
    drawn, trained = _without_filtered(sources), _dict(sources.get("trained"))
    total, used = sum(drawn.values()), sum(trained.values())
    found = []
    for source, z in _dict(sources.get("shift_z")).items():
        shift = trained.get(source, 0) / used - drawn.get(source, 0) / total if used and total else 0.0
        if abs(z) >= Z_NOTABLE and abs(shift) >= SHIFT_NOTABLE:
            found.append((-shift, source, z))
    if not found:
        return []
    less, source, z = max(found)  # the source that lost most
    finding = Finding(
        "source_shift", "warning",
        f"The source {source} has {percent(trained.get(source, 0) / used)} of the groups used for training, but "
        f"{percent(drawn[source] / total)} of the drawn groups",
        f"The difference is {abs(z):.0f} standard errors (filtered groups are not counted): the answers of this source "
        f"take {'more' if less > 0 else 'less'} time than others, or fail {'more' if less > 0 else 'less'} often",
        "Set staleness.on_stale: wait, and increase staleness.group_timeout_s",
    )  # fmt: skip
    return [Rated(Weight.SIGNAL, finding, abs(less))]


def _source_lines(sources: Mapping[str, Any]) -> Iterator[Line]:
    drawn, trained = _dict(sources.get("drawn")), _dict(sources.get("trained"))
    if len(drawn) < 2:
        return
    for source, count in drawn.items():
        shares = (count / sum(drawn.values()), trained.get(source, 0) / max(1, sum(trained.values())))
        yield Line(f"groups of {source}", *(percent(share) for share in shares))


def _verdict(data: RunData) -> str:
    lengths, sources = _part(data, "lengths"), _part(data, "sources")
    lost = {name: one for name, one in _dict(lengths.get("lost")).items() if name != "filtered"}
    if not lost and (unseen := sum(_unseen(data).values())):
        return (
            f"{figure(unseen)} drawn groups ended before they had an answer. All other samples of ended groups were "
            "used for training, except those in filtered groups."
        )
    if not lost:
        return "Every drawn sample of an ended group was used for training, except those in filtered groups."
    shift, z = number(lengths, "shift", 0.0), number(lengths, "shift_z", 0.0)
    most_z = max((abs(one) for one in _dict(sources.get("shift_z")).values()), default=0.0)
    if abs(z) < Z_NOTABLE and most_z < Z_NOTABLE:
        return (
            f"The trained samples have the same distribution as the drawn ones: lengths differ by {abs(z):.1f} "
            "standard errors" + (f", sources by {most_z:.1f}." if len(_dict(sources.get("drawn"))) > 1 else ".")
        )
    parts = [f"lengths differ by {percent(abs(shift))} ({abs(z):.1f} standard errors)"] if abs(z) >= Z_NOTABLE else []
    parts += [f"sources by {most_z:.1f} standard errors"] if most_z >= Z_NOTABLE else []
    return f"The trained samples do not have the same distribution as the drawn ones: {', '.join(parts)}."


def _unseen(data: RunData) -> dict[str, int]:
    """Dropped groups whose answers have no length, by reason, such as those of prompts that are too long."""
    lost, dropped = _dict(_part(data, "lengths").get("lost")), _part(data, "dropped_by_reason")
    return {reason: count for reason, count in dropped.items() if reason not in lost}


def _losses(data: RunData) -> Iterator[str]:
    for reason, count in _unseen(data).items():
        yield f"{reason.replace('_', ' ').capitalize()}: {figure(count)} groups without an answer."
    for name, lost in _dict(_part(data, "lengths").get("lost")).items():
        tokens = f" with {figure(number(lost, 'tokens'))} tokens" if "tokens" in lost else ""
        yield f"{name.replace('_', ' ').capitalize()}: {figure(number(lost, 'samples'))} samples{tokens}."


def _without_filtered(sources: Mapping[str, Any]) -> dict[str, int]:
    filtered = _dict(sources.get("filtered"))
    return {source: count - filtered.get(source, 0) for source, count in _dict(sources.get("drawn")).items()}


def _part(data: RunData, key: str) -> dict[str, Any]:
    return _dict((data.summary or {}).get(key))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
