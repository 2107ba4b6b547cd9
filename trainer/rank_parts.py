"""Checkpoints of which every rank writes its own part, all at the same time; rank 0 writes the rest and completes them.

It contains a rank's file and the agreement of the ranks on one checkpoint. What else a checkpoint has is written in
training_state.py, the folder is managed in checkpoints/checkpoint.py, and parts are read in
areal_like/weights/tensor_parts.py. With `trainer.checkpoint.parts: rank_0` gathered.py is used instead.

Rank 0 creates the temporary folder and sends its path. Each rank writes and flushes its file there; every ROUND_S they
add up how many are still writing and whether one failed, so that a slow disk is no silence and a failure ends the write
of all. Then each sends size and checksum of its file, and rank 0 writes the manifest and renames the folder. If a rank
dies, the others raise RankLost and the temporary folder is removed, by rank 0 or by its next start.

All methods block, and belong on the thread that writes checkpoints. They use its process group.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from io import FileIO
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from areal_like.errors import OperationError, UserError, first_line
from areal_like.weights.payload_layout import TensorLayout, lay_out
from areal_like.weights.tensor_parts import PLACES, PartPlace, part_name
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointState, Facts, Retention
from trainer.host_copy import Copied
from trainer.peer_errors import RankLost, peer_errors_as_rank_lost
from trainer.ranks import Ranks
from trainer.weights.publish import tensor_bytes
from trainer.weights.tensor_file import PIECE_BYTES, FileFacts

log = logging.getLogger(__name__)

ROUND_S = 1.0
"""Time that a rank writes before it tells the others that it is still writing."""
FLUSH_BYTES = 1 << 30
"""Bytes after which a file is flushed, so that the last flush takes no longer than the others' patience."""
REMEDY = "put the run's folder on storage that all ranks share, or set trainer.checkpoint.parts: rank_0"
_REPORT_BYTES = 2048


class PartFile:
    """One rank's file, written a little at a time. Creating it touches no disk."""

    def __init__(self, file: Path, copied: Copied, more: Mapping[str, torch.Tensor] | None = None) -> None:
        """copied: the rank's part. more: full CPU tensors to add to it."""
        self._file, self._copied, self._more = file, copied, more or {}
        self._pieces = self._write()
        self.facts: FileFacts | None = None
        """Once it is complete."""

    def advance(self, until_s: float) -> bool:
        """Write until that time (monotonic), at least one piece; returns whether the file is complete and flushed.

        Raises OSError.
        """
        return all(time.monotonic() < until_s for _ in self._pieces)

    def close(self) -> None:
        """Close the file, complete or not."""
        self._pieces.close()

    def _write(self) -> Generator[None]:
        places = {place.key: PartPlace(place.shape, place.start, place.width) for place in self._copied.places}
        layout = {place.key: TensorLayout(place.dtype, (place.num_items,)) for place in self._copied.places}
        data = {
            place.key: memoryview(self._copied.buffer_U.numpy().data)[place.offset : place.offset + place.num_bytes]
            for place in self._copied.places
        }
        for key, tensor in self._more.items():
            found = tensor_bytes(tensor)
            places[key], data[key] = PartPlace(tuple(tensor.shape), 0), found.data.cast("B")
            layout[key] = TensorLayout(found.dtype, (tensor.numel(),))
        entries, header = lay_out("disk", layout, {PLACES: msgspec.json.encode(places).decode()})
        digest, unflushed = hashlib.sha256(), 0
        with self._file.open("wb", buffering=0) as opened:
            num_bytes = put_bytes(opened, digest, memoryview(header))
            for entry in entries:
                for start in range(0, entry.num_bytes, PIECE_BYTES):
                    written = put_bytes(opened, digest, data[entry.name][start : start + PIECE_BYTES])
                    num_bytes, unflushed = num_bytes + written, unflushed + written
                    if unflushed >= FLUSH_BYTES:
                        os.fsync(opened.fileno())
                        unflushed = 0
                    yield
            os.fsync(opened.fileno())
        self.facts = FileFacts(num_bytes, digest.hexdigest())


