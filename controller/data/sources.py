"""Reads raw rows from files, Hugging Face datasets and generators, each with its location for messages.

Errors are reported as one sentence with file and line. Columns are interpreted in table.py. Rows stay on disk if
possible: a JSON Lines file is read again by byte offset.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any, Literal, overload

from areal_like.errors import OperationError, UserError, first_line
from areal_like.finite_json import NOT_FINITE_REMEDY, NotFinite, loads_finite
from areal_like.import_path import import_factory
from areal_like.regular_file import check_regular
from controller.config.problems import nearest
from controller.config.run_config import DataSource

GENERATED_ROWS = 20_000
"""Rows of a generator without a limit. The table is finite, so that draws can be numbered."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")

RawRow = Mapping[str, Any]


class RawRows(Sequence[RawRow]):
    """Rows by index, read on access. `where(i)` is the location of row i for messages."""

    def __init__(self, length: int, fetch: Callable[[int], RawRow], where: Callable[[int], str]) -> None:
        self._length, self._fetch, self.where = length, fetch, where

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> RawRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[RawRow]: ...
    def __getitem__(self, index: int | slice) -> RawRow | list[RawRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._fetch(index)

    @staticmethod
    def of(rows: Sequence[RawRow], where: Callable[[int], str]) -> RawRows:
        """Make RawRows of rows in memory."""
        return RawRows(len(rows), lambda index: rows[index], where)


def read_source(source: DataSource, *, key: str, split: str, seed: int) -> RawRows:
    """Read the rows of a source. key: its dotted path, for messages; split: used if the source names none.

    Raises UserError for everything that is missing, unreadable or empty.
    """
    if source.path is not None:
        rows = _read_files(source.path, key, source.limit)
    elif source.dataset is not None:
        rows = _read_dataset(source, key, source.split or split)
    else:
        rows = _read_generator(source, key, source.split or split, seed)
    if not len(rows):
        raise UserError(
            "the source contains no rows", where=f"{key}: {source.path or source.dataset or source.generator}"
        )
    return rows


# ---------------------------------------------------------------- files


def _read_files(pattern: str, key: str, limit: int | None) -> RawRows:
    """Rows of all files of a glob, in the order of their names."""
    parts: list[RawRows] = []
    left = limit
    for path in find_files(pattern, key):
        if left is not None and left <= 0:
            break
        part = _read_file(path, left)
        if not len(part):
            raise UserError("the file contains no rows", where=str(path), remedy="write one JSON object per line")
        parts.append(part)
        left = None if left is None else left - len(part)
    if len(parts) == 1:
        return parts[0]
    owner = [(part, index) for part in parts for index in range(len(part))]
    return RawRows(
        len(owner), lambda i: owner[i][0][owner[i][1]], lambda i: owner[i][0].where(owner[i][1])
    )  # fmt: skip


def find_files(pattern: str, key: str) -> list[Path]:
    """The files of a name or glob, in the order of their names. key: the setting that names them. Raises UserError."""
    text = os.path.expanduser(pattern)
    if has_magic(text):
        found = sorted(Path(name) for name in glob(text, recursive=True) if Path(name).is_file())
        if not found:
            raise UserError("no file matches", where=f"{key}: {pattern}", remedy=_files_near(Path(text)))
        return found
    path = Path(text)
    if path.is_dir():
        inside = [name for name in sorted(os.listdir(path)) if name.endswith(SUFFIXES)]
        remedy = f"specify a file or a glob pattern, such as {path / inside[0]}" if inside else "specify a file of rows"
        raise UserError("the path is a folder, not a file", where=f"{key}: {pattern}", remedy=remedy)
    if not path.exists():
        raise UserError("no such file", where=f"{key}: {pattern}", remedy=_files_near(path))
    return [path]


def _files_near(path: Path) -> str:
    """Similar names in the file's folder, or in the nearest existing folder."""
    folder = path.parent
    if not folder.is_dir():
        above = next((p for p in folder.parents if p.is_dir()), Path())
        near = nearest(folder.name, [p.name for p in above.iterdir() if p.is_dir()], count=2) if above.is_dir() else []
        hint = f" (did you mean {' or '.join(str(above / name) for name in near)}?)" if near else ""
        return f"the folder {folder} does not exist{hint}; specify the path of your own rows"
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(SUFFIXES)]
    near = nearest(path.name, names, count=3) or names[:3]
    return (
        f"files in {folder}: {', '.join(near)}"
        if near
        else f"{folder} contains no files of rows ({', '.join(SUFFIXES)})"
    )


