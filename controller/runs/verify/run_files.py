"""Compares the other files of a run with its ledger: configuration, metrics, summary and seal (`recorded-chain`)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from areal_like.encryption.files import read_text
from areal_like.metrics import read_jsonl
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE, changed_files, read_seal
from controller.runs.verify.damaged import DAMAGED

NO_SEAL = (
    "there is no seal.json, because the run is in progress, was killed, or was started by an earlier version of "
    "areal_like; bytes outside of recorded facts are not compared"
)
IN_PROGRESS = ("running", "foreign")
"""States in which files may change during the verification."""
_LINEAGE = "SELECT groups_per_step, group_size, max_staleness FROM lineages ORDER BY seq DESC LIMIT 1"


def check_files(
    db: sqlite3.Connection, folder: RunFolder, last_digest: str, status: str, breaks: list[str], notes: list[str],
    *, had_seal: bool,
) -> None:  # fmt: skip
    """Add what differs to `breaks`, and notes.

    status: of the run, by its state file. had_seal: whether there was a seal before the view of the ledger began.
    """
    steps = {step for (step,) in db.execute("SELECT step FROM batches")}
    last = max(steps, default=0)
    lineage = db.execute(_LINEAGE).fetchone()
    bases = {version for (version,) in db.execute("SELECT checkpoint_version FROM lineages")}
    parts: list[tuple[Path, Callable[[], Iterable[str]]]] = [
        (folder.config, lambda: _config(folder, last, lineage)),
        (folder.metrics, lambda: _metrics(folder, last, status, bases, notes)),
        (folder.summary, lambda: _summary(folder, last, status)),
        (folder.root / SEAL_FILE, lambda: _seal(folder, last_digest, notes) if had_seal else []),
    ]
    for path, check in parts:
        try:
            breaks.extend(check())
        except DAMAGED as error:
            breaks.append(f"{path} cannot be read ({error})")
    if not had_seal:
        notes.append(NO_SEAL)


def _config(folder: RunFolder, last: int, lineage: tuple[Any, ...] | None) -> Iterator[str]:
    try:
        config = yaml.safe_load(read_text(folder.config))
        num_steps = int(config["num_steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        yield f"{folder.config} cannot be read ({error})"
        return
    if last > num_steps:
        yield f"{folder.config}: num_steps is {num_steps}, but the ledger has {last} steps"
    if lineage is not None:
        for key, recorded in zip(("groups_per_step", "group_size"), lineage, strict=False):
            if config.get(key) != recorded:
                yield f"{folder.config}: {key} is {config.get(key)}, but the ledger's newest lineage has {recorded}"


def _metrics(folder: RunFolder, last: int, status: str, bases: set[int], notes: list[str]) -> Iterator[str]:
    """Each step has a row. A session that did not end in order may lack the rows of its last steps: at the end of the
    run, or before the checkpoint from which the run continued. bases: versions of these checkpoints.
    """
    try:
        found = [row.get("step") for row in read_jsonl(folder.metrics) if row.get("kind") == "step"]
    except OSError as error:
        yield f"{folder.metrics} cannot be read ({error.strerror})"
        return
    numbers = sorted({step for step in found if isinstance(step, int)})
    if numbers and numbers[0] < 1:
        yield f"{folder.metrics} contains step {numbers[0]}"
    for first, end in _gaps(numbers):
        if end in bases:
            notes.append(
                f"{folder.metrics} has no rows for steps {first} to {end}; the session ended before they were "
                f"reported, and the run continued from the checkpoint of version {end}"
            )
        else:
            yield f"{folder.metrics}: some steps are missing: {list(range(first, min(end, first + 9) + 1))}"
    newest = max(numbers, default=0)
    if newest > last:
        text = f"{folder.metrics} contains step {newest}, but the ledger has {last} steps"
        if status in (*IN_PROGRESS, "crashed"):
            notes.append(f"{text}; a step ended after the ledger was read, or the newest facts were lost")
        else:
            yield text
    if newest < last and status == "finished":
        yield f"{folder.metrics} has {newest} steps, but the ledger has {last}, although the run is finished"


def _gaps(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each gap in increasing numbers that should start at 1."""
    for before, number in zip([0, *numbers], numbers, strict=False):
        if number > before + 1:
            yield before + 1, number - 1


def _summary(folder: RunFolder, last: int, status: str) -> Iterator[str]:
    if status != "finished":
        return
    try:
        steps = json.loads(folder.summary.read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{folder.summary} cannot be read ({error}), although the run is finished"
        return
    if steps != last:
        yield f"{folder.summary} has {steps} steps, but the ledger has {last}"


def _seal(folder: RunFolder, last_digest: str, notes: list[str]) -> list[str]:
    try:
        seal = read_seal(folder)
    except (OSError, ValueError) as error:
        return [f"{folder.root / SEAL_FILE} is damaged ({error})"]
    breaks = [] if seal is None else list(changed_files(folder, seal))
    if seal is not None and seal.get("last_digest") != last_digest:
        breaks.append(f"{folder.root / SEAL_FILE}: the last fact of the ledger is not the last fact of the run")
    if not (folder.root / SEAL_FILE).exists():  # the run was resumed meanwhile
        notes.append(NO_SEAL)
        return []
    return breaks
