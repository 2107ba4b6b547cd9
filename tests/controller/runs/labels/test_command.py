"""`areal-like data labels` and `relabel`: what is listed of a run and of a file, and the set that a review makes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.cli.main import main
from controller.coordinator.effects import RecordBatch, RecordGroup
from controller.coordinator.snapshot import BatchGroup
from controller.data.origins import Origins, describe_file
from controller.ledger.ledger import LedgerEntry
from controller.run_folder.run_folder import RunFolder
from controller.runs.labels.answers import answers_of_run, reader_of

NUM_ROWS = 4


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Row N is `N+1=`. The label of row 2 is wrong. Groups 0 to 3 of version 0 answer 9 to all; 4 to 7 answer right."""
    rows = [{"prompt": f"{n}+1=", "answer": "7" if n == 2 else str(n + 1), "id": n} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = zoo.make_run(tmp_path, "finished", "labelled")
    folder.config.write_text(
        "name: labelled\nmodel: {init: {model_type: qwen3}, tokenizer: bytes}\n"
        f"data: {{train: {{path: {tmp_path}/rows.jsonl}}, shuffle: false}}\n"
    )
    with zoo.open_ledger(folder) as ledger:
        ledger.apply([LedgerEntry(effect=zoo.LINEAGE)])
        for group in range(2 * NUM_ROWS):
            ledger.apply([LedgerEntry(effect=RecordGroup(group_id=group, version=0, started=group + 1))])
            version, answer = (0, "#9") if group < NUM_ROWS else (2, f"so #{group % NUM_ROWS + 1}")
            for index in range(4):
                text = answer if index else f"{answer} or"  # one answer in four is cut
                entry = zoo.sample_entry(
                    group, index, text, 1.0, versions=[version], finish="stop" if index else "length"
                )
                ledger.apply([entry])
            members = BatchGroup(group_id=group, sample_indices=(0, 1, 2, 3), first_version=version)
            batch = RecordBatch(step=group + 1, lineage="l0", groups=(members,), is_replay=False)
            ledger.apply([LedgerEntry(effect=batch)])
    zoo.give_tokenizer(folder.final)
    return folder


def listed(folder: RunFolder, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["data", "labels", str(folder.root), "--min-answers", "3", "--json", *words]) == 0
    page: dict[str, Any] = json.loads(capsys.readouterr().out)
    return page


def test_the_wrong_label_of_a_run_is_listed_with_its_samples(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = listed(folder, capsys, "--from-version", "1")
    assert (page["rows"], page["judged"], page["agreeing"]) == (4, 4, 3)
    (one,) = page["listed"]
    assert one == {
        "where": f"{tmp_path}/rows.jsonl:3", "key": "2", "prompt": "2+1=", "label": "7", "answer": "3",
        "num_answers": 3, "num_agree": 3, "num_label": 0, "versions": [2, 2], "samples": ["6.3", "6.2", "6.1"],
        "decision": None,
    }  # fmt: skip
    early = listed(folder, capsys, "--from-version", "0")
    assert early["listed"] == [], "half of the answers of each row are 9"
    _, first, num_gone = answers_of_run(folder, reader_of(""), from_version=1, most=32)
    assert (first, num_gone) == (1, 0)


def test_versions_count_from_the_middle_of_the_run(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="no answer of version 4 or later is stored"):
        answers_of_run(folder, reader_of(""), from_version=None, most=32)


def test_text_and_review_file(folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "labels", str(folder.root), "--min-answers", "3", "--from-version", "1"]
    review = tmp_path / "review.jsonl"
    assert main([*words, "-o", str(review)]) == 0
    captured = capsys.readouterr()
    assert "1 labels are probably wrong, out of 4 rows with enough answers" in captured.out
    assert "rows.jsonl:3  label 7, 3 of 3 answers 3  2+1=" in captured.out
    assert json.loads(review.read_text())["decision"] is None
    assert main([*words, "-o", str(review)]) == 2
    assert "an existing review is never overwritten" in capsys.readouterr().err


def decide(folder: RunFolder, tmp_path: Path, decision: str | None, **changes: Any) -> Path:
    review = tmp_path / f"review-{decision}.jsonl"
    words = ["data", "labels", str(folder.root), "--min-answers", "3", "--from-version", "1", "-o", str(review)]
    assert main(words) == 0
    line = {**json.loads(review.read_text()), "decision": decision, **changes}
    review.write_text(json.dumps(line) + "\n")
    return review


@pytest.mark.parametrize(
    ("decision", "accepts", "labels"),
    [
        ("accept", False, ["1", "2", "3", "4"]), ("reject", True, ["1", "2", "7", "4"]),
        (None, False, ["1", "2", "7", "4"]), (None, True, ["1", "2", "3", "4"]), ("remove", False, ["1", "2", "4"]),
    ],
)  # fmt: skip
def test_a_review_makes_a_new_set_and_lineage_follows_it(
    folder: RunFolder, tmp_path: Path, decision: str | None, accepts: bool, labels: list[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    before = source.read_bytes()
    review = decide(folder, tmp_path, decision)
    words = ["data", "relabel", str(source), "--review", str(review), "-o", str(tmp_path / "new")]
    assert main([*words, "--accept-all"] if accepts else words) == 0
    assert source.read_bytes() == before
    lines = (tmp_path / "new" / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == labels
    assert lines[0] == before.splitlines()[0], "other rows keep their bytes"
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["sources"][0]["sha256"] == hashlib.sha256(before).hexdigest()
    assert manifest["stages"][0]["kind"] == "relabel"
    assert manifest["rows_out"] == len(labels)
    changes = [json.loads(line) for line in (tmp_path / "new" / "relabelled.jsonl").open()]
    expected = [(f"{source}:3", "7", "3")] if labels[2] == "3" else []
    assert [(one["where"], one["old"], one["new"]) for one in changes] == expected
    described = describe_file(tmp_path / "new" / "rows.jsonl")
    last = len(labels)
    places, why = Origins().chain(f"{tmp_path}/new/rows.jsonl:{last}", described)
    assert ([one["where"] for one in places], why) == ([f"{source}:4"], "")
    assert main(words) == 2, "nothing is overwritten"


def test_answers_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [{"id": n // 4, "response": f"ANSWER: {'b' if n < 4 else 'c'}", "gold": "c"} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", "labels", str(path), "--answer", r"ANSWER: (\w)", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["listed"]
    assert main(["data", "labels", str(path), "--from-version", "1"]) == 2
    assert "--from-version: a file of answers has no policy versions" in capsys.readouterr().err
    assert (one["key"], one["label"], one["answer"], one["num_agree"]) == ("0", "c", "b", 4)
    (tmp_path / "set.jsonl").write_text(
        '{"id": 0, "prompt": "x?", "answer": "c"}\n{"id": 1, "prompt": "y", "answer": "c"}\n'
    )
    (tmp_path / "review.jsonl").write_text(json.dumps({**one, "decision": "accept"}) + "\n")
    words = ["data", "relabel", str(tmp_path / "set.jsonl"), "--review", str(tmp_path / "review.jsonl")]
    assert main([*words, "-o", str(tmp_path / "new")]) == 0
    first = (tmp_path / "new" / "rows.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"id": 0, "prompt": "x?", "answer": "b"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"decision": "acept"}, "'acept' is not a valid decision -> did you mean accept?"),
        ({"label": "8"}, "the label of the row is '7', but"),
        ({"where": "/elsewhere.jsonl:3"}, "the reviewed row (/elsewhere.jsonl:3) is not in the files"),
        ({"answer": ""}, "the line must contain a label, an answer, and one of where, key and prompt"),
    ],
)
def test_a_review_that_does_not_fit_writes_nothing(
    folder: RunFolder, tmp_path: Path, changes: dict[str, Any], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    review = decide(folder, tmp_path, **{"decision": "accept", **changes})
    words = ["data", "relabel", str(tmp_path / "rows.jsonl"), "--review", str(review), "-o", str(tmp_path / "new")]
    capsys.readouterr()
    assert main(words) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"id": 1}', "the line is not a JSON object with the field `response`"),
        ('{"id": 1, "response": "x"}', "has no label"),
        ('{"response": "x", "gold": "1"}', "neither `id` nor `prompt`"),
        ("", "the file contains no answers"),
        ('{"id": 1, "response": "#2", "gold": "1"}\n{"id": 1, "response": "#2", "gold": "2"}', "but an earlier answer"),
        ('{"id": 1, "response": "#2", "gold": "1"}', "no row has at least 4 final answers"),
    ],
)
def test_bad_files_of_answers_are_one_message(
    tmp_path: Path, line: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answers.jsonl").write_text(line + "\n")
    assert main(["data", "labels", str(tmp_path / "answers.jsonl")]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


def test_an_expression_needs_one_group() -> None:
    for pattern, error in (
        ("(", "is not a valid regular expression"),
        ("x", "must have exactly one group"),
        ("(a)(b)", "2"),
    ):
        with pytest.raises(UserError, match=error):
            reader_of(pattern)
