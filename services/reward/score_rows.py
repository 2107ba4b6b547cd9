"""Reads lines of a JSONL file as rows to score, one at a time with a bound.

Scoring is in score_file.py, existing verdicts in score_output.py. No line ever raises: an invalid one is a row with a
`refusal`, which becomes its verdict. No line ever raises: a bad one is a row with a `refusal`, which becomes its
verdict.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from areal_like.finite_json import NOT_FINITE_REMEDY, NotFinite, loads_finite
from areal_like.wire.messages import MAX_RESPONSE_CHARS

MAX_LINE_BYTES = 1 << 29
"""A longer line is not read into memory."""
MAX_TEXT_CHARS = MAX_RESPONSE_CHARS
"""A longer response or program is not passed to a scorer."""
MAX_INT_DIGITS = 4000
"""Python does not parse longer integers; they stay text."""
_CHUNK_BYTES = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_CODE_COLUMNS = (
    "tests", "time_limit_s", "memory_limit_mb", "memory_limit_bytes", "entry_point", "code", "canonical_solution",
    "prompt", "test", "test_list", "test_setup_code", "test_imports", "inputs", "outputs", "input_output",
    "public_tests", "private_tests", "generated_tests",
)  # fmt: skip
"""Columns that scorer `code` uses, in addition to the program."""


@dataclass(frozen=True)
class Row:
    """One line. number: from 1; id: the row's own id, else the number; columns: the columns for the scorer.

    digest: of the line's bytes; refusal: why it cannot be scored, else empty.
    """

    number: int
    id: Any
    digest: str
    response: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    num_tokens: int = 0
    refusal: str = ""


def num_lines(path: Path) -> int:
    """Number of lines of a file, including a last one without a line break."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n")


def rows_of(file: BinaryIO, kind: str) -> Iterator[Row]:
    """The rows of an open file for a scorer of this kind, in order."""
    for number, (line, digest) in enumerate(_lines(file), 1):
        yield _row(number, line, digest, kind)


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, str]]:
    """Each line without its line break, and its digest; None for a line that is too long."""
    while line := file.readline(MAX_LINE_BYTES):
        digest = hashlib.blake2b(line.rstrip(b"\r\n"), digest_size=16)
        is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        while not is_whole:
            rest = file.readline(_CHUNK_BYTES)
            digest.update(rest.rstrip(b"\r\n"))
            line, is_whole = b"", rest.endswith(b"\n") or len(rest) < _CHUNK_BYTES
        yield (line.rstrip(b"\r\n") if line else None), digest.hexdigest()


def _row(number: int, line: bytes | None, digest: str, kind: str) -> Row:
    if line is None:
        return Row(number, number, digest, refusal=f"the line is longer than {MAX_LINE_BYTES >> 20} MB")
    if not line.strip():
        return Row(number, number, digest, refusal="the line is empty")
    fault = ""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        fault = f"the line is not UTF-8 (byte {error.start + 1}: {error.reason})"
        text = line.decode("utf-8", "replace")  # its id may still be readable
    try:
        fields = loads_finite(text, parse_int=_integer)
    except NotFinite as error:
        return Row(number, number, digest, refusal=fault or f"the line {error}; {NOT_FINITE_REMEDY}")
    except RecursionError:
        return Row(number, number, digest, refusal=fault or "the line is nested too deeply")
    except ValueError as error:
        return Row(number, number, digest, refusal=fault or f"the line is not JSON ({error})")
    if not isinstance(fields, dict):
        return Row(number, number, digest, refusal=fault or f"the line must be a JSON object, not {_name(fields)}")
    row_id = fields.get("id")
    row_id = number if row_id is None else row_id
    if fault:
        return Row(number, row_id, digest, refusal=fault)
    return _with_columns(Row(number, row_id, digest), fields, kind)


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else digits


def _name(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


def _with_columns(row: Row, fields: dict[str, Any], kind: str) -> Row:
    """The row with the columns for a scorer of this kind."""
    field_name = "program" if kind == "code" and fields.get("program") is not None else "response"
    text = fields.get(field_name)
    if not isinstance(text, str):
        wanted = "`program`" if kind == "code" else "`response`"
        what = f"must be text, not {_name(text)}" if text is not None else "is missing"
        return Row(row.number, row.id, row.digest, refusal=f"{wanted} {what}")
    if len(text) > MAX_TEXT_CHARS:
        long = f"`{field_name}` has {len(text):,} characters, but at most {MAX_TEXT_CHARS:,} are allowed"
        return Row(row.number, row.id, row.digest, refusal=long)
    if kind == "code":
        columns = {name: fields[name] for name in _CODE_COLUMNS if name in fields}
        if not isinstance(columns.get("test_imports"), list):
            columns.pop("test_imports", None)
        text = _SURROGATE.sub("\0", text)  # source files can contain neither surrogates nor null characters
        if field_name == "program":
            columns["program"], text = text, ""
    else:
        columns = fields
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    finish_reason, num_tokens = fields.get("finish_reason"), fields.get("num_tokens")
    return Row(
        row.number,
        row.id,
        row.digest,
        response=text,
        columns=columns,
        finish_reason=finish_reason if isinstance(finish_reason, str) else "stop",
        num_tokens=num_tokens if type(num_tokens) is int and 0 <= num_tokens < 1 << 40 else 0,
    )


def only_gold(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Only the gold answer of a maths row, as text, because a number may be too long for the encoding."""
    gold = columns.get("gold")
    if isinstance(gold, str):
        return {"gold": gold.encode("utf-8", "surrogatepass").decode("utf-8", "replace")}
    is_number = isinstance(gold, int | float) and not isinstance(gold, bool)
    return {"gold": str(gold)} if is_number else {}
