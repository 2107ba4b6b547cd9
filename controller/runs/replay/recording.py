"""What a run recorded of its trainer: specs, batches, metrics, checkpoints. Read-only; the run has ended."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.config import ProcessSpec
from areal_like.errors import LedgerError, UserError
from areal_like.metrics import read_jsonl
from areal_like.wire.messages import Batch
from controller.coordinator.snapshot import BatchRecord
from controller.ledger.batch_reader import BatchReader
from controller.ledger.ledger import SEGMENT_FOLDER
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.runs.replay.starts import Start, chain_of
from controller.runs.sample_rows import check_schema, open_ledger
from controller.wiring.checkpoints import checkpoint_problem, checkpoints_on_disk
from controller.wiring.replay import recalls_versions

KEEP = "set ledger.keep_mb: null before starting a run to keep the tokens of all steps"


class Origin(NamedTuple):
    """Where a replay starts: a version and its checkpoint; None: the starting model."""

    version: int
    checkpoint: Path | None


@dataclass(frozen=True)
class Recording:
    """The record of one run. Made by `open_recording`."""

    folder: RunFolder
    state: Mapping[str, Any]
    """Its state.json."""
    setup: Mapping[str, Any]
    """Its trainer.json; empty if there is none."""
    specs: tuple[ProcessSpec, ...]
    """The specs that the last start of the trainer had, by rank."""
    reader: BatchReader
    batches: Mapping[int, BatchRecord]
    rows: Mapping[int, Mapping[str, Any]]
    """The newest metrics row of each step."""
    repeated: frozenset[int]
    """Steps that more than one start of the trainer was given; their rows may be of any of these."""
    checkpoints: Mapping[int, Path]
    """Kept checkpoints by version."""
    last_step: int
    """The last step that was trained."""
    chain: tuple[Start, ...]

    @property
    def spec(self) -> ProcessSpec:
        """The spec of rank 0."""
        return self.specs[0]

    @property
    def num_threads(self) -> int:
        """Compute threads that a rank had."""
        threads = self.setup.get("threads")
        return threads if isinstance(threads, int) and threads > 0 else self.spec.num_threads

    @property
    def home(self) -> Path:
        """The folder in which the run was started: relative paths and the user's modules are found there."""
        home = Path(str(self.state.get("started_in", ".")))
        return home if home.is_dir() else Path.cwd()

    @property
    def exported(self) -> Path | None:
        """The policy that a finished run exported after its last step."""
        is_whole = self.state.get("status") == "finished" and (self.folder.final / "config.json").is_file()
        return self.folder.final if is_whole else None

    def batch(self, step: int) -> Batch:
        """The batch of a step as the trainer received it. Raises LedgerError if it is damaged or purged."""
        record = self.batches[step]
        try:
            samples = self.reader.samples(record)
        except LedgerError as error:
            raise LedgerError(f"the batch of step {step} cannot be read: {error}") from error
        return Batch(step=step, lineage=record.lineage, samples=samples)

    def check_step(self, step: int, option: str) -> None:
        """Raise UserError if the step was not trained."""
        if not 1 <= step <= self.last_step:
            what = f"there is no step {step}" if self.last_step else "no step was trained"
            has = f"the run has steps 1 to {self.last_step}" if self.last_step else "specify a run that has "
            "trained at least one step"
            raise UserError(what, where=option, remedy=has)

    def origin(self, at_most: int, say: Any) -> Origin:
        """The newest intact checkpoint of a version up to `at_most`; without one the starting model.

        say: takes a note on each damaged checkpoint.
        """
        for version in sorted(self.checkpoints, reverse=True):
            if version > at_most:
                continue
            problem = checkpoint_problem(self.checkpoints[version])
            if problem is None:
                return Origin(version, self.checkpoints[version])
            say(f"checkpoint {version} was skipped: {problem}")
        return Origin(0, None)

    def check_origin(self, origin: Origin, last: int) -> None:
        """Raise UserError if the steps from `origin` to `last` cannot be replayed."""
        is_start = origin.version in {start.base for start in self.chain}
        if not is_start and recalls_versions(self.spec):
            what = (
                f"the trainer was never started at version {origin.version}, and the following steps need earlier "
                "versions"
            )
            raise UserError(what, where="trainer.version_logprobs", remedy="remove --from to replay from the beginning")
        model = in_home(Path(str(self.spec.model.path)), self.home)
        if origin.checkpoint is None and not (model / "config.json").is_file():
            what = f"the starting model no longer exists: {self.spec.model.path}"
            raise UserError(what, where=str(self.folder.root), remedy=self._other_origin("restore it", last))
        for step in range(origin.version + 1, last + 1):
            if step not in self.batches:
                remedy = self._other_origin("run areal-like verify to see what is damaged", last)
                raise UserError(f"the ledger has no batch of step {step}", where=str(self.folder.root), remedy=remedy)
            if number := self.reader.num_purged(self.batches[step]):
                what = f"the tokens of {number} samples of step {step} are no longer stored"
                raise UserError(what, where=str(self.folder.root), remedy=self._other_origin(KEEP, last))

    def _other_origin(self, otherwise: str, last: int) -> str:
        """A remedy: an earlier checkpoint from which the later steps can be replayed, or `otherwise`."""
        for version in sorted(self.checkpoints):
            if version < last and all(self.is_stored(step) for step in range(version + 1, last + 1)):
                return f"replay only a later part with --from {version}; {otherwise}"
        return otherwise

    def is_stored(self, step: int) -> bool:
        """Whether the step's batch is recorded with all its tokens."""
        return step in self.batches and not self.reader.num_purged(self.batches[step])


