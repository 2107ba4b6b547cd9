"""`areal-like ps`: lists the runs of this machine, from any folder.

Sources: runs that this user started (registry.py), runs that processes of this machine belong to, `runs/` in the
current folder, and every folder given with --runs-dir. Only runs in progress are listed and the rest counted; --all
lists all. Whether a run is in progress is determined in owner_host.py.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from areal_like.errors import UserError
from controller.run_folder import registry
from controller.run_folder.formatting import megabytes, printable, span
from controller.run_folder.locate import RUNS_DIR
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.run_notes import read_notes
from controller.runs.facts import Facts, read_facts
from controller.runs.status_view import STYLE

_TITLES = ("run", "is", "step", "accuracy", "time", "left", "pid", "memory")
_ORDER = ("running", "foreign", "crashed", "failed", "stopped", "finished", "damaged")


@dataclass(frozen=True)
class Row:
    """One listed run. `facts` is None if its state file cannot be read; then `words` is the reason."""

    root: Path
    kind: str
    words: str
    facts: Facts | None
    since_s: float

    @property
    def state(self) -> dict[str, Any]:
        """Content of the state file."""
        return dict(self.facts.where.state) if self.facts else {}


def ps(
    *, show_all: bool = False, runs_dirs: Sequence[str] = (), as_json: bool = False, console: Console | None = None
) -> int:
    """List runs; return the exit status, 0. Raises UserError if a --runs-dir is not a folder."""
    console = console or Console(highlight=False, markup=False)
    found = gather(runs_dirs)
    shown = [row for row in found if show_all or row.kind == "running"]
    if as_json:
        console.out(json.dumps([plain(row) for row in shown], ensure_ascii=False, indent=1))
        return 0
    if shown:
        _print(shown, console)
    else:
        console.print(Text("no runs are known on this machine" if show_all else "no runs are active on this machine"))
    others = Counter(row.kind for row in found if row not in shown)
    if others:
        words = ", ".join(f"{others[kind]} {kind}" for kind in _ORDER if others[kind])
        console.print(Text(f"not shown: {words} (areal-like ps --all)", style="dim"))
    return 0


def gather(runs_dirs: Sequence[str] = ()) -> list[Row]:
    """Every run known on this machine: runs in progress first, then by kind, newest first."""
    rows = {}
    for root in _roots(runs_dirs):
        root = root.resolve()
        if root not in rows:
            rows[root] = look(root)
    return sorted(rows.values(), key=lambda row: (_ORDER.index(row.kind), -row.since_s))


def look(root: Path) -> Row:
    """Read one run, as far as possible."""
    try:
        facts = read_facts(RunFolder(root), whole=False)
    except UserError as error:
        return Row(root, "damaged", error.what, None, 0.0)
    state = facts.where.state
    since = next((state[key] for key in ("ended_s", "updated_s") if isinstance(state.get(key), int | float)), 0.0)
    return Row(root, facts.where.kind, facts.where.words, facts, float(since))


def _roots(runs_dirs: Sequence[str]) -> Iterator[Path]:
    yield from registry.seen_in_processes()
    for entry in registry.known():
        if entry.is_here:
            yield entry.root
    for text in runs_dirs:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise UserError(
                "there is no such folder", where=f"--runs-dir {text}", remedy="specify a folder that contains runs"
            )
        yield from _in(folder)
    if RUNS_DIR.is_dir():
        yield from _in(RUNS_DIR)


def _in(runs_dir: Path) -> Iterator[Path]:
    try:
        yield from sorted(path.parent for path in runs_dir.glob("*/state.json"))
    except OSError as error:
        raise UserError(
            f"the folder cannot be read ({error.strerror})",
            where=str(runs_dir),
            remedy="check the permissions of the folder",
        ) from error


def _print(rows: Sequence[Row], console: Console) -> None:
    """Print a line per run. The folder is at the end of the line if the width suffices for all runs, else below."""
    table = [_TITLES, *(_cells(row) for row in rows)]
    used = [i for i, title in enumerate(_TITLES) if title in ("run", "is") or any(line[i] != "-" for line in table[1:])]
    widths = {i: max(len(line[i]) for line in table) for i in used}
    lines = ["  ".join(_aligned(line[i], widths[i], i) for i in used) for line in table]
    places = [_place(row) for row in rows]
    is_wide = len(lines[0]) + 2 + max(map(len, places)) <= console.width
    console.print(Text(lines[0] + ("  in" if is_wide else ""), style="dim"))
    kind_at = sum(widths[i] + 2 for i in used[: used.index(1)])
    for row, line, place in zip(rows, lines[1:], places, strict=True):
        text = Text(line + (f"  {place}" if is_wide else ""))
        text.stylize(STYLE.get(row.kind, "yellow"), kind_at, kind_at + len(row.kind))
        console.print(text)
        if note := read_notes(row.root).line:
            console.print(Text(f"  {printable(note)}", style="dim", overflow="fold"))
        if not is_wide:
            console.print(Text(f"  {place}", style="dim", overflow="fold"))


def _aligned(cell: str, width: int, column: int) -> str:
    return f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"


def _cells(row: Row) -> tuple[str, ...]:
    facts, is_running = row.facts, row.kind == "running"
    if facts is None:
        return (printable(row.root.name), row.kind, *("-" for _ in _TITLES[2:]))
    step = "-" if facts.step is None else f"{facts.step}/{facts.num_steps}" if facts.num_steps else str(facts.step)
    elapsed_s, eta_s = facts.status.get("elapsed_s"), facts.status.get("eta_s")
    if is_running:
        time_words = span(elapsed_s) if isinstance(elapsed_s, int | float) else "-"
    else:
        time_words = f"{span(time.time() - row.since_s)} ago" if row.since_s else "-"
    return (
        printable(row.root.name),
        row.kind,
        step,
        f"{facts.accuracy[max(facts.accuracy)]:.3f}" if facts.accuracy else "-",
        time_words,
        span(eta_s) if is_running and isinstance(eta_s, int | float) else "-",
        str(facts.where.pid) if is_running else "-",
        megabytes(memory_mb(facts)) if is_running else "-",
    )


def _place(row: Row) -> str:
    """The run's folder, and its host if it is another machine."""
    host = row.state.get("host") if row.kind == "foreign" else None
    more = f" on {host}" if host else f": {row.words}" if row.facts is None else ""
    return printable(f"{row.root.parent}{more}")


def memory_mb(facts: Facts) -> float:
    """Memory of the controller and its processes together."""
    reported = [row.get("rss_mb") for row in facts.processes.values()]
    return facts.controller.get("rss_mb", 0.0) + sum(value for value in reported if isinstance(value, int | float))


def plain(row: Row) -> dict[str, Any]:
    """Convert one run to plain data."""
    facts, notes = row.facts, read_notes(row.root)
    return {
        "run": row.root.name,
        "notes": notes.notes,
        "tags": list(notes.tags),
        "folder": str(row.root),
        "kind": row.kind,
        "words": row.words,
        "step": facts.step if facts else None,
        "num_steps": facts.num_steps if facts else None,
        "pid": facts.where.pid if facts and row.kind == "running" else None,
        "host": row.state.get("host"),
        "command": row.state.get("command", "train") if facts else None,
        "memory_mb": round(memory_mb(facts), 1) if facts and row.kind == "running" else None,
    }
