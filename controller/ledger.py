"""The run's memory on disk. (signatures first, body follows)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from areal_like.messages import BatchSample
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from controller.protocol import BatchGroup, Effect, LedgerState

LEDGER_FILE = "ledger.sqlite"


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger effect with the payload it refers to.

    StorePartial needs `segment` (as reported: the ledger applies `skip`); StoreFinished of purpose "train" needs
    `trajectory`, and takes verdict, response_text, timings and worker for later browsing.
    """

    effect: Effect
    segment: Segment | None = None
    trajectory: Trajectory | None = None
    verdict: Verdict | None = None
    response_text: str = ""
    timings: dict[str, float] = {}
    worker: str = ""


class PurgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge removed."""

    num_samples: int
    num_files: int
    freed_bytes: int


class Ledger:
    """SQLite (WAL, synchronous=NORMAL) for facts, append-only segment files for tokens. One writer, guarded by a lock.

    Blocking calls (about a millisecond each); call them from the shell's loop or from one dedicated thread, never two.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str = "",
        must_exist: bool = False,
        segment_bytes: int = 32 << 20,
        cache_bytes: int = 64 << 20,
        keep_steps: int | None = 0,
        fsync: bool = False,
    ) -> None:
        """Open or create <run_dir>/ledger.sqlite and <run_dir>/segments/.

        segment_bytes: a segment file is closed past this size. cache_bytes: recently written payloads kept in memory.
        keep_steps: steps whose payloads stay although a checkpoint covers them (None: never purge).
        fsync: survive power loss too, not only kill -9.
        Raises UserError (locked by another controller, unwritable folder, missing although must_exist), LedgerError (damaged).
        """
        raise NotImplementedError

    def apply(self, entries: Sequence[LedgerEntry]) -> None:
        """Write all entries in one transaction and commit. Raises LedgerError (disk full, ...): nothing was recorded then."""
        raise NotImplementedError

    def load(self) -> LedgerState:
        """What the coordinator restores from."""
        raise NotImplementedError

    def prefix(self, group_id: int, sample_index: int) -> Segment:
        """The stored tokens of an unfinished sample, empty where there are none. Raises LedgerError (damaged)."""
        raise NotImplementedError

    def trajectory(self, group_id: int, sample_index: int) -> Trajectory:
        """The payload of a finished sample. Raises LedgerError where it was purged or is damaged."""
        raise NotImplementedError

    def batch_samples(self, groups: Sequence[BatchGroup]) -> tuple[BatchSample, ...]:
        """Payloads and rewards of a batch, ordered by (group_id, sample_index)."""
        raise NotImplementedError

    def purge(self, covered_step: int) -> PurgeReport:
        """Forget payloads of steps up to covered_step - keep_steps and of dropped or filtered groups; delete dead files."""
        raise NotImplementedError

    def close(self) -> None:
        """Flush, release the lock."""
        raise NotImplementedError

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
