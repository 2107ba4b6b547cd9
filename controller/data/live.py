"""Rows of JSON Lines files that grow while a run trains on them: `data.train.follow`, of a file or all of a folder.

An epoch uses the rows that are complete when its first row is needed; new ones enter at the next epoch. With
`data.train.new_share`, the files are also read every LOOK_DRAWS draws, and that share of the draws are rows that have
entered since the epoch began. The extent of each epoch and look (rows, and bytes with their SHA-256, of a folder those
of each file that has grown) and the place, offset and hash of each new row are recorded in RUN/data/followed.jsonl
before they are used, so a resume draws the same rows. What was read must not change: lines are only appended, and files
only added.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
LOOK_DRAWS = 16
"""With a share of new rows, draws after which the files are read again."""
RECORD = Path("data") / "followed.jsonl"


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that entered after the start. where: file and line; sha256: of its line without the line break."""

    where: str
    offset: int
    sha256: str


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a file that was read: its first bytes, and their SHA-256."""

    path: str
    offset: int
    sha256: str


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the files that an epoch, or its draws from a look on, use. first_draw: the first of these draws."""

    epoch: int
    first_draw: int
    rows: int
    offset: int
    """Bytes that were read, of all files."""
    sha256: str
    """Of these bytes; of several files, of their SHA-256 one after the other."""
    files: tuple[FilePart, ...] = ()
    """Of a folder: the files that have grown since the extent before, in the order in which files were found."""
    is_look: bool = False
    """Whether the epoch had begun before."""
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


def live_files(folder: Path) -> list[Path]:
    """The files of a folder that is followed, by name."""
    return sorted(path for path in folder.glob("*.jsonl") if path.is_file() and not path.name.startswith("."))


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


