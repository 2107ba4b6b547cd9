"""Rows of a JSON Lines file that grows while a run trains on it: `data.train.follow`.

An epoch uses the rows that are complete when its first row is needed; new ones enter at the next epoch. The extent of
each epoch (rows, bytes, SHA-256 of these bytes) and the place, offset and hash of each new row are recorded in
RUN/data/followed.jsonl before the first row is used, so a resume draws the same rows. What was read must not change:
lines are only appended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import OperationError, UserError
from areal_like.finite_json import loads_finite
from areal_like.regular_file import check_regular
from controller.config.run_config import RunConfig
from controller.data.sources import RawRow, RawRows, find_files
from controller.data.table import DrawOrder, RowReader, Table, load_train

log = logging.getLogger(__name__)

KEY = "data.train"
RECORD = Path("data") / "followed.jsonl"


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that entered after the start. where: file and line; sha256: of its line without the line break."""

    where: str
    offset: int
    sha256: str


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the file that an epoch uses. first_draw: its first position in the draw order."""

    epoch: int
    first_draw: int
    rows: int
    offset: int
    """Bytes of the file that were read."""
    sha256: str
    """Of these bytes."""
    new_rows: tuple[NewRow, ...] = ()
    skipped: tuple[str, ...] = ()
    """File, line and reason of each new line that is no usable row."""


def load_training(config: RunConfig, root: Path | None = None) -> Table:
    """The rows that prompts are drawn from. root: folder of an existing run, which recorded the epochs of a file that
    it follows. Raises UserError.
    """
    if not config.data.train.follow:
        return load_train(config)
    return LiveTable(config, read_extents(root) if root is not None else ())


_DECODER = msgspec.json.Decoder(Extent)


def read_extents(root: Path) -> list[Extent]:
    """The recorded epochs of a run; empty for a run that follows no file. An incomplete last line is left out. Raises
    UserError (damaged).
    """
    path = root / RECORD
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        return [_DECODER.decode(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(
            f"the file cannot be read ({error})", where=str(path), remedy="restore the file from a backup"
        ) from error


class LiveTable(Table):
    """A table that grows. Rows keep their numbers."""

    def __init__(self, config: RunConfig, extents: Sequence[Extent] = ()) -> None:
        """Read the complete lines, or exactly those of recorded epochs. Raises UserError."""
        source = config.data.train
        (self._path,) = find_files(source.path or "", KEY)
        check_regular(self._path)
        self._offsets, self._numbers, self._kept = array("Q"), array("Q"), array("Q")
        self._digests = array("q")
        """Of the text of each line, by hash(): finds a line that was changed while this process reads it."""
        self._end = self._line = 0
        self._hash = hashlib.sha256()
        self.extents: list[Extent] = []
        self.skipped, self._is_starting = [], True
        lines = self._new_lines(extents[0].offset if extents else None)
        if not lines:
            remedy = "write one JSON object per line, and end the last line with a line break"
            raise UserError("the file contains no complete rows", where=str(self._path), remedy=remedy)
        first = [row for number, _, text in lines if (row := self._parsed(number, text)) is not None]
        raw = RawRows.of(first, lambda index: f"{self._path}:{self._numbers[index]}")
        for number, offset, text in lines:
            self._add_place(number, offset, text)
        self._reader = replace(RowReader.plan(raw, source.columns, KEY, source.template), chat=source.chat)
        digest = blake2b(digest_size=16)
        for index, fields in enumerate(first):
            if (row := self._take(index, fields)) is not None:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        self.fingerprint = digest.hexdigest()
        """Hash of the rows at the start."""
        if not self._kept:
            raise UserError(f"no row is usable; the problem with the first row: {self.skipped[0]}", where=KEY)
        self._is_starting = False
        for extent in extents:
            self._grow_to(extent)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = self._kept[index]
        with self._path.open("rb") as file:
            file.seek(self._offsets[place])
            text = file.readline().rstrip(b"\r\n")
        row = self._reader.read(loads_finite(text), self.where(index)) if hash(text) == self._digests[place] else ""
        if isinstance(row, str):
            what = (
                "the file was changed while the run was reading it; restore the original lines (new lines may be "
                "appended), then resume the run"
            )
            raise OperationError(f"{self.where(index)} {what}")
        return row

    def where(self, index: int) -> str:
        """See Table."""
        return f"{self._path}:{self._numbers[self._kept[index]]}"

    def file_at(self, index: int) -> dict[str, Any]:
        """`bytes` and `sha256` of the part of the file with which a row entered; empty before the first epoch."""
        extent = next((one for one in self.extents if index < one.rows), None)
        return {} if extent is None else {"bytes": extent.offset, "sha256": extent.sha256}

    def index_at(self, number: int) -> int | None:
        """The row at a line; None: it is none."""
        place = bisect_left(self._numbers, number)
        index = bisect_left(self._kept, place)
        is_there = index < len(self._kept) and self._numbers[self._kept[index]] == number
        return index if is_there else None

    def grow(self, epoch: int, first_draw: int) -> Extent:
        """Read the lines that were appended; those that are not usable rows are skipped. Returns the extent of an epoch
        that begins now. Raises OperationError if the file became shorter.
        """
        before, num_skipped = len(self._kept), len(self.skipped)
        digests = self._append(None) if epoch else {}
        new = tuple(
            NewRow(where=self.where(index), offset=self._offsets[place], sha256=digests[place])
            for index in range(before, len(self._kept))
            for place in (self._kept[index],)
        )
        extent = Extent(
            epoch=epoch, first_draw=first_draw, rows=len(self._kept), offset=self._end, sha256=self._hash.hexdigest(),
            new_rows=new, skipped=tuple(self.skipped[num_skipped:]),
        )  # fmt: skip
        for words in extent.skipped:
            log.warning("skipping an appended line: %s", words)
        self.extents.append(extent)
        return extent

    def _grow_to(self, extent: Extent) -> None:
        self._append(extent.offset)
        if (len(self._kept), self._end, self._hash.hexdigest()) != (extent.rows, extent.offset, extent.sha256):
            what = (
                f"the first {extent.offset:,} bytes of the file differ from those that epoch {extent.epoch} of the run "
                "used"
            )
            raise UserError(
                what, where=str(self._path), remedy="restore the original lines; lines may only be appended"
            )
        self.extents.append(extent)

    def _append(self, until: int | None) -> dict[int, str]:
        """Add the lines up to an offset; returns SHA-256 by line index."""
        digests: dict[int, str] = {}
        for number, offset, text in self._new_lines(until):
            fields = self._parsed(number, text)
            if fields is None:
                continue
            place = self._add_place(number, offset, text)
            digests[place] = hashlib.sha256(text).hexdigest()
            self._take(place, fields)
        return digests

    def _add_place(self, number: int, offset: int, text: bytes) -> int:
        self._offsets.append(offset)
        self._numbers.append(number)
        self._digests.append(hash(text))
        return len(self._offsets) - 1

    def _new_lines(self, until: int | None) -> list[tuple[int, int, bytes]]:
        """(number, offset, text) of complete lines that were not read yet and are not blank."""
        found = []
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._end:
                    raise OperationError(
                        f"{self._path} became shorter while the run was reading it; restore the removed lines, then "
                        "resume the run"
                    )
                file.seek(max(0, self._end - 1))
                if self._end and file.read(1) != b"\n":
                    raise OperationError(
                        f"{self._path} was changed while the run was reading it, but lines may only be appended; "
                        "restore the original lines, then resume the run"
                    )
                while (until is None or self._end < until) and (line := file.readline()).endswith(b"\n"):
                    self._line, offset = self._line + 1, self._end
                    self._end += len(line)
                    self._hash.update(line)
                    text = line.rstrip(b"\r\n")
                    if self._line == 1 and text.startswith(b"\xef\xbb\xbf"):
                        text, offset = text[3:], offset + 3
                    if text.strip():
                        found.append((self._line, offset, text))
        except OSError as error:
            raise OperationError(f"{self._path} cannot be read ({error.strerror})") from error
        return found

    def _parsed(self, number: int, text: bytes) -> RawRow | None:
        """The row of a line. One that is no row ends a start, and is skipped later: a run must not end by it."""
        where = f"{self._path}:{number}"
        try:
            row = loads_finite(text)
            if not isinstance(row, dict):
                raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
        except (ValueError, RecursionError) as error:
            if self._is_starting:
                raise UserError(
                    f"the line is not a valid row ({error})", where=where, remedy="correct the line"
                ) from error
            self.skipped.append(f"{where}: the line is not a valid row ({error})")
            return None
        return row

    def _take(self, place: int, fields: RawRow) -> dict[str, Any] | None:
        where = f"{self._path}:{self._numbers[place]}"
        try:
            row = self._reader.read(fields, where)
        except UserError as error:
            if self._is_starting:
                raise
            row = error.what
        if isinstance(row, str):
            self.skipped.append(f"{where}: {row}")
            return None
        self._kept.append(place)
        return row


class LiveOrder:
    """See mixing.Order. Each epoch is an order over the rows that it has."""

    max_draws = None

    def __init__(self, table: LiveTable, seed: int, shuffle: bool) -> None:
        self._table, self._seed, self._shuffle = table, seed, shuffle
        self._record: Callable[[Extent], None] = lambda _: None
        self._starts = [extent.first_draw for extent in table.extents]
        self._sizes = [extent.rows for extent in table.extents]

    @property
    def num_rows(self) -> int:
        """See Order: of the newest epoch."""
        return self._sizes[-1] if self._sizes else len(self._table)

    def record_in(self, root: Path) -> None:
        """Record epochs in a run's folder from now on, the first one at once if it is not recorded. Raises OSError."""
        path = root / RECORD
        path.parent.mkdir(exist_ok=True)
        _cut_incomplete(path)

        def record(extent: Extent) -> None:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(extent) + b"\n")
                file.flush()
                os.fsync(file.fileno())

        self._record = record
        if not self._sizes:
            self._begin_epoch()

    def row_index(self, draw: int) -> int:
        """See Order. A draw of a new epoch first reads the rows that were appended."""
        if draw < 0:
            raise IndexError(draw)
        while not self._sizes or draw >= self._starts[-1] + self._sizes[-1]:
            self._begin_epoch()
        epoch = bisect_right(self._starts, draw) - 1
        position = draw - self._starts[epoch]
        # The order of epoch e over n rows is the same as without `follow`.
        order = DrawOrder(self._sizes[epoch], self._seed, self._shuffle)
        return order.row_index(epoch * self._sizes[epoch] + position)

    def _begin_epoch(self) -> None:
        first = self._starts[-1] + self._sizes[-1] if self._sizes else 0
        extent = self._table.grow(len(self._sizes), first)
        self._record(extent)
        self._starts.append(extent.first_draw)
        self._sizes.append(extent.rows)


def _cut_incomplete(path: Path) -> None:
    """Remove a last line that a killed run did not complete."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n") and content:
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