def in_home(path: Path, home: Path) -> Path:
    """A path of the configuration; a relative one is of the folder in which the run was started."""
    return home / path.expanduser()


@contextmanager
def open_recording(folder: RunFolder) -> Iterator[Recording]:
    """Open the record of a run. Raises UserError if the run goes on, or has nothing to replay; LedgerError."""
    folder.refuse_if_running()
    state, root = folder.read_state(), str(folder.root)
    if is_from_files(state):
        raise UserError(
            "the run trains from files, so it has no ledger",
            where=root,
            remedy="specify a run that was started with `areal-like train`",
        )
    specs = _specs(folder)
    if specs[0].emulation is not None:
        raise UserError(
            "the devices of the run were emulated, so there are no results to compare",
            where=root,
            remedy="specify a run with real devices",
        )
    if not folder.ledger.is_file():
        raise UserError("the run has no ledger", where=root, remedy="specify a run that has trained at least one step")
    with _damage_named(folder):
        db, _ = open_ledger(folder)
    with closing(BatchReader(db, folder.root / SEGMENT_FOLDER)) as reader:
        with _damage_named(folder):
            check_schema(db, folder)
            recording = _read(folder, state, specs, reader)
        yield recording


@contextmanager
def _damage_named(folder: RunFolder) -> Iterator[None]:
    """Raise UserError for what a damaged ledger raises."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        remedy = "run areal-like verify to see what is damaged"
        raise UserError(f"the file cannot be read ({error})", where=str(folder.ledger), remedy=remedy) from error


def _read(
    folder: RunFolder, state: Mapping[str, Any], specs: tuple[ProcessSpec, ...], reader: BatchReader
) -> Recording:
    batches = reader.batches()
    rows = {row["step"]: row for row in read_jsonl(folder.metrics) if row.get("kind") == "step" and _is_step(row)}
    kept = {version: path for version, path in checkpoints_on_disk(folder.root) if version in batches}
    last_step = max([0, *kept, *(step for step in rows if step in batches)])
    return Recording(
        folder=folder,
        state=state,
        setup=_json(folder.root / "trainer.json"),
        specs=specs,
        reader=reader,
        batches=batches,
        rows=rows,
        repeated=frozenset(reader.repeated_steps()),
        checkpoints=kept,
        last_step=last_step,
        chain=chain_of(reader.starts(), last_step),
    )


def _is_step(row: Mapping[str, Any]) -> bool:
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def _specs(folder: RunFolder) -> tuple[ProcessSpec, ...]:
    """The specs of the trainer's ranks, as they were started last."""
    first = folder.processes / "trainer.json"
    if not first.is_file():
        remedy = "specify a run that has trained at least one step"
        raise UserError("the run never started a trainer", where=str(folder.root), remedy=remedy)
    spec = ProcessSpec.load(first)
    others = (ProcessSpec.load(folder.processes / f"trainer-{rank}.json") for rank in range(1, spec.num_ranks))
    return (spec, *others)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
