"""Append-only files of token payloads: one record with a checksum per sample or part of a sample.

Defines the record format, limits the size of files, and reads records. Which records are needed is decided in
ledger.py.

A record is written before the row that refers to it is committed. After kill -9 a row therefore never refers to missing
bytes, and bytes without a row are never read. A new session always starts a new file.
Record: magic "ALS1", crc32 (u32), length (u32), payload (msgpack of dtype-fixed raw arrays), all little-endian.

In an encrypted run a file begins with a header, the magic is "ALS2", and the payload is encrypted
(areal_like/encryption/record_cipher.py); crc32 and length are of the stored bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast, get_args

import msgspec
import numpy as np

from areal_like.durable import flush_to_disk
from areal_like.encryption import record_cipher
from areal_like.encryption.record_cipher import RecordCipher, WrongRecord
from areal_like.encryption.run_key import MARKER, RunKey, run_key_of
from areal_like.errors import LedgerError
from areal_like.token_source import TokenSource
from areal_like.trajectory import EXPERT_TYPES, FinishReason, Segment, Trajectory
from areal_like.turn_checkpoint import TurnCheckpoint

HEADER = struct.Struct("<4sII")
MAGIC, SEALED_MAGIC = b"ALS1", b"ALS2"
MAX_IOVEC = 512
SCRUB_BYTES = 1 << 20


class Location(NamedTuple):
    """Location of a record: file number, byte offset of its header, size with header."""

    file: int
    offset: int
    size: int


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A payload as bytes; `mask` is empty for partial segments (every token was sampled), `experts` if none are known.
    Records of older runs end before the fields they lack.
    """

    tokens: bytes
    logprobs: bytes
    versions: bytes
    mask: bytes = b""
    finish_reason: str = ""
    response_text: str = ""
    experts: bytes = b""
    experts_type: str = ""
    experts_shape: tuple[int, int, int] = (0, 0, 0)
    given: tuple[bytes, bytes] = (b"", b"")
    """For a partial segment with a checkpoint: positions and ids of given tokens."""
    num_turns: int = -1
    """-1: there is no checkpoint."""
    state: bytes = b""
    turns: tuple[bytes, bytes] = (b"", b"")
    """For a trajectory whose turns have rewards: ends and rewards of the turns."""
    answers: tuple[bytes, bytes] = (b"", b"")
    """For a trajectory or a checkpoint whose answers are known: ends and numbers of the answers."""
    others: tuple[bytes, ...] = ()
    """For a sample of several trajectories: the other trajectories, each packed."""
    sources: tuple[TokenSource, ...] = ()
    """For a trajectory or a checkpoint, if a workflow calls several models."""
    teacher: bytes = b""
    """For a trajectory with log-probs of a teacher (`trainer.teacher.model`)."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Packed)


def pack_segment(segment: Segment, checkpoint: TurnCheckpoint | None = None) -> bytes:
    """Encode a partial answer."""
    packed = _Packed(segment.tokens_R.tobytes(), segment.logprobs_R.tobytes(), segment.versions_R.tobytes())
    if checkpoint is not None:
        given = (checkpoint.given_places_G.tobytes(), checkpoint.given_tokens_G.tobytes())
        packed = msgspec.structs.replace(
            packed, given=given, num_turns=checkpoint.num_turns, state=checkpoint.state, sources=checkpoint.sources,
            answers=_pair(checkpoint.answer_ends_A, checkpoint.answer_ids_A),
        )  # fmt: skip
    return _ENCODER.encode(packed)


def unpack_checkpoint(payload: bytes) -> TurnCheckpoint | None:
    """Decode the checkpoint of a partial answer. Raises ValueError if the bytes are not a checkpoint."""
    packed = _DECODER.decode(payload)
    if packed.num_turns < 0:
        return None
    places, tokens, ends, ids = (np.frombuffer(part, np.int32) for part in (*packed.given, *packed.answers))
    return TurnCheckpoint(
        given_places_G=places, given_tokens_G=tokens, num_turns=packed.num_turns, state=packed.state,
        sources=packed.sources, answer_ends_A=ends if len(ends) else None, answer_ids_A=ids if len(ids) else None,
    )  # fmt: skip


def unpack_segment(payload: bytes) -> Segment:
    """Decode a segment. Raises ValueError (from msgspec or the contract) if the bytes are not a segment."""
    packed = _DECODER.decode(payload)
    return Segment(
        np.frombuffer(packed.tokens, np.int32),
        np.frombuffer(packed.logprobs, np.float32),
        np.frombuffer(packed.versions, np.int32),
    )


def pack_sample(trajectories: Sequence[Trajectory], response_text: str) -> bytes:
    """Encode a finished sample: its trajectories, the main one first, and texts for reports."""
    main, *others = trajectories
    packed = _packed(main, response_text)
    if others:
        packed = msgspec.structs.replace(packed, others=tuple(_ENCODER.encode(_packed(one, "")) for one in others))
    return _ENCODER.encode(packed)


def _packed(trajectory: Trajectory, response_text: str) -> _Packed:
    return _Packed(
        trajectory.tokens_T.tobytes(),
        trajectory.logprobs_T.tobytes(),
        trajectory.versions_T.tobytes(),
        trajectory.loss_mask_T.tobytes(),
        trajectory.finish_reason,
        response_text,
        *_packed_experts(trajectory.routed_experts),
        turns=_pair(trajectory.turn_ends_K, trajectory.turn_rewards_K),
        answers=_pair(trajectory.answer_ends_A, trajectory.answer_ids_A),
        sources=trajectory.sources,
        teacher=b"" if trajectory.teacher_logprobs_T is None else trajectory.teacher_logprobs_T.tobytes(),
    )


def _pair(ends: np.ndarray | None, values: np.ndarray | None) -> tuple[bytes, bytes]:
    return (b"", b"") if ends is None or values is None else (ends.tobytes(), values.tobytes())


def _packed_experts(experts: np.ndarray | None) -> tuple[bytes, str, tuple[int, int, int]]:
    if experts is None:
        return b"", "", (0, 0, 0)
    positions, layers, each = experts.shape
    return experts.tobytes(), experts.dtype.name, (positions, layers, each)


def _unpacked_experts(packed: _Packed) -> np.ndarray | None:
    if not packed.experts_type:
        return None
    kind = next((kind for kind in EXPERT_TYPES if np.dtype(kind).name == packed.experts_type), None)
    if kind is None:
        raise ValueError(f"unknown dtype of routed experts: {packed.experts_type}")
    return np.frombuffer(packed.experts, kind).reshape(packed.experts_shape)


def unpack_sample(payload: bytes) -> tuple[tuple[Trajectory, ...], str]:
    """Decode a sample: trajectories, the main one first, and response text. Raises ValueError if the bytes are not a
    sample.
    """
    packed = _DECODER.decode(payload)
    others = (_unpacked(_DECODER.decode(other)) for other in packed.others)
    return (_unpacked(packed), *others), packed.response_text


def _unpacked(packed: _Packed) -> Trajectory:
    if packed.finish_reason not in get_args(FinishReason):
        raise ValueError(f"unknown finish reason of a trajectory: {packed.finish_reason!r}")
    turn_ends, rewards = packed.turns
    answer_ends, ids = packed.answers
    return Trajectory(
        tokens_T=np.frombuffer(packed.tokens, np.int32),
        loss_mask_T=np.frombuffer(packed.mask, np.bool_),
        logprobs_T=np.frombuffer(packed.logprobs, np.float32),
        versions_T=np.frombuffer(packed.versions, np.int32),
        finish_reason=cast(FinishReason, packed.finish_reason),
        routed_experts=_unpacked_experts(packed),
        turn_ends_K=np.frombuffer(turn_ends, np.int32) if turn_ends else None,
        turn_rewards_K=np.frombuffer(rewards, np.float32) if rewards else None,
        answer_ends_A=np.frombuffer(answer_ends, np.int32) if answer_ends else None,
        answer_ids_A=np.frombuffer(ids, np.int32) if ids else None,
        sources=packed.sources,
        teacher_logprobs_T=np.frombuffer(packed.teacher, np.float32) if packed.teacher else None,
    )


class SegmentStore:
    """Appends records to numbered files and reads them by location. One writer."""

    def __init__(self, folder: Path, *, segment_bytes: int, fsync: bool, used: int = 0) -> None:
        """folder: created with the first record. used: the highest number of an earlier file, which is not used again
        after it was purged.

        Raises UserError if the run is encrypted and its key is missing or another one.
        """
        self._folder, self._segment_bytes, self._fsync = folder, segment_bytes, fsync
        self._number = max([used, *self.sizes()])
        self._key: RunKey | None = run_key_of(folder)
        self._cipher: RecordCipher | None = None
        """Of the file being written."""
        self._ciphers: dict[int, RecordCipher] = {}
        """Of the files that are open for reading."""
        self._fd: int | None = None
        self._end = 0
        self._buffers: list[bytes] = []
        self._buffered = 0
        self._readers: dict[int, int] = {}

    def path(self, number: int) -> Path:
        """The file of this number."""
        return self._folder / f"{number:06d}.seg"

    def sizes(self) -> dict[int, int]:
        """Bytes on disk by file number."""
        sizes = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := re.fullmatch(r"(\d{6,})\.seg", path.name):
                with contextlib.suppress(FileNotFoundError):  # for a reader, while the run purges
                    sizes[int(match[1])] = path.stat().st_size
        return sizes

    @property
    def writing(self) -> int | None:
        """Number of the file being written, if any."""
        return None if self._fd is None else self._number

    # ------------------------------------------------------------ writing

    def append(self, payload: bytes) -> Location:
        """Queue one record; it is on disk after `flush`."""
        if self._fd is None or self._end + self._buffered >= self._segment_bytes:
            self.flush()
            self._roll()
        offset = self._end + self._buffered
        if self._cipher is not None:
            payload = self._cipher.sealed(payload, offset)
        location = Location(self._number, offset, HEADER.size + len(payload))
        self._buffers += (HEADER.pack(self._magic, zlib.crc32(payload), len(payload)), payload)
        self._buffered += location.size
        return location

    def flush(self) -> None:
        """Write everything queued to the operating system. Raises OSError; the queue is then lost."""
        if self._fd is None or not self._buffers:
            return
        buffers, self._buffers, self._buffered = self._buffers, [], 0
        for start in range(0, len(buffers), MAX_IOVEC):
            chunk = buffers[start : start + MAX_IOVEC]
            size = sum(map(len, chunk))
            written = os.writev(self._fd, chunk)
            if written != size:  # a short write: write the rest in one piece
                rest = b"".join(chunk)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            self._end += size
        if self._fsync:
            os.fsync(self._fd)

    def discard(self) -> None:
        """After a failed transaction: discard the queue and start a new file."""
        self._buffers, self._buffered = [], 0
        self._close_writer()

    def _roll(self) -> None:
        self._close_writer()
        number = self._number + 1
        self._folder.mkdir(exist_ok=True)
        self._fd = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._number, self._end, self._cipher = number, 0, None
        if self._key is not None:
            self._cipher, header = RecordCipher.create(self._key, number)
            self._end = os.write(self._fd, header)
            if self._end != len(header):
                raise OSError(errno.ENOSPC, "the header could not be written", str(self.path(number)))
        if self._fsync:
            flush_to_disk(self._folder)  # fsync of a new file does not make its name survive power loss

    def _close_writer(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # ------------------------------------------------------------ reading

    def read(self, location: Location) -> bytes:
        """Read the payload at `location`. Raises LedgerError if it is missing or damaged."""
        where = f"{self.path(location.file)} at byte {location.offset}"
        try:
            if location.file not in self._readers:
                if len(self._readers) >= 64:
                    oldest = next(iter(self._readers))
                    os.close(self._readers.pop(oldest))
                    self._ciphers.pop(oldest, None)
                self._readers[location.file] = os.open(self.path(location.file), os.O_RDONLY)
            reader = self._readers[location.file]
            is_inside = location.offset + location.size <= os.fstat(reader).st_size  # a damaged size may be any
            record = os.pread(reader, location.size, location.offset) if is_inside else b""
        except OSError as error:
            raise LedgerError(f"cannot read {where}: {error}") from error
        if len(record) != location.size or len(record) < HEADER.size:
            raise LedgerError(f"{where}: the file is truncated; restore it from a backup, or start a new run")
        magic, checksum, length = HEADER.unpack_from(record)
        payload = record[HEADER.size :]
        if magic == SEALED_MAGIC and self._key is None:
            raise LedgerError(
                f"{where}: the record is encrypted, but the {MARKER} of the run is missing; restore it from a backup"
            )
        if magic != self._magic or length != len(payload) or zlib.crc32(payload) != checksum:
            raise LedgerError(f"{where}: the record is damaged; restore the file from a backup, or start a new run")
        return payload if self._key is None else self._opened(payload, location, self._key, where)

    def _opened(self, payload: bytes, location: Location, key: RunKey, where: str) -> bytes:
        """Decrypt a record. Raises LedgerError."""
        try:
            if location.file not in self._ciphers:
                header = os.pread(self._readers[location.file], record_cipher.HEADER.size, 0)
                self._ciphers[location.file] = RecordCipher.of(key, location.file, header)
            return self._ciphers[location.file].opened(payload, location.offset)
        except WrongRecord as error:
            raise LedgerError(f"{where}: {error}; restore the file from a backup, or start a new run") from error

    @property
    def _magic(self) -> bytes:
        return MAGIC if self._key is None else SEALED_MAGIC

    def digest(self, payload: bytes) -> bytes:
        """Digest of a payload for the ledger, 32 bytes: SHA-256, or in an encrypted run a keyed one."""
        return hashlib.sha256(payload).digest() if self._key is None else self._key.digest(payload)

    def scrub(self, number: int, kept: Iterable[tuple[int, int]]) -> int:
        """Overwrite all bytes of a file with zeros, but those of records that are still needed, and flush it.

        Args:
            number: of the file.
            kept: offset and size of each record that rows refer to.

        Returns:
            Bytes that were overwritten and were not zero before.

        Raises:
            OSError: the disk fails or is full.
        """
        assert number != self.writing
        num_bytes, place = 0, 0
        with self.path(number).open("r+b") as file:
            header = [] if self._key is None else [(0, record_cipher.HEADER.size)]
            end = file.seek(0, os.SEEK_END)
            for offset, size in [*header, *sorted(kept), (end, 0)]:
                while place < min(offset, end):  # a damaged file may end before a record
                    file.seek(place)
                    old = file.read(min(SCRUB_BYTES, offset - place))
                    if old.strip(b"\0"):
                        num_bytes += len(old)
                        file.seek(place)
                        file.write(bytes(len(old)))
                    place += len(old)
                place = max(place, offset + size)
        flush_to_disk(self.path(number))
        return num_bytes

    def delete(self, number: int) -> int:
        """Delete a file that no row refers to; return its size."""
        assert number != self.writing
        self._ciphers.pop(number, None)
        if (reader := self._readers.pop(number, None)) is not None:
            os.close(reader)
        path = self.path(number)
        freed = path.stat().st_size if path.exists() else 0
        path.unlink(missing_ok=True)
        return freed

    def close(self) -> None:
        """Close all files; queued records are lost."""
        self._close_writer()
        for reader in self._readers.values():
            os.close(reader)
        self._readers.clear()
        self._ciphers.clear()