def _read_file(path: Path, limit: int | None) -> RawRows:
    check_regular(path)
    try:
        if path.name.endswith(".jsonl"):
            return _read_json_lines(path, limit)
        if path.name.endswith(".jsonl.gz"):
            with gzip.open(path, "rb") as lines:
                parsed = [(n, row) for n, _, row in islice(_parse_lines(lines, path), limit)]
            return RawRows.of([row for _, row in parsed], lambda index: f"{path}:{parsed[index][0]}")
        if path.name.endswith((".json", ".json.gz")):
            return _read_json(path, limit)
        if path.name.endswith(".parquet"):
            return _read_parquet(path, limit)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the file cannot be read ({reason})", where=str(path)) from error
    raise UserError(
        "the file type is not supported", where=str(path), remedy=f"use one of the file types {', '.join(SUFFIXES)}"
    )


def _read_json_lines(path: Path, limit: int | None) -> RawRows:
    offsets, numbers = array("Q"), array("Q")
    with path.open("rb") as lines:
        for number, offset, _ in islice(_parse_lines(lines, path), limit):
            offsets.append(offset)
            numbers.append(number)

    changed = f"{path} changed while the run was reading it; restore the original file, then resume the run"

    def fetch(index: int) -> RawRow:
        with path.open("rb") as lines:
            lines.seek(offsets[index])
            try:
                row = loads_finite(lines.readline())
            except ValueError as error:
                raise OperationError(changed) from error
        if not isinstance(row, dict):
            raise OperationError(changed)
        return row

    return RawRows(len(offsets), fetch, lambda index: f"{path}:{numbers[index]}")


