"""Erases a row from the folder of a run, after a request to remove it: `areal-like lineage RUN --row ROW --erase`.

Erased are the tokens and texts of all samples of the row, and the row in the set that the run cleaned. Facts without
content (that a sample existed, its reward, its digest) remain, so that `areal-like verify` still checks the run. What
the row has already changed, the weights, cannot be erased: the versions are named.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.durable import flush_to_disk
from areal_like.errors import UserError
from areal_like.external.records import FOLDER as EXTERNAL
from controller.data.cleaned_rows import cleaned_folder
from controller.data.origins import ROWS, split_place
from controller.ledger.ledger import Ledger
from controller.ledger.mirror import HOME_FILE
from controller.report.finding import plural
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import break_seal, read_seal, write_seal
from controller.runs.lineage.answer import Answer
from controller.runs.lineage.text import ranges

RECORD = "erased.jsonl"
"""File in the run's folder with one line for each erased row: what it was used for."""
REPORTS = ("report.html", "samples.html")
"""Files that a command writes from the run's data, with texts of samples."""


@dataclass
class Erasure:
    """What is erased, and what is not."""

    rows: list[str]
    groups: list[int]
    steps: list[int]
    """Steps that were trained on the row."""
    first_version: int | None
    """First version that was; None: none was."""
    models: list[str]
    """Checkpoints and exported models with the row, also removed and uploaded ones."""
    before: str
    """The newest stored checkpoint without the row; empty: there is none."""
    unresumable: list[int] = field(default_factory=list)
    """Steps with the row that no checkpoint contains yet: a resume would train them again."""
    own_lines: list[str] = field(default_factory=list)
    """Places in the set that the run cleaned."""
    remains: list[str] = field(default_factory=list)
    """Sentences about what is not erased."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def plan(found: Answer) -> Erasure:
    """What the erasure of rows would do. found: the answer whose subjects are the rows."""
    graph, folder = found.graph, found.graph.folder
    rows = [str(node.key) for node in found.subjects]
    groups = sorted({group for row in rows for group in graph.groups_of_row(row)})
    used = sorted({version for group in groups for version in graph.chain.steps_of_group(group)})
    steps = sorted({version.step for version in used})
    names = [str(node.key) for kind in ("checkpoint", "export") for node in found.of_kind(kind, found.went_into)]
    stored = [model for model in graph.models.values() if model.kind == "checkpoint" and model.is_stored]
    newest = max((model.version.step for model in stored), default=0)
    without = [model for model in stored if model.path not in names]
    own = cleaned_folder(folder.root) / ROWS
    made = Erasure(
        rows=rows, groups=groups, steps=steps, first_version=steps[0] if steps else None,
        models=[f"{name} ({graph.models[name].state})" for name in names],
        before=max(without, key=lambda model: model.version.step).path if without else "",
        unresumable=[step for step in steps if step > newest],
        own_lines=[row for row in rows if own.is_file() and _is_in(row, own)],
    )  # fmt: skip
    made.remains = list(_remains(made, folder))
    return made


def _remains(made: Erasure, folder: RunFolder) -> Iterator[str]:
    if made.first_version is not None:
        yield (
            f"weights: version {made.first_version} and all later ones were trained on the row. Delete their "
            "checkpoints and exported models, and train again "
            + (f"from {made.before}, without the row" if made.before else "without the row")
        )
    outside = [row for row in made.rows if row not in made.own_lines]
    if outside:
        yield f"the file itself: remove the row from {outside[0]}, and from copies of that file"
    yield (
        "rewards, lengths and digests of its samples in ledger.sqlite; logs, reasons of verdicts and metrics, in which "
        "your own code may have quoted it; sinks, capsules and copies outside of the run's folder"
    )
    if (folder.root / EXTERNAL).is_dir():
        yield f"requests to external models and their answers in {EXTERNAL}/, which may have the row's texts: delete it"
    if (folder.root / HOME_FILE).is_file():
        yield f"the copy of the ledger on the disk of the controller's machine, which {HOME_FILE} names"
    if made.own_lines:
        yield "the other rows of the run can no longer be named, and the run cannot be resumed: its set has changed"
    elif made.unresumable:
        yield (
            f"the run cannot be resumed: steps {ranges(made.unresumable)} are in no checkpoint and would be trained on "
            "the row again"
        )


def erase(made: Erasure, folder: RunFolder) -> int:
    """Erase; return the number of samples whose tokens were stored. Raises UserError (the run is in progress),
    LedgerError."""
    with contextlib.closing(Ledger(folder.root, must_exist=True, keep_bytes=None)) as ledger:  # takes the run's lock
        try:
            was_sealed = read_seal(folder) is not None
        except ValueError:  # damaged
            was_sealed = False
        break_seal(folder)
        _record(made, folder)
        report = ledger.erase(made.groups)
        for line in made.own_lines:
            _blank(cleaned_folder(folder.root) / ROWS, line)
        for name in REPORTS:
            (folder.root / name).unlink(missing_ok=True)
        last_digest, run_id = ledger.last_digest.hex(), ledger.run_id
    if was_sealed:
        write_seal(folder, run_id=run_id, last_digest=last_digest)
    return report.num_samples


def words(made: Erasure, num_samples: int | None) -> list[str]:
    """Lines for the terminal. num_samples: of `erase`; None: nothing was erased yet."""
    what = f"{plural(len(made.groups), 'group')} of {', '.join(made.rows[:3])}{' and more' * (len(made.rows) > 3)}"
    used = f"trained on in step{'s' * (len(made.steps) > 1)} {ranges(made.steps)}" if made.steps else "in no step"
    lines = [f"{what}, {used}"]
    if made.models:
        lines += ["checkpoints and exported models with the row:", *(f"  {one}" for one in made.models)]
    if num_samples is None:
        lines.append("nothing is erased yet: add --yes to erase their tokens and texts from the run's folder")
    else:
        lines.append(f"erased: tokens and texts of {num_samples:,} samples; recorded in {RECORD}")
    return [*lines, "not erased:", *(f"  {one}" for one in made.remains)]


def _record(made: Erasure, folder: RunFolder) -> None:
    entry = {"time_s": time.time(), **made.as_dict()}
    with (folder.root / RECORD).open("a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())  # what follows removes what it is computed from
    flush_to_disk(folder.root)


def _is_in(row: str, own: Path) -> bool:
    place = split_place(row)
    return place is not None and Path(place[0]).absolute() == own.absolute()


def _blank(path: Path, row: str) -> None:
    """Replace a line of the set that the run cleaned."""
    place = split_place(row)
    assert place is not None
    fresh = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as old, fresh.open("wb") as new:
            for number, line in enumerate(old, start=1):
                new.write(b'{"erased": true}\n' if number == place[1] else line)
        flush_to_disk(fresh)
        fresh.replace(path)
    except OSError as error:
        raise UserError(f"the row cannot be erased ({error.strerror})", where=str(path)) from error
