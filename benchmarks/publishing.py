"""Chooses where a benchmark's result is written: over the published result, or next to the runs.

runs.py writes it. Published figures are those of the documentation, each with its command. The result of another
command (a user's own job, fewer seeds, other sizes) does not replace them by default: it is written next to the runs,
and --replace publishes it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path

from benchmarks import folders, runs

RUNS = Path("runs/benchmarks")
"""Default folder for runs of benchmarks (--runs-dir)."""
SWITCHES = ("--no-plan", "--no-real")
"""Options without a value."""


def add_replace(parser: argparse.ArgumentParser) -> None:
    """Add `--replace`."""
    parser.add_argument("--replace", action="store_true", help="replace the published result, whatever command made it")


def next_to_runs(question: str, options: argparse.Namespace) -> Path:
    """The result file next to the runs of a call."""
    runs_dir: Path = getattr(options, "runs_dir", RUNS)
    return runs_dir.resolve() / f"{question}.json"


def result_path(question: str, options: argparse.Namespace) -> Path:
    """The path for the result of this call; printed if it is not the published one.

    The result of a user's job (CONFIG or overrides) replaces only a result that the same command has made.
    """
    published = folders.RESULTS / f"{question}.json"
    made = json.loads(published.read_text())["command"] if published.is_file() else None
    return chosen(question, options, published, made)


def chosen(
    question: str, options: argparse.Namespace, published: Path, made: str | None, ignored: Collection[str] = ()
) -> Path:
    """`published`, or a file next to the runs. made: the command of the published result; None: there is none; ignored:
    options that may differ.
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
    """A command's options with their values, sorted and without the ignored ones, and its other words in their order.
    Of two overrides of one key the last one counts.
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
