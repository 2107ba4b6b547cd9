"""Raw rows: where each came from, how many are taken, and what is said where there are none."""

from __future__ import annotations

import gzip
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from controller.config.run_config import DataSource
from controller.data import sources
from controller.data.sources import RawRows, read_source


def read(key: str = "data.train", split: str = "train", seed: int = 1, **source: Any) -> RawRows:
    return read_source(DataSource.model_validate(source), key=key, split=split, seed=seed)


def refused(**source: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        read(**source)
    return raised.value


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- rows by index


def test_rows_are_fetched_by_index_and_by_slice_and_there_are_none_outside() -> None:
    rows = RawRows.of([{"n": number} for number in range(4)], lambda index: f"row {index}")
    assert len(rows) == 4
    assert rows[0] == {"n": 0}
    assert rows[3] == {"n": 3}
    assert rows[1:3] == [{"n": 1}, {"n": 2}]
    assert rows[::-2] == [{"n": 3}, {"n": 1}]
    assert list(rows) == [{"n": number} for number in range(4)]
    assert rows.where(2) == "row 2"
    for index in (4, -1):
        with pytest.raises(IndexError):
            rows[index]


# ---------------------------------------------------------------- files


ROWS = [{"n": number} for number in range(4)]


def files_of(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """A file of each kind with ROWS, and the places of its rows."""
    path = root / "a.jsonl"
    path.write_text("\n".join(["", json.dumps(ROWS[0]), " ", *map(json.dumps, ROWS[1:])]))
    yield path, [f"{path}:{line}" for line in (2, 4, 5, 6)]
    path = root / "b.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n\n".join(map(json.dumps, ROWS)))
    yield path, [f"{path}:{line}" for line in (1, 3, 5, 7)]
    path = root / "c.json"
    path.write_text(json.dumps(ROWS))
    yield path, [f"{path} entry {index}" for index in range(4)]
    path = root / "d.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    yield path, [f"{path} entry {index}" for index in range(4)]


def test_rows_of_every_kind_of_file_are_taken_in_order_and_named_by_their_places(tmp_path: Path) -> None:
    for path, places in files_of(tmp_path):
        rows = read(path=str(path))
        assert list(rows) == ROWS
        assert [rows.where(index) for index in range(4)] == places
        for limit in (1, 3, 4, 9):
            assert list(read(path=str(path), limit=limit)) == ROWS[:limit]


def test_parquet_rows_are_taken_up_to_the_limit(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    assert list(read(path=str(tmp_path / "t.parquet"))) == ROWS
    rows = read(path=str(tmp_path / "t.parquet"), limit=2)
    assert (list(rows), rows.where(1)) == (ROWS[:2], f"{tmp_path}/t.parquet row 1")


def test_parquet_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"x")
    assert refused(path=str(tmp_path / "t.parquet")).remedy == "pip install 'areal-like[datasets]'"


def test_files_of_a_glob_follow_each_other_until_the_limit_and_later_ones_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    write_lines(tmp_path / "b.jsonl", *ROWS[2:])
    write_lines(tmp_path / "a.jsonl", *ROWS[:2])
    (tmp_path / "c.jsonl").write_text("broken")
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "d.jsonl" / "e.jsonl").write_text("not reached: only files count")
    for limit in (2, 3, 4):
        rows = read(path=str(tmp_path / "*.jsonl"), limit=limit)
        assert list(rows) == ROWS[:limit]
        assert rows.where(limit - 1) == f"{tmp_path}/{'aabb'[limit - 1]}.jsonl:{(limit - 1) % 2 + 1}"
    with pytest.raises(UserError, match=r"c\.jsonl:1: the line is not valid JSON"):
        read(path=str(tmp_path / "*.jsonl"), limit=5)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"b\.jsonl: the file contains no rows"):
        read(path=str(tmp_path / "*.jsonl"))


def test_home_and_folders_below_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    write_lines(tmp_path / "deep" / "deeper" / "a.jsonl", *ROWS)
    assert len(read(path="~/deep/deeper/a.jsonl")) == 4
    assert len(read(path="~/**/a.jsonl")) == 4


def test_what_is_missing_is_named_with_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name in ("train.jsonl", "valid.json", "test.parquet", "extra.jsonl", "notes.txt"):
        (tmp_path / "rows" / name).write_text("")
    missing = refused(path=str(tmp_path / "rows" / "trian.jsonl"))
    assert (missing.what, missing.where) == ("no such file", f"data.train: {tmp_path}/rows/trian.jsonl")
    assert missing.remedy == f"files in {tmp_path}/rows: train.jsonl, extra.jsonl"
    unlike = refused(path=str(tmp_path / "rows" / "q"))
    assert unlike.remedy == f"files in {tmp_path}/rows: extra.jsonl, test.parquet, train.jsonl"
    none = refused(path=str(tmp_path / "*.jsonl"))
    assert none.what == "no file matches"
    assert none.remedy == f"{tmp_path} contains no files of rows (.jsonl, .jsonl.gz, .json, .json.gz, .parquet)"
    elsewhere = refused(path=str(tmp_path / "row" / "x" / "train.jsonl"))
    assert elsewhere.remedy == f"the folder {tmp_path}/row/x does not exist; specify the path of your own rows"
    near = refused(path=str(tmp_path / "row" / "train.jsonl"))
    assert f"the folder {tmp_path}/row does not exist (did you mean {tmp_path}/rows?)" in str(near.remedy)


