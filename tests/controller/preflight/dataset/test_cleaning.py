"""Whole passes over files: what is written, what is counted, and what happens to bad input."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from controller.preflight.dataset import passing, reading
from controller.preflight.dataset.cleaning import CleaningJob, Report
from controller.preflight.dataset.columns import Columns
from controller.preflight.dataset.reading import find_sources, lines_of
from controller.preflight.dataset.registry import Plan, StageSpec, default_plan, with_evaluation

SCHEMA = (StageSpec("schema"), StageSpec("exact_duplicates"))


def rows(count: int = 5) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {number} plus two?", "answer": str(number + 2)} for number in range(count)]


def written(path: Path, *lines: Any) -> Path:
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def clean(
    target: Path, *files: Path, stages: tuple[StageSpec, ...] = SCHEMA, num_processes: int = 1, **columns: Any
) -> Report:
    return CleaningJob([str(file) for file in files], Plan(stages, columns), num_processes).clean(target)


def test_kept_rows_keep_their_bytes_and_removed_ones_their_reason(tmp_path: Path) -> None:
    first, second = (
        b'{"prompt":  "What is 1 plus two?", "answer": 3.0}',
        {"prompt": "WHAT is 1 plus two", "answer": "3"},
    )
    source = written(tmp_path / "rows.jsonl", first, second, {"prompt": "", "answer": "1"}, b"\xff{", *rows(1))
    report = clean(tmp_path / "out", source)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == first + b"\n" + json.dumps(rows(1)[0]).encode() + b"\n"
    removed = [json.loads(line) for line in (tmp_path / "out" / "removed.jsonl").open()]
    assert [(one["where"], one["stage"], one["reason"]) for one in removed] == [
        (f"{source}:2", "exact_duplicates", "same prompt, different answer"),
        (f"{source}:3", "schema", "empty prompt"), (f"{source}:4", "schema", "unreadable line"),
    ]  # fmt: skip
    assert removed[0]["row"] == second
    assert removed[0]["evidence"] == f"the prompt is the same as in {source}:1"
    assert removed[2]["raw_base64"] == "/3s="
    assert (report.num_in, report.num_out) == (5, 2)


def test_manifest_has_hashes_options_counts_and_examples(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", *rows(3), *rows(1))
    clean(tmp_path / "out", source)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest["sources"] == [{"path": str(source), "bytes": source.stat().st_size, "sha256": digest}]
    assert (manifest["rows_in"], manifest["rows_out"]) == (4, 3)
    schema, duplicates = manifest["stages"]
    assert schema["options"] == {"markup": True}
    assert (duplicates["rows_in"], duplicates["removed"], duplicates["reasons"]) == (4, 1, {"same prompt": 1})
    assert duplicates["examples"][0]["evidence"] == f"the prompt is the same as in {source}:1"
    for name in ("rows.jsonl", "removed.jsonl"):
        content = (tmp_path / "out" / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    first = (tmp_path / "out" / "manifest.json").read_bytes()
    clean(tmp_path / "again", source)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == first


def test_several_files_of_different_kinds_are_one_set(tmp_path: Path) -> None:
    lines = written(tmp_path / "a.jsonl", *rows(2))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(rows(1)[0]).encode()))
    document = tmp_path / "c.json"
    document.write_text(json.dumps([{"prompt": "Name a prime above 90.", "answer": "97"}, *rows(2)]))
    report = clean(tmp_path / "out", lines, packed, document)
    assert (report.num_in, report.num_out) == (6, 3)


def test_nothing_is_overwritten_and_nothing_is_left_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "rows.jsonl", *rows())
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(UserError, match="already exists"):
        clean(target, source)
    assert list(target.iterdir()) == []
    (tmp_path / "failing.py").write_text("def fail(row):\n    raise KeyError(row['prompt'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OperationError, match=r"stage failing:fail failed on .*rows.jsonl:1 \(KeyError"):
        clean(tmp_path / "new", source, stages=(*SCHEMA, StageSpec("failing:fail")))
    assert sorted(path.name for path in tmp_path.iterdir() if "new" in path.name) == []


def test_an_unreadable_line_without_schema_stops_with_its_place(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", *rows(2), b"{broken")
    with pytest.raises(UserError, match=r"rows.jsonl:3: the line is not JSON .* add the stage `schema`"):
        clean(tmp_path / "out", source, stages=(StageSpec("length"),))
    with pytest.raises(UserError, match="must be the first stage"):
        clean(tmp_path / "out", source, stages=(StageSpec("length"), StageSpec("schema")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", "rows.jsonl: the file is empty"),
        ("rows.jsonl", b"\n\n", "rows.jsonl: the file contains no rows"),
        ("rows.jsonl", b"nonsense\n", "rows.jsonl:1: no line is a valid row; the line is not JSON"),
        ("rows.jsonl", b'{"text": "x"}\n', "rows.jsonl:1: there is no column with the prompt"),
        ("rows.csv", b"a,b\n", "rows.csv: the file is not a supported type of data file"),
        ("rows.json", b"{}", "rows.json: the file must contain a list of rows"),
        ("rows.jsonl.gz", b"not gzip", "rows.jsonl.gz: the file cannot be read"),
        ("folder", None, "folder: the path is a folder"),
        ("missing.jsonl", None, "missing.jsonl: no such file"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    elif name == "folder":
        (tmp_path / name).mkdir()
    with pytest.raises(UserError) as raised:
        clean(tmp_path / "out", tmp_path / name)
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_columns_are_mapped_and_a_wrong_mapping_names_the_nearest(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", {"task": {"text": "What is 1 plus two?"}, "label": 3})
    assert clean(tmp_path / "out", source, prompt="task.text", answer="label").num_out == 1
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: there is no column `lable` for the answer -> did you mean label\?"
    ):
        clean(tmp_path / "other", source, prompt="task.text", answer="lable")


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "rows.jsonl", *rows())

    monkeypatch.setattr(reading, "FIRST_ROWS", 1)

    def grow(row: dict[str, Any]) -> None:
        with source.open("ab") as file:
            file.write(b"\n")

    monkeypatch.setattr(passing, "CHUNK_LINES", 1)
    monkeypatch.setattr("controller.preflight.dataset.stages.length.Length.check", lambda self, row: grow(row.fields))
    with pytest.raises(OperationError, match="changed while it was being read"):
        clean(tmp_path / "out", source, stages=(StageSpec("length"),))
    assert not (tmp_path / "out").exists()


def test_columns_are_those_with_a_value_in_the_first_rows(tmp_path: Path) -> None:
    first = {"prompt": "What is 1 plus two?", "answer": None, "solution": "One and two are three."}
    source = written(tmp_path / "rows.jsonl", first, *({**row, "solution": "We add."} for row in rows(3)))
    report = CleaningJob([str(source)], Plan((StageSpec("schema"), StageSpec("unparseable_answer"))), 1).check()
    assert report.columns.answer == "answer"
    assert [dict(stage.reasons) for stage in report.stages] == [{"missing answer": 1}, {}]
    empty = written(tmp_path / "empty.jsonl", *({"prompt": None, "question": "What is it?", "answer": None},) * 2)
    report = CleaningJob([str(empty)], Plan(SCHEMA), 1).check()
    assert (report.columns.prompt, report.columns.answer) == ("question", "answer")
    assert report.num_out == 0


def test_rows_without_a_known_column_of_the_answer_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", {"prompt": "What is 1 plus two?", "label": 3})
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: there is no column with the answer .*answer=null.* prompt, label$"
    ):
        clean(tmp_path / "out", source)
    assert clean(tmp_path / "out", source, answer=None).num_out == 1


def test_a_stage_that_removes_most_rows_is_noted(tmp_path: Path) -> None:
    source = written(
        tmp_path / "rows.jsonl", *({"prompt": f"Write program {n}.", "answer": "see the book"} for n in range(4))
    )
    report = CleaningJob([str(source)], Plan((StageSpec("unparseable_answer"),)), 1).check()
    assert report.notes == ["unparseable_answer removed 4 of 4 rows: check that this stage is suitable for your rows"]


OWN_STAGES = """
import time
from multiprocessing import parent_process
from pathlib import Path
from controller.preflight.dataset.port import RowStage, SetStage

