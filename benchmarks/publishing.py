"""Where a benchmark's result goes: over the published one, or alongside the runs.

Owns: that choice and its words. Refuses: writing (runs.py).

Published figures are those the documentation shows, each with its command. What another command finds (a job of one's
own, fewer seeds, other sizes) never takes their place unasked: it is written alongside the runs, and --replace
publishes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path

from benchmarks import folders, runs

RUNS = Path("runs/benchmarks")
"""Where runs of benchmarks lie unless --runs-dir says otherwise."""
SWITCHES = ("--no-plan", "--no-real")
"""Options without a value."""


def add_replace(parser: argparse.ArgumentParser) -> None:
    """`--replace`."""
    parser.add_argument("--replace", action="store_true", help="publish, whatever command made what is published")


def next_to_runs(question: str, options: argparse.Namespace) -> Path:
    """The result file alongside the runs of a call."""
    runs_dir: Path = getattr(options, "runs_dir", RUNS)
    return runs_dir.resolve() / f"{question}.json"


def result_path(question: str, options: argparse.Namespace) -> Path:
    """Where the result of this call goes; says so when that is not over the published one.

    A job of one's own (CONFIG or overrides) is published by the command that made the published result alone.
    """
    published = folders.RESULTS / f"{question}.json"
    made = json.loads(published.read_text())["command"] if published.is_file() else None
    return chosen(question, options, published, made)


def chosen(
    question: str, options: argparse.Namespace, published: Path, made: str | None, ignored: Collection[str] = ()
) -> Path:
    """`published`, or alongside the runs. made: the command of what is there, None for nothing; ignored: options that
    may differ.
    """
    if made is None:
        is_own = any(getattr(options, name, None) for name in ("config", "overrides"))
    else:
        is_own = words_of(made, ignored) != words_of(runs.command_of(question), ignored)
    if options.replace or not is_own:
        return published
    path = next_to_runs(question, options)
    why = f"what is there was made by `{made}`" if made else "it is about a job of your own"
    print(f"the result goes to {path}, not over the published one ({why}); --replace publishes it", flush=True)
    return path


def words_of(command: str, ignored: Collection[str] = ()) -> tuple[list[tuple[str, str]], list[str]]:
    """What a command says: its options with their values, in any order, without the ignored ones; and its other words
    in theirs (of two overrides of one key the last one holds).
    """
    options: list[tuple[str, str]] = []
    others: list[str] = []
    words = [part for word in command.split() for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        value = words.pop(0) if words and not words[0].startswith("--") and word not in SWITCHES else ""
        if word not in ignored:
            options.append((word, value))
    return sorted(options), others
