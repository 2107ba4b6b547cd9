"""The real ledger on a simulated disk: what the disk may hold after a crash, and what must be true of it.

Facts are those of the virtual cluster (real_ledger.py), and LedgerModel says what the ledger must contain after each of
them. After a crash

- `kill`, and `power` with `fsync=True`: every committed transaction is there, the one in progress completely or not at
  all, audit and digests find nothing;
- `power` without fsync: the facts up to some transaction, not before the last complete copy of the log, or the loss is
  reported as a LedgerError when the ledger is opened or the tokens are read;
- `lost_syncs` (fsync reports success and does nothing): the same, and the loss may also be reported by the audit or by
  a digest that does not match. It is never silent.
"""

from __future__ import annotations

import contextlib
import errno
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import msgspec
import numpy as np
from ledger_model import LedgerModel
from real_ledger import entry_of, trajectory_of
from recorded_files import RecordedFiles
from recorded_sqlite import RecordedSqlite
from simulated_disk import Fault, Image, SimulatedDisk

from areal_like.errors import LedgerError, UserError
from controller.coordinator.effects import Effect
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import LedgerState
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.ledger.log_copier import copy_log
from controller.runs.verify.chain import Chain, check_chain

How = Literal["kill", "power", "lost_syncs"]
FactOf = tuple[Effect, list[int] | None]
SEGMENT_BYTES = 3000


class LossReported(Exception):
    """The ledger reported that facts or tokens are lost: the run cannot go on from this disk."""


