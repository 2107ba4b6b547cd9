"""Formats measured values: Markdown tables, ranges, intervals, and the command and machine of a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def ranged(spread: Result, digits: int = 0, middle: str = "median") -> str:
    return f"{spread[middle]:,.{digits}f} ({spread['low']:,.{digits}f} to {spread['high']:,.{digits}f})"


def interval(pair: Sequence[Any], digits: int, sign: str = "") -> str:
    """A mean and the half width of its interval, which is null for a single value."""
    half = "-" if pair[1] is None else f"{pair[1]:,.{digits}f}"
    return f"{pair[0]:{sign},.{digits}f} ± {half}"


def stamp(result: Result) -> str:
    machine = result.get("machine", {})
    where = [str(machine[key]) for key in ("gpu", "cpu") if machine.get(key)]
    where += [f"{machine['cores']} cores"] if machine.get("cores") else []
    where += [f"{key} {machine[key]}" for key in ("python", "torch", "transformers") if machine.get(key)]
    made = f"Made by `{result['command'].strip()}`" + (f" on {result['date']}" if "date" in result else "")
    return f"<small>{made}: {', '.join(where)}.</small>" if where else f"<small>{made}.</small>"


def ratio_words(found: Result) -> str:
    """A geometric mean with its 95 % interval and its number of pairs."""
    spread = "" if found["low"] is None else f" ({found['low']:.2f} to {found['high']:.2f})"
    return f"{found['mean']:.2f}{spread}, {len(found['pairs'])} seeds"


SHOWN = ("accuracy_after", "samples_per_s", "staleness_mean", "trainer_wait_share", "rollout_idle_share")
"""Figures shown for a job at one value of a swept key."""


def spread_cell(line: Result, name: str) -> str:
    return "-" if line[name] is None else ranged(line[name], 1 if name == "samples_per_s" else 3, "mean")