class Checks(RowStage):
    def check(self, row): return "a reason"

class Prepares(RowStage):
    def prepare(self): open("missing.txt")

class Opens(SetStage):
    def open(self): raise KeyError("x")

class Decides(SetStage):
    def sketch(self, row): return 1
    def decide(self, number, where, sketch): raise KeyError(number)

class Returns(Decides):
    def decide(self, number, where, sketch): return "a reason"

class Sends(SetStage):
    def sketch(self, row): return lambda: None
    def decide(self, number, where, sketch): return None

def slow(row):
    if parent_process() is not None and row["answer"] != "3":
        time.sleep(60)
        Path("finished").touch()
"""


@pytest.fixture
def own_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_stages.py").write_text(OWN_STAGES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_stages", raising=False)


@pytest.mark.usefixtures("own_stages")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Checks",
            r"Checks failed on .*rows.jsonl:1 \(the stage returned 'a reason' instead of a Finding or None\)",
        ),
        ("Prepares", r"Prepares cannot be prepared \(FileNotFoundError: .*missing.txt"),
        ("Opens", r"Opens failed on opening \(KeyError: 'x'\)"),
        ("Decides", r"Decides failed on .*rows.jsonl:1 \(KeyError: 1\)"),
        ("Returns", r"Returns failed on .*rows.jsonl:1 \(the stage returned 'a reason'"),
    ],
)
def test_an_error_in_a_class_of_the_user_is_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    source = written(tmp_path / "rows.jsonl", *rows(1))
    with pytest.raises(OperationError, match=message):
        clean(tmp_path / "out", source, stages=(StageSpec(f"own_stages:{name}"),))


@pytest.mark.processes
@pytest.mark.usefixtures("own_stages")
def test_processes_end_at_once_and_what_cannot_be_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "CHUNK_LINES", 1)
    monkeypatch.setattr(passing, "INLINE_CHUNKS", 1)
    source = written(tmp_path / "rows.jsonl", *rows(8))
    with pytest.raises(OperationError, match="the result of a stage cannot be passed between processes"):
        clean(tmp_path / "out", source, stages=(StageSpec("own_stages:Sends"),), num_processes=2)
    lines = lines_of(find_sources([str(source)]))
    outcomes = passing.Pass((StageSpec("own_stages:slow"),), Columns("prompt", "answer"), 2).run(lines)
    assert [next(outcomes).row.answer, next(outcomes).row.answer] == ["2", "3"]
    outcomes.close()
    assert not (tmp_path / "finished").exists()


@pytest.mark.processes
def test_processes_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "CHUNK_LINES", 8)
    source = written(tmp_path / "rows.jsonl", *rows(40), {"prompt": "x"}, b"{", *rows(20))
    clean(tmp_path / "one", source)
    clean(tmp_path / "two", source, num_processes=2)
    for name in ("rows.jsonl", "removed.jsonl", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_row_with_a_fault_does_not_make_a_good_row_a_duplicate(tmp_path: Path) -> None:
    for package in ("rensa", "detect_secrets", "phonenumbers"):
        pytest.importorskip(package)
    good = {"prompt": "What is the sum of seven and nine?", "answer": "16"}
    source = written(tmp_path / "rows.jsonl", {**good, "answer": "TODO"}, good)
    report = CleaningJob([str(source)], default_plan(), 1).check()
    assert report.num_out == 1


def test_evaluation_rows_are_removed_before_duplicates_are_remembered() -> None:
    kinds = [stage.kind for stage in with_evaluation(default_plan().stages, ["eval.jsonl"])]
    assert kinds[-3:] == ["contamination", "exact_duplicates", "near_duplicates"]
    assert [stage.kind for stage in with_evaluation((StageSpec("length"),), ["x"])] == ["length", "contamination"]