class InlineCopier:
    """Copies the log when the schedule says so instead of in a thread, so that a seed repeats exactly."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_due = False
        self._database = sqlite3.connect(path, isolation_level=None, timeout=0.0)

    def request(self) -> None:
        self.is_due = True

    def copy(self) -> bool:
        """Copy now; return whether the database now holds everything."""
        self.is_due = False
        copy_log(self._database, self._path, "PASSIVE")
        try:
            busy, size, copied = self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error:
            return False
        return bool(busy == 0 and size == copied)

    def close(self) -> None:
        self._database.close()


def _difference(state: LedgerState, expected: LedgerState) -> str:
    pairs = ((name, getattr(state, name), getattr(expected, name)) for name in state.__struct_fields__)
    return "; ".join(f"{name} is {here}, not {there}" for name, here, there in pairs if here != there)


@dataclass(frozen=True)
class Recorders:
    """What reports changes of files; one for all disks of a process."""

    sqlite: RecordedSqlite
    files: RecordedFiles

    def attach(self, disk: SimulatedDisk | None) -> None:
        """Record changes for this disk from now on."""
        self.sqlite.disk = self.files.disk = disk

    def check(self) -> None:
        """Raise what went wrong in a callback of SQLite."""
        if (error := self.sqlite.error) is not None:
            self.sqlite.error = None
            raise error


@contextlib.contextmanager
def recorders() -> Iterator[Recorders]:
    """Install the recorders of a process, and the copier that is no thread."""
    with (
        RecordedSqlite().installed() as sqlite,
        RecordedFiles().installed() as files,
        mock.patch("controller.ledger.ledger.LogCopier", InlineCopier),
    ):
        yield Recorders(sqlite, files)


@dataclass(frozen=True)
class Case:
    """How disks of a run lose data, and what decides it."""

    settings: CoordinatorSettings
    recorders: Recorders
    how: How
    fsync: bool
    rng: random.Random
    found: Counter[str]
    """Counts of crashes, failures, retries and refusals."""

    @property
    def is_exact(self) -> bool:
        """Whether every committed transaction must survive a crash."""
        return self.how == "kill" or (self.how == "power" and self.fsync)

    def draw_fault(self) -> Fault:
        """A fault that strikes within the next changes."""
        number, after = self.rng.choice([errno.EIO, errno.ENOSPC]), self.rng.choice([1, 2, self.rng.randint(1, 40)])
        return Fault(number, after, is_persistent=self.rng.random() < 0.5)

    def report(self, error: Exception) -> None:
        """Raise LossReported, which is wrong where nothing may be lost."""
        assert not self.is_exact, f"what was committed is lost: {error}"
        raise LossReported(str(error)) from error


class DiskLedger:
    """The ledger during one life of its controller; `real` is open until `close`."""

    def __init__(self, folder: Path, case: Case, history: Sequence[FactOf] = (), *, has_faults: bool = False) -> None:
        """history: the facts it contains. Raises LossReported."""
        self.folder, self.case = folder, case
        self.history, self.num_first = list(history), len(history)
        share = case.rng.choice([0.2, 0.7, 1.0]) if case.how == "lost_syncs" else 0.0
        self.disk = SimulatedDisk(folder, lost_syncs=share, rng=case.rng)
        self.num_facts = len(history)
        self.boundaries = {0}
        """Numbers of facts after each transaction, also of earlier lives."""
        self.commits: list[tuple[int, int]] = []
        """Number of changes of the disk, and of facts, after each transaction."""
        self.copies: list[tuple[int, int]] = []
        """The same after each complete copy of the log."""
        self.is_open = False
        case.recorders.attach(self.disk)
        try:
            self.real = self._open(has_faults=has_faults)
        finally:
            if not self.is_open:
                case.recorders.attach(None)
        self.copies.append((len(self.disk.changes), self.num_first))

    def _open(self, *, has_faults: bool) -> Ledger:
        """Open the ledger; with faults first on a disk that fails: the error is one that the user can read."""
        if has_faults:
            self.disk.fault = self.case.draw_fault()
            with contextlib.suppress(LedgerError, UserError), contextlib.closing(self._opened()):
                pass
            self.case.recorders.check()
            self.disk.fault = None
        try:
            real = self._opened()
        except (LedgerError, UserError) as error:
            self.case.recorders.check()
            self.case.report(error)
            raise
        self.is_open = True
        return real

    def _opened(self) -> Ledger:
        try:
            return Ledger(self.folder, run_id="r", segment_bytes=SEGMENT_BYTES, fsync=self.case.fsync)
        except (LedgerError, UserError) as error:
            if self.disk.fault is not None:
                if self.case.is_exact and "damaged" in str(error):  # otherwise it may be damaged as well
                    raise AssertionError("a disk that fails was taken for a damaged ledger") from error
                self.case.found["refused openings"] += 1
            raise

    def close(self) -> None:
        """Close the ledger. What this changes is recorded while the disk is attached."""
        if self.is_open:
            self.is_open = False
            self.real.close()
            self.case.recorders.check()

    # ------------------------------------------------------------ writing

    def apply(self, facts: Sequence[FactOf]) -> None:
        """Write a transaction. Raises LedgerError; then nothing of it is in the ledger."""
        whole = [entry_of(effect, versions) for effect, versions in facts]
        self.history += facts
        try:
            self.real.apply(whole)
        except LedgerError:
            self.case.recorders.check()
            self._check_refused(len(facts))
            if self.disk.fault is None or self.disk.fault.is_persistent or self.case.rng.random() < 0.5:
                raise
            self.case.found["retries"] += 1
            self.disk.fault = None
            self.real.apply(whole)
        self.case.recorders.check()
        self.num_facts += len(facts)
        self.boundaries.add(self.num_facts)
        self.commits.append((len(self.disk.changes), self.num_facts))

    def _check_refused(self, num_facts: int) -> None:
        """None of the facts of a transaction that failed is in the ledger."""
        self.case.found["failed transactions"] += 1
        before = self.model(self.history[: len(self.history) - num_facts]).load()
        state = self.real.load()
        assert self.real.seq == self.num_facts
        assert msgspec.structs.replace(state, stored=before.stored) == before, "part of a failed transaction is stored"

    def copy_log(self) -> None:
        """The thread that copies the log has its turn."""
        copier = self.real._copier
        assert isinstance(copier, InlineCopier)
        if copier.is_due and copier.copy():
            self.copies.append((len(self.disk.changes), self.num_facts))
        self.case.recorders.check()

    # ------------------------------------------------------------ crashes

    def image(self, at: int) -> Image:
        """What the disk holds if everything ends before its change number `at` is complete."""
        self.case.found["crashes"] += 1
        if self.case.how == "kill":
            return self.disk.after_kill(at, self.case.rng)
        return self.disk.after_power_loss(at, self.case.rng)

    def allowed(self, at: int) -> set[int]:
        """Numbers of facts that the ledger may contain after such a crash."""
        commits = [(0, self.num_first), *self.commits]
        sure = max(facts for changes, facts in commits if changes <= at)
        begun = min((facts for changes, facts in commits if changes > at), default=len(self.history))
        if self.case.is_exact:
            return {sure, begun}
        least = max((facts for changes, facts in self.copies if changes <= at), default=0)
        least = 0 if self.case.how == "lost_syncs" else least
        return {facts for facts in self.boundaries | {begun} if least <= facts <= begun}

    def next_life(self, image: Image, allowed: set[int], folder: Path, *, has_faults: bool = False) -> DiskLedger:
        """Open what the disk holds in a new folder, and check it. Raises LossReported, and AssertionError."""
        self.case.recorders.attach(None)
        image.write(folder)
        found = DiskLedger(folder, self.case, has_faults=has_faults)
        try:
            if self.case.how == "lost_syncs":
                found.check_records()  # pages of different times: digests show it, the state may be any
            seq = found.real.seq
            assert seq in allowed, f"the ledger contains {seq} facts, not one of {sorted(allowed)}"
            self.case.found["facts lost"] += 0 if self.case.is_exact else max(allowed) - seq
            found.history, found.num_facts, found.num_first = self.history[:seq], seq, seq
            found.boundaries = {facts for facts in self.boundaries if facts < seq} | {seq}
            found.copies = [(0, seq)] if self.case.how == "power" else []
            found.check()
        except BaseException:
            self.case.recorders.attach(None)
            found.close()
            raise
        return found

    # ------------------------------------------------------------ what must be true

    def model(self, history: Sequence[FactOf] | None = None) -> LedgerModel:
        """The model after these facts; None: after all."""
        settings = self.case.settings
        model = LedgerModel(
            settings.groups_per_step, settings.group_size, settings.bound, settings.on_stale, settings.least_groups,
            settings.replay,
        )  # fmt: skip
        for effect, versions in self.history if history is None else history:
            model.apply(effect, versions)
        return model

    def check(self) -> None:
        """State, tokens, audit and digests are those of the facts. Raises LossReported, and AssertionError."""
        model = self.model()
        expected, state = model.load(), self.real.load()
        stored = state.stored
        assert stored <= expected.stored
        state = msgspec.structs.replace(state, stored=expected.stored)
        assert state == expected, _difference(state, expected)
        try:
            self._check_tokens(model, stored)
        except LedgerError as error:
            self.case.report(error)
        self.check_records()

    def _check_tokens(self, model: LedgerModel, stored: frozenset[int]) -> None:
        for group_id, group in model.groups.items():
            for index, sample in group.samples.items():
                if sample.is_finished and (group.fate == "live" or (group_id in stored and sample.is_kept)):
                    (trajectory,) = self.real.trajectories(group_id, index)
                    written = trajectory_of(sample.versions)
                    assert np.array_equal(trajectory.versions_T, written.versions_T), "other versions than were stored"
                    assert np.array_equal(trajectory.tokens_T, written.tokens_T), "other tokens than were stored"
                elif not sample.is_finished and group.fate == "live":
                    prefix = self.real.prefix(group_id, index)
                    assert prefix.versions_R.tolist() == sample.partial, "other versions than were stored"

    def check_records(self) -> None:
        """Audit and digests find nothing. Raises LossReported, and AssertionError."""
        chain = Chain()
        try:
            report = audit(self.folder)
            with contextlib.closing(sqlite3.connect(f"{(self.folder / LEDGER_FILE).as_uri()}?mode=ro", uri=True)) as db:
                check_chain(db, self.folder, chain)
        except (LedgerError, sqlite3.Error, ValueError, TypeError, KeyError) as error:
            self.case.report(error)
            return
        if findings := [*map(str, report.findings), *chain.breaks]:
            self.case.report(LedgerError(findings[0]))
