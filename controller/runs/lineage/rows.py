"""Rows of a run: where they come from, which draws they were drawn at, and finding one that a user names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.data.cleaned_rows import cleaned_folder
from controller.data.live import LiveTable
from controller.data.origins import MANIFEST, ROWS, Origins, read_record, split_place
from controller.data.table import Table
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.data_rows import DataRows, read_rows

TRAINED_KEYS = ("data.train", "data.mix.")
"""Sources whose rows are drawn; the others are evaluated, or demonstrations of the warm start."""


class RunRows:
    """Rows of a run by draw, with their files as recorded at the start."""

    def __init__(self, folder: RunFolder) -> None:
        self._rows: DataRows | None
        self._rows, self.why_unknown = read_rows(folder)
        self.folder, self._origins = folder, Origins()
        self._files: dict[str, Mapping[str, Any]] = {}
        self.others: dict[str, str] = {}
        """Key of the configuration by name and path of each file that rows are not drawn from."""
        self._made: list[str] = []
        own = cleaned_folder(folder.root) / ROWS
        sources = read_record(folder.root)["sources"]
        self.has_record = bool(sources)
        """Whether files were recorded at the start; a run of an earlier version has no data.json."""
        for source in sources:
            self._made += [] if source.get("kind") == "path" else [str(source.get("name"))]
            is_trained = str(source["key"]).startswith(TRAINED_KEYS)
            for file in source.get("files", ()):
                if source["key"] == "data.train" and own.is_file() and Path(file["path"]).parts[-3:] == own.parts[-3:]:
                    file = _moved(file, own)  # the set that the run cleaned is in its folder
                if is_trained:
                    self._files[file["name"]] = file
                else:
                    self.others |= {file["name"]: source["key"], file["path"]: source["key"]}

    def place(self, draw: int) -> str:
        """Location of the row of a draw; `draw 12` if rows cannot be named."""
        return f"draw {draw}" if self._rows is None else self._rows.where(draw)

    def file_of(self, where: str) -> tuple[str, Mapping[str, Any]]:
        """Name of a row's file or generator, and what data.json has of it (empty: nothing)."""
        if self._rows is None:
            return "", {}
        name, number = split_place(where) or (where, 0)
        found, table = self._files.get(name, {}), self._rows.table
        if isinstance(table, LiveTable) and (index := table.index_at(name, number)) is not None:
            return name, {**found, **table.file_at(index)}  # its hash at the start does not cover later rows
        return name, found

    def is_made(self, name: str) -> bool:
        """Whether rows of this name are of a generator or dataset, so that there is no file with a hash."""
        return name.startswith(tuple(self._made)) if self._made else False

    @staticmethod
    def split(where: str) -> tuple[str, int]:
        """File and number of a row, for sorting."""
        return split_place(where) or (where.rstrip("0123456789"), int("".join(filter(str.isdigit, where)) or 0))

    def made_from(self, name: str) -> list[Mapping[str, Any]]:
        """The files that a cleaned set was made from; empty if a file was not cleaned."""
        return list(self._files.get(name, {}).get("set", {}).get("sources", ()))

    def originals(self, where: str) -> tuple[list[dict[str, Any]], str]:
        """Places of a row before its set was cleaned, newest first, and why there are not more, else an empty text."""
        return self._origins.chain(where, self.file_of(where)[1])

    def find(self, text: str) -> list[str]:
        """Locations of the rows that a user named: FILE:LINE of the set or of the file it was cleaned from, or
        COLUMN=VALUE. Raises UserError.
        """
        if self._rows is None:
            remedy = "restore the data, or run the command in the folder in which the run was started"
            raise UserError(
                f"the rows of the run cannot be identified: {self.why_unknown}", where="--row", remedy=remedy
            )
        table, (column, sign, value) = self._rows.table, text.partition("=")
        if sign and split_place(text) is None:
            found = [table.where(index) for index in range(len(table)) if str(table[index].get(column)) == value]
            what = f"there is no row with {column}={value}"
        else:
            found = list(self._at(text, table))
            what = f"no row of the run is {text}"
        if found:
            return found
        name = (split_place(text) or (text, 0))[0]
        if (key := self.others.get(name) or self.others.get(str(Path(name).absolute()))) is not None:
            raise UserError(f"{name} is {key}", where="--row", remedy=_meaning(key))
        first = table.where(0)
        raise UserError(
            what, where="--row", remedy=f"specify the row as FILE:LINE, such as {first}, or as COLUMN=VALUE"
        )

    def _at(self, text: str, table: Table) -> Iterator[str]:
        wanted = _absolute(text)
        for index in range(len(table)):
            where = table.where(index)
            if where == text or _absolute(where) == wanted:
                yield where
            elif "set" in self.file_of(where)[1]:
                places = [one["where"] for one in self.originals(where)[0]]
                if any(place == text or _absolute(place) == wanted for place in places):
                    yield where


def _moved(file: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What was recorded of a set that is now at another path."""
    found = {**file, "name": str(path), "path": str(path.absolute())}
    if "set" in found:
        found["set"] = {**found["set"], "manifest": str(path.absolute().parent / MANIFEST)}
    return found


def _absolute(where: str) -> tuple[str, int] | str:
    place = split_place(where)
    return (str(Path(place[0]).expanduser().absolute()), place[1]) if place else where


def _meaning(key: str) -> str:
    if key == "warm_start.data":
        return (
            "the rows of this source are demonstrations of the warm start, so version 0 and all later versions may "
            "have used them"
        )
    return "the rows of this source are used only in evaluations, so no version was trained on them"
