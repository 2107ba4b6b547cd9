"""Output of the doctor: a table for users, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from controller.doctor.finding import Line, Verdict, count

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
STYLES: Mapping[Verdict, str] = {"ok": "green", "warning": "yellow", "problem": "bold red", "absent": "dim"}
WIDEST = 160
"""Maximum width of a line."""


def exit_status(lines: Sequence[Line]) -> int:
    """Exit status: 0 if all requirements of the quickstart are met."""
    return int(any(line.finding.verdict == "problem" for line in lines))


def closing_words(lines: Sequence[Line]) -> list[str]:
    """Summary of all findings, with counts."""
    numbers = Counter(line.finding.verdict for line in lines)
    named = [line.name for line in lines if line.finding.verdict == "problem"]
    whole = (
        f"The quickstart cannot run here yet: {', '.join(named)}."
        if named
        else "Everything the quickstart needs is available: make quickstart, or areal-like train quickstart."
    )
    others = [
        count(numbers["warning"], "warning"),
        f"{numbers['absent']} absent (optional)",
        f"{numbers['ok']} ok",
    ]
    return [whole, ", ".join([count(numbers["problem"], "problem"), *others]) + "."]


def as_json(lines: Sequence[Line]) -> str:
    """All findings as JSON."""
    from areal_like import __version__

    findings = [
        {
            "topic": line.topic, "name": line.name, "verdict": line.finding.verdict, "found": line.finding.found,
            "advice": line.finding.advice, "wall_s": round(line.wall_s, 4), "data": dict(line.finding.data),
        }
        for line in lines
    ]  # fmt: skip
    whole = {
        "format": FORMAT, "areal_like": __version__, "time_s": time.time(), "platform": sys.platform,
        "host": os.uname().nodename, "exit_status": exit_status(lines), "findings": findings,
    }  # fmt: skip
    return json.dumps(_finite(whole), indent=1, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """Replace infinity by null, because JSON does not support it."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0 else value


def show(lines: Sequence[Line], console: Console | None = None) -> None:
    """Print the table, or plain lines if rich is missing (which is then one of the findings)."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plainly(lines, sys.stdout)
        return
    console = console or Console(highlight=False)
    width = min(console.width, WIDEST)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.width = width
    table.add_column(width=9, no_wrap=True)
    table.add_column(width=max(len(line.name) for line in lines), no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    topic = ""
    for line in lines:
        if line.topic != topic:
            if topic:
                table.add_row("", "", "")
            topic = line.topic
            table.add_row(Text(topic, style="bold"), "", "")
        finding = line.finding
        words = Text(finding.found)
        if finding.advice:
            words.append(f"\n-> {finding.advice}", style="cyan" if finding.verdict != "absent" else "dim")
        table.add_row(Text(f"  {finding.verdict}", style=STYLES[finding.verdict]), line.name, words)
    console.print(table)
    console.print()
    whole, numbers = closing_words(lines)
    console.print(Text(whole, style="bold red" if exit_status(lines) else "bold green"), width=width)
    console.print(Text(numbers), width=width)


def _show_plainly(lines: Sequence[Line], stream: IO[str]) -> None:
    for line in lines:
        advice = f" -> {line.finding.advice}" if line.finding.advice else ""
        stream.write(f"{line.finding.verdict:<8} {line.topic}, {line.name}: {line.finding.found}{advice}\n")
    stream.write("\n" + "\n".join(closing_words(lines)) + "\n")
