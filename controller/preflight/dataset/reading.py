"""Reads files of rows one line at a time, without holding more than a line in memory.

JSON Lines (also compressed) and Parquet are streamed; a `.json` document is read at once. A line that cannot be read as
a row is reported with the reason, not raised: the stage `schema` decides about it.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from areal_like.errors import OperationError, UserError, first_line
from areal_like.finite_json import NotFinite, loads_finite
from areal_like.regular_file import check_regular
from controller.data.sources import SUFFIXES, find_files

MAX_LINE_BYTES = 1 << 26
"""A longer line is not read into memory."""
PARQUET_ROWS = 1024
"""Number of rows of a Parquet file that are in memory at once."""
FIRST_ROWS, FIRST_BYTES, FIRST_LINES = 256, 1 << 24, 1_000
"""Columns are found in the first rows: at most so many, of so many bytes, among so many lines."""
_CHUNK_BYTES = 1 << 20
_MAX_INT_DIGITS = 4000
"""Python does not parse longer integers; they stay text."""


@dataclass(frozen=True)
class Line:
    """A line of a file. text: its bytes without the line break; None: it is longer than MAX_LINE_BYTES."""

    where: str
    text: bytes | None


@dataclass(frozen=True)
class Source:
    """A file of rows, with its contents' hash. modified_ns: when it was written, before it was hashed."""

    path: Path
    num_bytes: int
    sha256: str
    modified_ns: int


def find_sources(names: Sequence[str]) -> list[Source]:
    """The files with these names or patterns, in this order, and their hashes. Raises UserError."""
    found: list[Source] = []
    for name in names:
        for path in find_files(name, "data"):
            check_regular(path)
            if not path.name.endswith(SUFFIXES):
                what, remedy = "the file is not a supported type of data file", f"use one of {', '.join(SUFFIXES)}"
                raise UserError(what, where=str(path), remedy=remedy)
            try:
                state = path.stat()
                num_bytes = state.st_size
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise UserError(
                    f"the file cannot be read ({error.strerror})",
                    where=str(path),
                    remedy="check the path and its permissions",
                ) from error
            if not num_bytes:
                raise UserError("the file is empty", where=str(path), remedy="write one JSON object per line")
            if any(one.path.samefile(path) for one in found):
                raise UserError("the file is listed twice", where=str(path), remedy="list each file only once")
            found.append(Source(path, num_bytes, sha256, state.st_mtime_ns))
    return found


def lines_of(sources: Sequence[Source]) -> Iterator[Line]:
    """Every line of all files that is not blank. Raises UserError, OperationError if a file changed."""
    for source in sources:
        path = source.path
        try:
            if path.name.endswith(".jsonl"):
                with path.open("rb") as file:
                    yield from _json_lines(file, path)
            elif path.name.endswith(".jsonl.gz"):
                with gzip.open(path, "rb") as file:
                    yield from _json_lines(file, path)  # type: ignore[arg-type]
            elif path.name.endswith(".parquet"):
                yield from _parquet(path)
            else:
                yield from _document(path)
            state = path.stat()
            changed = (state.st_size, state.st_mtime_ns) != (source.num_bytes, source.modified_ns)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"the file cannot be read ({getattr(error, 'strerror', None) or error})",
                where=str(path),
                remedy="check whether the file is complete and readable",
            ) from error
        if changed:
            raise OperationError(
                f"{path} was changed while it was being read; nothing was written; run the command again"
            )


def first_rows(lines: Iterator[Line], where: str) -> tuple[list[dict[str, Any]], str, Iterator[Line]]:
    """The first rows that can be read, the place of the first one, and all lines again. Raises UserError if there are
    none. where: for messages."""
    held: list[Line] = []
    rows: list[dict[str, Any]] = []
    place, fault, num_bytes = "", "", 0
    for line in lines:
        held.append(line)
        num_bytes += len(line.text or b"")
        fields, fault = parse(line)
        if not fault:
            place = place or line.where
            rows.append(fields)
        if len(rows) >= FIRST_ROWS or len(held) >= FIRST_LINES or (rows and num_bytes >= FIRST_BYTES):
            break
    if rows:
        return rows, place, itertools.chain(held, lines)
    remedy = "write one JSON object per row"
    if len(held) >= FIRST_LINES:
        what = f"none of the first {len(held):,} lines is a valid row; {fault}"
        raise UserError(what, where=held[-1].where, remedy=remedy)
    if held:
        raise UserError(f"no line is a valid row; {parse(held[0])[1]}", where=held[0].where, remedy=remedy)
    raise UserError("the file contains no rows", where=where, remedy="specify a file with at least one row")


def _json_lines(file: BinaryIO, path: Path) -> Iterator[Line]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield Line(f"{path}:{number}", None)
            continue
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield Line(f"{path}:{number}", line.rstrip(b"\r\n"))


def _document(path: Path) -> Iterator[Line]:
    content = gzip.open(path, "rb").read() if path.name.endswith(".gz") else path.read_bytes()  # noqa: SIM115
    try:
        rows = loads_finite(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"the file is not valid JSON ({error})", where=str(path), remedy="correct the syntax of the file"
        ) from error
    if not isinstance(rows, list):
        remedy = "write [{...}, {...}], or use a .jsonl file with one object per line"
        raise UserError("the file must contain a list of rows", where=str(path), remedy=remedy)
    for index, row in enumerate(rows):
        yield Line(f"{path} entry {index}", encoded(row))


def _parquet(path: Path) -> Iterator[Line]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        remedy = "pip install 'areal-like[datasets]'"
        raise UserError(
            "reading Parquet files requires the `datasets` extra", where=str(path), remedy=remedy
        ) from error
    try:
        index = 0
        for batch in parquet.ParquetFile(path).iter_batches(PARQUET_ROWS):
            for row in batch.to_pylist():
                yield Line(f"{path} row {index}", encoded(row))
                index += 1
    except ArrowException as error:
        raise UserError(
            f"the file is not a valid Parquet file ({first_line(error)})",
            where=str(path),
            remedy="create the file again, or convert the data to JSONL",
        ) from error


def encoded(row: Any) -> bytes:
    """A row as one line of JSON. Values without a JSON form (dates, bytes) become text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(row, default=str).encode()


def parse(line: Line) -> tuple[dict[str, Any], str]:
    """The row of a line, and why it cannot be read, else an empty text."""
    if line.text is None:
        return {}, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
    try:
        row = loads_finite(line.text.decode(), parse_int=_integer)
    except NotFinite as error:
        return {}, f"the line {error}"
    except UnicodeDecodeError as error:
        return {}, f"the line is not UTF-8 (byte {error.start + 1}: {error.reason})"
    except json.JSONDecodeError as error:
        return {}, f"the line is not JSON ({error.msg} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        return {}, f"the line is not JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"a row must be a JSON object, not {type(row).__name__}"
    return row, ""


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else digits