def _parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number, byte offset, row) of every line that is not blank."""
    offset = 0
    for number, line in enumerate(lines, start=1):
        start, offset = offset, offset + len(line)
        where = f"{path}:{number}"
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            line, start = line[3:], start + 3
        if not line.strip():
            continue
        try:
            row = loads_finite(line)
        except NotFinite as error:
            raise UserError(str(error), where=where, remedy=NOT_FINITE_REMEDY) from error
        except UnicodeDecodeError as error:
            raise UserError("the file is not UTF-8 text", where=where, remedy="convert the file to UTF-8") from error
        except json.JSONDecodeError as error:
            remedy = "write one JSON object per line"
            if number == 1 and line.strip() in (b"[", b"{"):
                remedy = "the file looks like a single JSON document: rename it to .json"
            raise UserError(
                f"the line is not valid JSON ({error.msg} at column {error.colno})", where=where, remedy=remedy
            ) from error
        except (RecursionError, ValueError) as error:
            raise UserError(f"the line is not valid JSON ({error})", where=where) from error
        if not isinstance(row, dict):
            raise UserError(f"a row must be a JSON object, not {type(row).__name__}", where=where)
        yield number, start, row


def _read_json(path: Path, limit: int | None) -> RawRows:
    content = gzip.open(path, "rb").read() if path.name.endswith(".gz") else path.read_bytes()  # noqa: SIM115
    if not content.strip():
        return RawRows.of([], lambda index: str(path))
    try:
        rows = loads_finite(content.decode("utf-8-sig"))
    except NotFinite as error:
        raise UserError(str(error), where=_line_of_number(path, content), remedy=NOT_FINITE_REMEDY) from error
    except UnicodeDecodeError as error:
        raise UserError("the file is not UTF-8 text", where=str(path), remedy="convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        is_lines = error.msg == "Extra data" and error.lineno > 1
        remedy = "the file looks like one object per line: rename it to .jsonl" if is_lines else ""
        raise UserError(
            f"the file is not valid JSON ({error.msg})", where=f"{path}:{error.lineno}", remedy=remedy
        ) from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"the file is not valid JSON ({error})", where=str(path)) from error
    if not isinstance(rows, list):
        raise UserError(
            "the file must contain a list of rows",
            where=str(path),
            remedy="write [{...}, {...}], or use a .jsonl file with one object per line",
        )
    for index, row in enumerate(rows[:limit]):
        if not isinstance(row, dict):
            raise UserError(f"a row must be an object, not {type(row).__name__}", where=f"{path} entry {index}")
    return RawRows.of(rows[:limit], lambda index: f"{path} entry {index}")


def _line_of_number(path: Path, content: bytes) -> str:
    """The first line with a number that is not finite, if the document has one row or one value per line."""
    for number, line in enumerate(content.decode("utf-8-sig").splitlines(), start=1):
        part = line.strip().rstrip(",").removeprefix("[").removesuffix("]")
        try:
            loads_finite(part if part.startswith("{") else part.rpartition('": ')[2])
        except NotFinite:
            return f"{path}:{number}"
        except ValueError:  # part of a row
            continue
    return str(path)


def _read_parquet(path: Path, limit: int | None) -> RawRows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(
            "reading Parquet files requires the `datasets` extra",
            where=str(path),
            remedy="pip install 'areal-like[datasets]'",
        ) from error
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise UserError(f"the file cannot be read as Parquet ({first_line(error)})", where=str(path)) from error
    rows = table.slice(0, limit).to_pylist() if limit is not None else table.to_pylist()
    return RawRows.of(rows, lambda index: f"{path} row {index}")


# ---------------------------------------------------------------- Hugging Face datasets


def _read_dataset(source: DataSource, key: str, split: str) -> RawRows:
    name = source.dataset or ""
    where = f"{key}: {name}"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "the `datasets` package is not installed", where=where, remedy="pip install 'areal-like[datasets]'"
        ) from error
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, Mapping):
                if split not in loaded:
                    raise UserError(
                        f"the dataset has no split `{split}`",
                        where=where,
                        remedy=f"use one of the splits of the dataset: {', '.join(loaded)}",
                    )
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, source.config, split=split)
        if source.limit is not None:
            loaded = loaded.select(range(min(source.limit, len(loaded))))
    except UserError:
        raise
    except Exception as error:  # fault boundary: datasets, the hub client and pyarrow share no base class
        remedy = (
            f"use a local folder, a Hugging Face Hub name with {key}.config and {key}.split, or set {key}.path to a "
            "file"
        )
        raise UserError(
            f"the dataset cannot be loaded ({type(error).__name__}: {first_line(error)})", where=where, remedy=remedy
        ) from error
    return RawRows(len(loaded), lambda index: dict(loaded[index]), lambda index: f"{name} {split} row {index}")


# ---------------------------------------------------------------- generators


def _read_generator(source: DataSource, key: str, split: str, seed: int) -> RawRows:
    name = source.generator or ""
    limit = source.limit or GENERATED_ROWS
    if name == "running_sum":
        from areal_like.tasks import running_sum

        made: Iterable[Any]
        if key == "warm_start.data":
            made = running_sum.demonstrations(seed, source.options, limit)
        else:
            made = running_sum.rows(seed, split, limit=limit, options=source.options)  # type: ignore[arg-type]
        return RawRows.of(list(made), lambda index: f"running_sum row {index}")
    if name == "tool_sum":
        from areal_like.tasks import tool_sum

        if key == "warm_start.data":
            made = tool_sum.demonstrations(seed, source.options, limit)
        else:
            made = tool_sum.rows(seed, split, limit=limit, options=source.options)  # type: ignore[arg-type]
        return RawRows.of(list(made), lambda index: f"tool_sum row {index}")
    if name == "guess_number":
        from areal_like.tasks import guess_number

        if key == "warm_start.data":
            made = guess_number.demonstrations(seed, source.options, limit)
        else:
            made = guess_number.rows(seed, split, limit=limit, options=source.options)  # type: ignore[arg-type]
        return RawRows.of(list(made), lambda index: f"guess_number row {index}")
    if name == "reasoning_gym":
        from areal_like.tasks import reasoning_gym

        part: Literal["train", "eval"] = "eval" if split == "eval" else "train"
        made = reasoning_gym.rows(seed, part, limit=limit, options=source.options)
        return RawRows.of(list(made), lambda index: f"reasoning_gym row {index}")
    if name == "episodes":
        from areal_like.tasks import episodes

        made = episodes.rows(seed, split, limit=limit, options=source.options)  # type: ignore[arg-type]
        return RawRows.of(list(made), lambda index: f"episodes row {index}")
    if name == "traffic":
        from areal_like.tasks import traffic

        made = traffic.rows(limit=limit, options=source.options)
        return RawRows.of(list(made), lambda index: f"traffic row {index}")
    where = f"{key}: {name}"
    function = import_factory(name, where)
    try:
        rows = list(islice(function(seed, split, limit=limit, options=dict(source.options)), limit))
    except Exception as error:  # fault boundary: the user's function may raise anything
        raise UserError(
            f"the function raised {type(error).__name__}: {error}",
            where=where,
            remedy="correct the function; it is called as function(seed, split, limit=..., options=...) and must "
            "return an iterable of dicts",
        ) from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {index} must be a dict, not {type(row).__name__}", where=where)
        for column, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                what = f"row {index}: `{column}` is {value}"
                raise UserError(what, where=where, remedy="use None or a finite number")
    return RawRows.of(rows, lambda index: f"{name} row {index}")