def put_bytes(file: FileIO, digest: hashlib._Hash, data: memoryview) -> int:
    """Write and hash; returns the number of bytes. Raises OSError."""
    left = data.cast("B")
    while len(left):
        written = file.write(left[:PIECE_BYTES])
        digest.update(left[:written])
        left = left[written:]
    return data.nbytes


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its file: size and SHA-256, or the error that ended it."""

    host: str
    num_bytes: int = 0
    sha256: str = ""
    errno: int = 0
    error: str = ""


class PartMessages:
    """What the ranks say to each other about a checkpoint, over the process group of checkpoints."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group, self._size = group, size

    def send_path(self, path: str) -> None:
        """On rank 0: send the folder; empty: there is nothing to write. Raises RankLost."""
        data = torch.frombuffer(bytearray(path.encode() or b"\0"), dtype=torch.uint8)
        with peer_errors_as_rank_lost("starting a checkpoint"):
            dist.broadcast(torch.tensor([len(path.encode())]), 0, group=self._group)
            dist.broadcast(data, 0, group=self._group)

    def receive_path(self) -> str:
        """On other ranks: receive what rank 0 sends with `send_path`. Raises RankLost."""
        size = torch.zeros(1, dtype=torch.int64)
        with peer_errors_as_rank_lost("waiting for rank 0 to start a checkpoint"):
            dist.broadcast(size, 0, group=self._group)
            data = torch.empty(max(1, int(size)), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._group)
        return data.numpy().tobytes().decode() if int(size) else ""

    def sum(self, *flags: bool) -> list[int]:
        """Count the ranks for which each flag is true. Collective. Raises RankLost."""
        values = torch.tensor([int(flag) for flag in flags])
        with peer_errors_as_rank_lost("writing a checkpoint together"):
            dist.all_reduce(values, group=self._group)
        return [int(value) for value in values]

    def gather(self, own: PartReport) -> list[PartReport]:
        """Return the reports of all ranks, by rank. Collective. Raises RankLost."""
        text = msgspec.json.encode(msgspec.structs.replace(own, host=own.host[:200], error=own.error[:200]))
        sent = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._size)]
        with peer_errors_as_rank_lost("completing a checkpoint"):
            dist.all_gather(received, sent, group=self._group)
        decoder = msgspec.json.Decoder(PartReport)
        return [decoder.decode(one.numpy().tobytes().rstrip(b"\0")) for one in received]


class RankParts:
    """One rank's side of checkpoints that all ranks write."""

    def __init__(self, messages: PartMessages, rank: int, size: int) -> None:
        self._messages, self._rank, self._size = messages, rank, size

    @staticmethod
    def of(ranks: Ranks) -> RankParts:
        """Create it for several ranks."""
        assert ranks.saves is not None
        return RankParts(PartMessages(ranks.saves.group, ranks.size), ranks.rank, ranks.size)

    def lead(
        self,
        run_dir: Path,
        state: CheckpointState,
        copied: Copied,
        more: Mapping[str, torch.Tensor],
        write_rest: Callable[[Path], None],
        retention: Retention,
    ) -> tuple[Path, int]:
        """On rank 0: write a checkpoint together with the others, which call `follow`; returns the folder and its size.

        more: full tensors that are added to rank 0's part. write_rest: writes the other files, except those of
        checkpoints/checkpoint.py. Raises OperationError if writing fails on any rank, RankLost.
        """
        is_announced = False

        def write(partial: Path) -> Facts:
            nonlocal is_announced
            write_rest(partial)
            self._messages.send_path(str(partial.absolute()))
            is_announced = True
            reports = self._write_together(PartFile(partial / part_name(0, self._size), copied, more))
            _check(reports, partial)
            return {
                part_name(rank, self._size): FileFacts(one.num_bytes, one.sha256) for rank, one in enumerate(reports)
            }

        copied.wait()
        try:
            return checkpoint.save(run_dir, state, write, retention)
        except RankLost:
            raise
        except Exception:
            if not is_announced:
                self._messages.send_path("")
            raise

    def follow(self, copied: Copied) -> None:
        """On other ranks: write this rank's part where rank 0 says. Rank 0 reports what fails. Raises RankLost."""
        copied.wait()
        if path := self._messages.receive_path():
            self._write_together(PartFile(Path(path) / part_name(self._rank, self._size), copied))

    def _write_together(self, file: PartFile) -> list[PartReport]:
        """Write this rank's file until all are complete, or one failed; returns the reports by rank."""
        own = PartReport(host=socket.gethostname())
        is_complete = False
        try:
            while True:
                try:
                    is_complete = is_complete or file.advance(time.monotonic() + ROUND_S)
                except Exception as error:  # the others wait for this rank, whatever it is
                    own = _failed(own, error)
                num_writing, num_failed = self._messages.sum(not is_complete, bool(own.errno))
                if num_failed or not num_writing:
                    break
        finally:
            file.close()  # before rank 0 may remove it: NFS keeps files that are open
        if file.facts is not None:
            own = msgspec.structs.replace(own, num_bytes=file.facts.num_bytes, sha256=file.facts.sha256)
        return self._messages.gather(own)


