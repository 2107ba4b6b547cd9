"""Rows that a long benchmark has measured, kept as they come: an interrupted call loses none of them.

Owns: the file of rows beside the runs, and what `--go-on` takes from it. Refuses: results (runs.py writes them whole).

Everything is measured anew unless `--go-on` is given; then rows of an earlier call with the same words are taken, and
each says when and with which commit it was measured, since the machine may have been another one that day.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import REPOSITORY

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--runs-dir` and `--go-on`."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--go-on", action="store_true", help="take rows that an interrupted call has measured")


class Measured:
    """The rows of one question."""

    def __init__(self, path: Path, *, is_going_on: bool = False) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        if is_going_on:
            self._found = {_name(row["key"]): row for row in rows}
        elif rows:
            print(f"{len(rows)} rows of an interrupted call are left out; --go-on would have taken them", flush=True)
            path.unlink()

    @classmethod
    def of(cls, question: str, options: argparse.Namespace) -> Measured:
        """Of a command line with `add_options`."""
        return cls(options.runs_dir.resolve() / f"{question}.rows.jsonl", is_going_on=options.go_on)

    def row(self, key: Sequence[object], measure: Callable[[], Row]) -> Row:
        """The row of `key` (all that it depends on), measured unless an earlier call has."""
        words = [str(part) for part in key]
        if (known := self._found.get(_name(words))) is not None:
            print(f"  as measured on {known['date']} with {known['commit']}:", flush=True)
        else:
            known = {"key": words, "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "row": measure()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(known) + "\n")
        return {**known["row"], "measured": f"{known['date']} {known['commit']}"}

    def finish(self) -> None:
        """The result is written: the next call measures anew."""
        self._path.unlink(missing_ok=True)


def _name(words: Sequence[str]) -> str:
    return json.dumps(words)


def _commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "a checkout without git"
