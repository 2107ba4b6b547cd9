"""Rows that a long benchmark has measured, stored as they arrive, so that an interrupted call loses none of them.

Contains the file of rows next to the runs, which `--go-on` reads, and the command-line options that benchmarks share.
Results are located in publishing.py and written in runs.py.

Everything is measured again unless `--go-on` is given; then rows of an earlier call with the same words are taken, and
each records the date and commit of its measurement, since the machine may have been another one that day.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.folders import REPOSITORY
from benchmarks.publishing import RUNS, add_replace
from benchmarks.runs import train

Row = dict[str, Any]
T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--runs-dir`, `--go-on` and `--replace`."""
    add_rows(parser)
    add_replace(parser)


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add `--runs-dir` and `--go-on`."""
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    parser.add_argument("--go-on", action="store_true", help="take rows that an interrupted call has measured")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add `[CONFIG] [key=value ...]`, a user's job; `--config CONFIG` is the same."""
    parser.add_argument("config", nargs="?", default="", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", dest="named", metavar="CONFIG", help="the same as CONFIG")


def parse_job(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line with `add_job`; a word with `=` is an override, the one without is CONFIG."""
    options = parser.parse_intermixed_args()
    words = [word for word in (options.config, *options.overrides) if word]
    configs = [*([options.named] if options.named else []), *(word for word in words if "=" not in word)]
    if len(configs) > 1:
        parser.error(f"{' and '.join(configs)}: give one CONFIG; overrides are key=value")
    options.config, options.overrides = "".join(configs), [word for word in words if "=" in word]
    return options


def several(read: Callable[[str], T], what: str) -> Callable[[str], list[T]]:
    """An argparse type: one or more values separated by commas. read: parses one and raises ValueError; what: their
    description."""

    def values(text: str) -> list[T]:
        try:
            return [read(word) for word in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: write {what}, separated by commas") from error

    return values


def _whole(word: str) -> int:
    if (value := int(word)) < 0:
        raise ValueError(word)
    return value


def _number(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(word)
    return value


def _as_written(word: str) -> str:
    _number(word)
    return word


def _bound(word: str) -> str:
    return word if word == "unbounded" else str(_whole(word))


INTEGERS = several(_whole, "whole numbers from 0")
NUMBERS = several(_number, "numbers")
TEXTS = several(_as_written, "numbers such as 1e-5")
"""Kept as text, since they become overrides."""
BOUNDS = several(_bound, "whole numbers from 0 or `unbounded`")
"""Kept as text: values of staleness.max_staleness."""


class Measured:
    """The rows of one benchmark. path: the file of rows; None: they are not stored."""

    def __init__(self, path: Path | None, *, is_going_on: bool = False) -> None:
        self._path = path
        self._used: set[str] = set()
        rows = _read(path) if path is not None else {}
        self._found = rows if is_going_on else {}
        if rows and not is_going_on:
            print(f"{len(rows)} rows of an interrupted call exist; --go-on uses them", flush=True)

    @classmethod
    def of(cls, question: str, options: argparse.Namespace) -> Measured:
        """Rows for a command line with `add_options`; with --quick none are stored."""
        path = options.runs_dir.resolve() / f"{question}.rows.jsonl"
        return cls(None if options.quick else path, is_going_on=options.go_on)

    def row(self, key: Sequence[object], measure: Callable[[], Row]) -> Row:
        """The row of `key`, measured unless an earlier call has measured it. key: everything that the row depends on;
        for a file, its content counts.

        `measured` in the row has the date and commit.
        """
        words = [_content(str(part)) for part in key]
        self._used.add(_name(words))
        if (known := self._found.get(_name(words))) is not None:
            print(f"  as measured on {known['date']} with {known['commit']}:", flush=True)
        else:
            known = {"key": words, "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "row": measure()}
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(known) + "\n")
        return {**known["row"], "measured": f"{known['date']} {known['commit']}"}

    def has(self, key: Sequence[object]) -> bool:
        """Whether an earlier call has measured the row of `key`, so that `row` will take it."""
        return _name([_content(str(part)) for part in key]) in self._found

    def job(self, config: str, settings: Sequence[str], runs_dir: Path) -> Row:
        """The summary of a job with these overrides."""
        return self.row([config, *settings], partial(train, config, settings, runs_dir))

    def finish(self) -> None:
        """Remove the rows of this call after the result is written, so that the next call measures them again."""
        if self._path is None or not self._path.is_file():
            return
        others = [row for name, row in _read(self._path).items() if name not in self._used]
        if others:
            self._path.write_text("".join(json.dumps(row) + "\n" for row in others))
        else:
            self._path.unlink()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The newest row of each key; the last line may be incomplete, since calls can be interrupted."""
    rows = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[_name(row["key"])] = row
    return rows


def _name(words: Sequence[str]) -> str:
    return json.dumps(words)


def _content(word: str) -> str:
    """A file's name with a digest of its content, since it may have changed; also for a file after `key=`."""
    path = next((text for text in (word, word.partition("=")[2]) if os.path.isfile(text)), None)
    return word if path is None else f"{word} {sha256(Path(path).read_bytes()).hexdigest()[:12]}"


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    code = ["--", ".", ":!benchmarks/results", ":!docs/pictures"]  # written by benchmarks themselves
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["describe", "--always"], ["status", "--porcelain", "--untracked-files=no", *code])
        )
        return f"{commit}-dirty" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return "a checkout without git"