def _failed(own: PartReport, error: Exception) -> PartReport:
    """Return the report of a rank that could not write its file."""
    if isinstance(error, OSError):
        return msgspec.structs.replace(own, errno=error.errno or errno.EIO, error=error.strerror or str(error))
    log.error("this rank's part of a checkpoint cannot be written", exc_info=error)
    return msgspec.structs.replace(own, errno=errno.EIO, error=f"{type(error).__name__}: {first_line(error)}")


def _check(reports: Sequence[PartReport], partial: Path) -> None:
    """Raise OSError or OperationError if a rank failed, or rank 0 does not see what it wrote."""
    for rank, report in enumerate(reports):
        if report.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(report.errno, os.strerror(report.errno))
        if report.errno == errno.ENOENT and rank:
            raise OperationError(_not_shared(rank, report.host, partial.parent))
        if report.errno:
            raise OSError(report.errno, f"rank {rank} on {report.host}: {report.error}")
    for rank, report in enumerate(reports):
        file = partial / part_name(rank, len(reports))
        if not file.is_file() or file.stat().st_size != report.num_bytes:
            raise OperationError(_not_shared(rank, report.host, partial.parent))


def _not_shared(rank: int, host: str, folder: Path) -> str:
    return (
        f"no checkpoint was written: rank {rank} on {host} and rank 0 do not see the same folder {folder} -> {REMEDY}"
    )


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Check that every rank sees the folder in which rank 0 creates checkpoints. Collective.

    Raises UserError on every rank, naming the first that does not, or may not look.
    """
    number, reason = 0, ""
    if ranks.is_leader:
        try:
            _probe(folder, os.getpid()).mkdir(parents=True, exist_ok=True)
            number = os.getpid()
        except OSError as error:
            reason = f" ({error.strerror})"
    number = int(ranks.sum(torch.tensor([number], device=ranks.device)))
    if not number:
        what = f"rank 0 cannot create the folder of checkpoints{reason}"
        raise UserError(what, where=str(folder), remedy="choose a different runs_dir, or correct its permissions")
    probe = _probe(folder, number)
    first = ranks.min(torch.tensor([ranks.size if os.path.isdir(probe) else ranks.rank], device=ranks.device))
    if ranks.is_leader:
        with contextlib.suppress(OSError):  # an empty folder, which the next checkpoint removes
            probe.rmdir()
    if int(first) < ranks.size:
        what = f"rank {int(first)} does not see the folder that rank 0 has created, so it cannot write its part there"
        raise UserError(what, where=str(folder), remedy=REMEDY)


def _probe(folder: Path, pid: int) -> Path:
    """A name that is removed like those of every writer that is gone (checkpoints/atomic_folder.py)."""
    return folder / f".shared.{pid}.partial"