def test_two_folders_and_three_files_that_are_near_are_named_at_most(tmp_path: Path) -> None:
    for number in range(1, 5):
        (tmp_path / f"rows{number}").mkdir()
        (tmp_path / "rows1" / f"train{number}.jsonl").write_text("")
    folders = str(refused(path=str(tmp_path / "rows" / "a.jsonl")).remedy)
    assert sum(f"{tmp_path}/rows{number}" in folders for number in range(1, 5)) == 2
    files = str(refused(path=str(tmp_path / "rows1" / "train.jsonl")).remedy)
    assert sum(f"train{number}.jsonl" in files for number in range(1, 5)) == 3


def test_folder_is_no_file_and_the_first_of_its_files_is_an_example(tmp_path: Path) -> None:
    assert refused(path=str(tmp_path)).remedy == "specify a file of rows"
    for name in ("b.jsonl", "a.json", "0.txt"):
        (tmp_path / name).write_text("")
    folder = refused(path=str(tmp_path))
    assert (folder.what, folder.remedy) == (
        "the path is a folder, not a file",
        f"specify a file or a glob pattern, such as {tmp_path}/a.json",
    )


@pytest.mark.parametrize(
    ("content", "where", "words", "remedy"),
    [
        (
            b'{"a": 1}\n\n{"a" 2}\n',
            ":3",
            "the line is not valid JSON (Expecting ':' delimiter at column 6)",
            "write one JSON object",
        ),
        (
            b"[\n1]\n",
            ":1",
            "the line is not valid JSON",
            "the file looks like a single JSON document: rename it to .json",
        ),
        (
            b"{\n}\n",
            ":1",
            "the line is not valid JSON",
            "the file looks like a single JSON document: rename it to .json",
        ),
        (b'{"a": 1}\n[\n', ":2", "the line is not valid JSON", "write one JSON object per line"),
        (b'{"a": 1}\n7\n', ":2", "a row must be a JSON object, not int", ""),
    ],
)
def test_line_that_is_no_row_is_named(tmp_path: Path, content: bytes, where: str, words: str, remedy: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    error = refused(path=str(path))
    assert error.where == f"{path}{where}"
    assert error.what.startswith(words)
    assert str(error.remedy or "").startswith(remedy)


def test_entry_that_is_no_row_is_named_unless_it_lies_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*ROWS, 7]))
    assert (refused(path=str(path)).where, refused(path=str(path)).what) == (
        f"{path} entry 4", "a row must be an object, not int",
    )  # fmt: skip
    assert list(read(path=str(path), limit=4)) == ROWS


@pytest.mark.parametrize(
    ("content", "where", "remedy"),
    [('[\n{"a" 1}]', ":2", ""), ('{"a": 1}\n{"a": 2}', ":2", "rename it to .jsonl"), ('{"a": 1} {"a": 2}', ":1", "")],
)
def test_document_that_is_no_json_names_the_line(tmp_path: Path, content: str, where: str, remedy: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    error = refused(path=str(path))
    assert error.where == f"{path}{where}"
    assert (remedy in str(error.remedy)) if remedy else not error.remedy


def test_row_that_was_replaced_by_something_else_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *ROWS)
    rows = read(path=str(path))
    assert rows[3] == {"n": 3}
    path.write_text('["n", 1]' + "\n" + path.read_text()[9:])
    with pytest.raises(OperationError, match=r"a\.jsonl changed while the run was reading it"):
        rows[0]
    assert rows[1] == {"n": 1}


def test_file_that_may_not_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", *ROWS)

    def refuse(path: Path, limit: int | None) -> RawRows:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "_read_json_lines", refuse)
    assert (refused(path=str(path)).what, refused(path=str(path)).where) == (
        "the file cannot be read (Permission denied)", str(path),
    )  # fmt: skip


# ---------------------------------------------------------------- datasets