class _LiveFile:
    """One file, as far as it was read."""

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path, self.end, self.line = path, 0, 0
        self.hash = hashlib.sha256()
        self.numbers, self.rows = array("Q"), array("Q")
        """Line and row of each usable row of the file."""

    def part(self) -> FilePart:
        """What was read of it."""
        return FilePart(path=str(self.path), offset=self.end, sha256=self.hash.hexdigest())

    def new_lines(self, until: int | None) -> Iterator[tuple[int, int, bytes]]:
        """(number, offset, text) of complete lines that were not read yet and are not blank, up to an offset. Raises
        OperationError.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.end:
                    raise OperationError(
                        f"{self.path} became shorter while the run was reading it; restore the removed lines, then "
                        "resume the run"
                    )
                file.seek(max(0, self.end - 1))
                if self.end and file.read(1) != b"\n":
                    raise OperationError(
                        f"{self.path} was changed while the run was reading it, but lines may only be appended; "
                        "restore the original lines, then resume the run"
                    )
                while (until is None or self.end < until) and (line := file.readline()).endswith(b"\n"):
                    self.line, offset = self.line + 1, self.end
                    self.end += len(line)
                    self.hash.update(line)
                    text = line.rstrip(b"\r\n")
                    if self.line == 1 and text.startswith(b"\xef\xbb\xbf"):
                        text, offset = text[3:], offset + 3
                    if text.strip():
                        yield self.line, offset, text
        except OSError as error:
            raise OperationError(f"{self.path} cannot be read ({error.strerror})") from error


class LiveTable(Table):
    """A table that grows. Rows keep their numbers."""

    def __init__(self, config: RunConfig, extents: Sequence[Extent] = ()) -> None:
        """Read the complete lines, or exactly those of recorded epochs. Raises UserError."""
        source = config.data.train
        self._folder = Path(os.path.expanduser(source.path or ""))
        self._is_folder = self._folder.is_dir()
        found = live_files(self._folder) if self._is_folder else find_files(source.path or "", KEY)
        if self._is_folder and not found:
            remedy = "write a file of rows (.jsonl) into the folder"
            raise UserError("the folder contains no .jsonl file", where=f"{KEY}: {source.path}", remedy=remedy)
        if not self._is_folder and found[0].suffix != ".jsonl":
            remedy = f"set {KEY}.path to a .jsonl file, or to a folder of such files"
            raise UserError(
                "the file cannot be followed, because it is not a .jsonl file", where=str(found[0]), remedy=remedy
            )
        self._files: list[_LiveFile] = [] if self._is_folder else [_LiveFile(found[0])]
        self._offsets, self._numbers, self._kept = array("Q"), array("Q"), array("Q")
        self._places = array("I")
        """File of each line, by its place in `_files`."""
        self._digests = array("q")
        """Of the text of each line, by hash(): finds a line that was changed while this process reads it."""
        self.extents: list[Extent] = []
        self.skipped, self._is_starting = [], True
        lines = list(self._new_lines(extents[0] if extents else None))
        if not lines:
            remedy = "write one JSON object per line, and end the last line with a line break"
            raise UserError("the file contains no complete rows", where=str(found[0]), remedy=remedy)
        first = [row for place, number, _, text in lines if (row := self._parsed(place, number, text)) is not None]
        raw = RawRows.of(first, self._where_of_line)
        for line in lines:
            self._add_place(*line)
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
        with self._files[self._places[place]].path.open("rb") as file:
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
        return self._where_of_line(self._kept[index])

    def _where_of_line(self, place: int) -> str:
        return f"{self._files[self._places[place]].path}:{self._numbers[place]}"

    def file_at(self, index: int) -> dict[str, Any]:
        """`bytes` and `sha256` of the part of its file with which a row entered; empty before the first epoch."""
        extent = next((one for one in self.extents if index < one.rows), None)
        if extent is None:
            return {}
        path = self._files[self._places[self._kept[index]]].path
        own = (one for one in extent.files if self._here(one) == path)
        part: FilePart | Extent = next(own, extent)
        return {"bytes": part.offset, "sha256": part.sha256}

    def index_at(self, name: str, number: int) -> int | None:
        """The row at a line of a file; None: it is none."""
        wanted = Path(name).absolute()
        for file in self._files:
            if file.path.absolute() == wanted:
                place = bisect_left(file.numbers, number)
                is_there = place < len(file.numbers) and file.numbers[place] == number
                return file.rows[place] if is_there else None
        return None

    def grow(self, epoch: int, first_draw: int, *, is_look: bool = False) -> Extent:
        """Read the lines that were appended; those that are not usable rows are skipped. Returns the extent of an epoch
        that begins now, or of a look within one. Raises OperationError if a file became shorter.
        """
        before, num_skipped = len(self._kept), len(self.skipped)
        ends = [file.end for file in self._files] if self.extents else []
        digests = self._append(None) if epoch or is_look else {}
        new = tuple(
            NewRow(where=self.where(index), offset=self._offsets[place], sha256=digests[place])
            for index in range(before, len(self._kept))
            for place in (self._kept[index],)
        )
        extent = Extent(
            epoch=epoch, first_draw=first_draw, rows=len(self._kept), **self._read_so_far(),
            files=self._grown(ends), is_look=is_look, new_rows=new, skipped=tuple(self.skipped[num_skipped:]),
        )  # fmt: skip
        for words in extent.skipped:
            log.warning("skipping an appended line: %s", words)
        self.extents.append(extent)
        return extent

    def _read_so_far(self) -> dict[str, Any]:
        parts = [file.part() for file in self._files]
        if not self._is_folder:
            return {"offset": parts[0].offset, "sha256": parts[0].sha256}
        digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
        return {"offset": sum(part.offset for part in parts), "sha256": digest}

    def _grown(self, ends: Sequence[int]) -> tuple[FilePart, ...]:
        """Of a folder: the files of which more was read than before. ends: bytes that were read of the first files."""
        grown = (file for place, file in enumerate(self._files) if place >= len(ends) or file.end > ends[place])
        return tuple(file.part() for file in grown) if self._is_folder else ()

    def _grow_to(self, extent: Extent) -> None:
        self._append(extent)
        found = self._read_so_far()
        if (len(self._kept), found["offset"], found["sha256"]) != (extent.rows, extent.offset, extent.sha256):
            what = (
                f"the first {extent.offset:,} bytes of the file differ from those that epoch {extent.epoch} of the run "
                "used"
            )
            where = str(self._folder if self._is_folder else self._files[0].path)
            raise UserError(what, where=where, remedy="restore the original lines; lines may only be appended")
        self.extents.append(extent)

    def _append(self, until: Extent | None) -> dict[int, str]:
        """Add the lines up to an extent; returns SHA-256 by line index."""
        digests: dict[int, str] = {}
        for file, number, offset, text in self._new_lines(until):
            fields = self._parsed(file, number, text)
            if fields is None:
                continue
            place = self._add_place(file, number, offset, text)
            digests[place] = hashlib.sha256(text).hexdigest()
            self._take(place, fields)
        return digests

    def _add_place(self, file: int, number: int, offset: int, text: bytes) -> int:
        self._places.append(file)
        self._offsets.append(offset)
        self._numbers.append(number)
        self._digests.append(hash(text))
        return len(self._offsets) - 1

    def _new_lines(self, until: Extent | None) -> Iterator[tuple[int, int, int, bytes]]:
        """(place of the file, number, offset, text) of complete lines that were not read yet, up to an extent."""
        if not self._is_folder:
            ends: list[int | None] = [None if until is None else until.offset]
        elif until is None:
            known = {file.path for file in self._files}
            self._files += [_LiveFile(path) for path in live_files(self._folder) if path not in known]
            ends = [None] * len(self._files)
        else:
            known = {file.path for file in self._files}
            self._files += [_LiveFile(path) for part in until.files if (path := self._here(part)) not in known]
            offsets = {self._here(part): part.offset for part in until.files}
            ends = [offsets.get(file.path, file.end) for file in self._files]
        for place, (file, end) in enumerate(zip(self._files, ends, strict=True)):
            yield from ((place, *line) for line in file.new_lines(end))

    def _here(self, part: FilePart) -> Path:
        return self._folder / Path(part.path).name

    def _parsed(self, file: int, number: int, text: bytes) -> RawRow | None:
        """The row of a line. One that is no row ends a start, and is skipped later: a run must not end by it."""
        where = f"{self._files[file].path}:{number}"
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
        where = self._where_of_line(place)
        try:
            row = self._reader.read(fields, where)
        except UserError as error:
            if self._is_starting:
                raise
            row = error.what
        if isinstance(row, str):
            self.skipped.append(f"{where}: {row}")
            return None
        file = self._files[self._places[place]]
        file.numbers.append(self._numbers[place])
        file.rows.append(len(self._kept))
        self._kept.append(place)
        return row


class LiveOrder:
    """See mixing.Order. Each epoch is an order over the rows that it has when it begins.

    With a share of new rows, rows that enter within an epoch are drawn in between, oldest first; in the next epoch they
    are like all others. Which draw is whose follows from the recorded extents alone.
    """

    max_draws = None

    def __init__(self, table: LiveTable, seed: int, shuffle: bool, new_share: float | None = None) -> None:
        """new_share: `data.train.new_share`."""
        self._table, self._seed, self._shuffle, self._share = table, seed, shuffle, new_share
        self._record: Callable[[Extent], None] = lambda _: None
        self._recorded = deque(table.extents)
        """Extents of earlier sessions that no draw has reached yet."""
        self._rows = array("Q")
        """Row of each draw so far, with a share of new rows."""
        self._waiting: deque[int] = deque()
        """New rows that were not drawn yet."""
        self._position, self._epoch, self._size = 0, -1, 0
        """Of the next old row in its epoch, and rows of that epoch."""
        self._starts = [extent.first_draw for extent in table.extents if not extent.is_look]
        self._sizes = [extent.rows for extent in table.extents if not extent.is_look]

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
            extent = self._begin_epoch()
            if self._share is not None:
                self._recorded.append(extent)

    def row_index(self, draw: int) -> int:
        """See Order. A draw of a new epoch first reads the rows that were appended."""
        if draw < 0:
            raise IndexError(draw)
        if self._share is not None:
            while len(self._rows) <= draw:
                self._rows.append(self._next_row(len(self._rows), self._share))
            return self._rows[draw]
        while not self._sizes or draw >= self._starts[-1] + self._sizes[-1]:
            self._begin_epoch()
        epoch = bisect_right(self._starts, draw) - 1
        position = draw - self._starts[epoch]
        # The order of epoch e over n rows is the same as without `follow`.
        order = DrawOrder(self._sizes[epoch], self._seed, self._shuffle)
        return order.row_index(epoch * self._sizes[epoch] + position)

    def _next_row(self, draw: int, share: float) -> int:
        """The row of a draw, after all earlier draws."""
        if self._epoch < 0 or self._position == self._size:
            if (extent := self._recorded_at(draw, is_look=False)) is None:
                extent = self._begin_epoch(draw)
            self._epoch, self._position, self._size = extent.epoch, 0, extent.rows
            self._waiting.clear()
        elif draw % LOOK_DRAWS == 0:
            if (extent := self._recorded_at(draw, is_look=True)) is None:
                extent = self._table.grow(self._epoch, draw, is_look=True)
                self._record(extent)
            self._waiting.extend(range(extent.rows - len(extent.new_rows), extent.rows))
        if self._waiting and int((draw + 1) * share) > int(draw * share):
            return self._waiting.popleft()
        order = DrawOrder(self._size, self._seed, self._shuffle)
        self._position += 1
        return order.row_index(self._epoch * self._size + self._position - 1)

    def _recorded_at(self, draw: int, *, is_look: bool) -> Extent | None:
        if self._recorded and (self._recorded[0].first_draw, self._recorded[0].is_look) == (draw, is_look):
            return self._recorded.popleft()
        return None

    def _begin_epoch(self, first: int | None = None) -> Extent:
        """Begin an epoch after the last one, or at a draw."""
        if first is None:
            first = self._starts[-1] + self._sizes[-1] if self._sizes else 0
        extent = self._table.grow(len(self._sizes), first)
        self._record(extent)
        self._starts.append(extent.first_draw)
        self._sizes.append(extent.rows)
        return extent


def _cut_incomplete(path: Path) -> None:
    """Remove a last line that a killed run did not complete."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n") and content:
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