class FakeDataset:
    """What the package `datasets` gives: rows by index."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def select(self, indices: range) -> FakeDataset:
        return FakeDataset([self.rows[index] for index in indices])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded; every dataset has ROWS, one saved to disk in splits `train` and `test`."""
    found: list[Any] = []
    module = types.ModuleType("datasets")

    def load_dataset(name: str, config: str | None, *, split: str) -> FakeDataset:
        found.append((name, config, split))
        return FakeDataset(ROWS)

    def load_from_disk(name: str) -> Any:
        found.append(name)
        has_splits = os.path.exists(os.path.join(name, "dataset_dict.json"))
        return {"train": FakeDataset(ROWS), "test": FakeDataset(ROWS[:1])} if has_splits else FakeDataset(ROWS)

    vars(module).update(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return found


def test_dataset_of_the_hub_is_asked_for_by_name_configuration_and_split(asked: list[Any]) -> None:
    rows = read(dataset="org/name", config="main")
    assert (list(rows), rows.where(3)) == (ROWS, "org/name train row 3")
    read(dataset="org/name", split="dev")
    read(dataset="org/name", key="data.eval")
    assert asked == [("org/name", "main", "train"), ("org/name", None, "dev"), ("org/name", None, "train")]


@pytest.mark.parametrize("limit", [1, 4, 9])
def test_dataset_is_taken_up_to_the_limit(asked: list[Any], limit: int) -> None:
    assert list(read(dataset="org/name", limit=limit)) == ROWS[:limit]


def test_folder_of_a_dataset_is_loaded_as_what_it_is(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, mark in (("splits", "dataset_dict.json"), ("whole", "state.json"), ("files", "train.csv")):
        (tmp_path / name).mkdir()
        (tmp_path / name / mark).write_text("")
        assert list(read(dataset=f"~/{name}")) == ROWS
    assert asked == [str(tmp_path / "splits"), str(tmp_path / "whole"), (str(tmp_path / "files"), None, "train")]
    assert list(read(dataset=str(tmp_path / "splits"), split="test")) == ROWS[:1]
    missing = refused(dataset=str(tmp_path / "splits"), split="dev")
    assert (missing.what, missing.remedy) == (
        "the dataset has no split `dev`",
        "use one of the splits of the dataset: train, test",
    )


def test_dataset_that_cannot_be_loaded_is_one_sentence_with_the_ways_there_are(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("no such dataset\nand much more")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", fail)
    error = refused(dataset="org/name")
    assert error.what == "the dataset cannot be loaded (LookupError: no such dataset)"
    assert error.where == "data.train: org/name"
    assert "data.train.config and data.train.split, or set data.train.path" in str(error.remedy)


# ---------------------------------------------------------------- generators


@pytest.mark.parametrize("name", ["running_sum", "tool_sum", "guess_number"])
def test_built_in_generator_gives_so_many_rows_by_seed_and_split_and_demonstrations_for_a_warm_start(name: str) -> None:
    rows = read(generator=name, limit=7)
    assert len(rows) == 7
    assert rows.where(6) == f"{name} row 6"
    assert list(read(generator=name, limit=7)) == list(rows)
    assert list(read(generator=name, limit=7, seed=2)) != list(rows)
    assert list(read(generator=name, limit=7, split="eval")) != list(rows)
    assert list(read(generator=name, limit=7, split="train", key="data.eval")) == list(rows)
    shown = read(generator=name, limit=5, key="warm_start.data")
    assert len(shown) == 5
    assert "answer" not in shown[0], "a demonstration has a response"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module of the user's with a function `rows`, which gives what the test puts here and notes its arguments."""
    state: dict[str, Any] = {"rows": ROWS, "asked": []}
    module = types.ModuleType("own_rows")

    def rows(seed: int, split: str, *, limit: int, options: dict[str, Any]) -> Any:
        state["asked"].append((seed, split, limit, options))
        return state["rows"]

    vars(module).update(rows=rows)
    monkeypatch.setitem(sys.modules, "own_rows", module)
    return state


def test_function_of_the_users_is_called_with_seed_split_limit_and_options(own: dict[str, Any]) -> None:
    rows = read(generator="own_rows:rows", seed=5, limit=3, options={"a": 1})
    assert (list(rows), rows.where(0)) == (ROWS[:3], "own_rows:rows row 0")
    read(generator="own_rows:rows", split="eval")
    assert own["asked"] == [(5, "train", 3, {"a": 1}), (1, "eval", 20_000, {})]
    own["rows"] = iter({"n": number} for number in range(10**9))
    assert len(read(generator="own_rows:rows", limit=4)) == 4, "an endless one is cut"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"n": 1}, 7], "row 1 must be a dict, not int"),
        ([{"n": 1}, {"a": 1, "x": float("nan")}], "row 1: `x` is nan"),
        ([{"x": float("-inf")}], "row 0: `x` is -inf"),
        (7, "the function raised TypeError"),
        ([], "the source contains no rows"),
    ],
)
def test_row_of_the_users_that_is_none_is_named_by_its_number(own: dict[str, Any], rows: Any, words: str) -> None:
    own["rows"] = rows
    error = refused(generator="own_rows:rows")
    assert error.what.startswith(words)
    assert error.where == "data.train: own_rows:rows"
