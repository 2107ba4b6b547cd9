"""`areal-like lineage` in both directions, from every kind of thing that can be named."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from recorded_run import copy_run

from controller.cli.main import main
from controller.config.loading import load_config
from controller.data.cleaned_rows import as_recorded
from controller.data.job_rows import JobRows
from controller.data.origins import DATA_FILE, record_data
from controller.run_folder.run_folder import RunFolder


@pytest.fixture
def ask(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*words: str, status: int = 0, source: Path | None = None) -> dict[str, Any]:
        assert main(["lineage", str(source or run.root), *words, "--json"]) == status
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return ask


def named(found: dict[str, Any], part: str, kind: str) -> list[str]:
    nodes = {one["id"]: one for one in found["nodes"]}
    return [nodes[one]["name"] for one in found[part] if nodes[one]["kind"] == kind]


def test_a_row_names_every_version_checkpoint_and_export_that_used_it(ask: Any, run: RunFolder) -> None:
    found = ask("--row", "id=r3")
    rows = f"{run.root.parent}/clean/rows.jsonl"
    assert named(found, "subjects", "row") == [f"{rows}:4"]
    with sqlite3.connect(run.ledger) as db:
        groups = [
            group for (group,) in db.execute("SELECT group_id FROM groups WHERE COALESCE(draw, group_id) % 7 = 3")
        ]
        steps = [step for (step,) in db.execute(
            f"SELECT DISTINCT step FROM groups WHERE fate = 'consumed' AND group_id IN ({','.join(map(str, groups))})"
        )]  # fmt: skip
    first = min(steps)
    assert named(found, "went_into", "batch") == [f"step {step}" for step in sorted(steps)]
    assert named(found, "went_into", "version") == [f"version {step}" for step in range(first, 7)]
    kept = [f"checkpoints/step_{step:06d}" for step in (2, 4, 6) if step >= first]
    assert named(found, "went_into", "checkpoint") == kept
    assert named(found, "went_into", "export") == ["final"]


def test_a_row_knows_its_file_its_stages_and_its_original_line(ask: Any, run: RunFolder) -> None:
    raw = f"{run.root.parent}/raw.jsonl"
    found = ask("--row", f"{raw}:5")
    assert named(found, "subjects", "row") == [f"{run.root.parent}/clean/rows.jsonl:4"]
    assert named(found, "came_from", "original") == [f"{raw}:5"]
    assert named(found, "came_from", "source") == [raw]
    (file,) = [one for one in found["nodes"] if one["kind"] == "file"]
    assert len(file["sha256"]) == 64
    assert [(one["kind"], one["removed"]) for one in file["set"]["stages"]] == [("schema", 1), ("exact_duplicates", 0)]
    assert ask("--row", "id=r3")["subjects"] == found["subjects"]


def test_a_moved_run_still_knows_the_origins_of_the_set_that_it_cleaned(
    ask: Any, run: RunFolder, tmp_path: Path
) -> None:
    first = copy_run(run, tmp_path / "first")
    shutil.copytree(run.root.parent / "clean", first.root / "data" / "train")
    stages = f"data: {{train: {{path: {run.root.parent}/raw.jsonl, stages: [schema]}}, shuffle: false}}\n"
    kept = [line for line in first.config.read_text().splitlines(keepends=True) if not line.startswith("data:")]
    first.config.write_text("".join([*kept, stages]))
    record_data(as_recorded(load_config(str(first.config)).config, first.root), first.root)
    before = ask("--row", f"{run.root.parent}/raw.jsonl:5", source=first.root)
    moved = tmp_path / "moved"
    first.root.rename(moved)
    found = ask("--row", f"{run.root.parent}/raw.jsonl:5", source=moved)
    assert named(found, "subjects", "row") == [f"{moved}/data/train/rows.jsonl:4"]
    for kind in ("original", "source"):
        assert named(found, "came_from", kind) == named(before, "came_from", kind) != []
    assert ask(source=moved)["gaps"] == []


def test_a_row_of_a_growing_file_has_the_hash_of_the_part_it_entered_with(
    ask: Any, run: RunFolder, tmp_path: Path
) -> None:
    copy = copy_run(run, tmp_path / "copy")
    path = tmp_path / "grows.jsonl"
    path.write_bytes(b"".join((run.root.parent / "raw.jsonl").read_bytes().splitlines(keepends=True)[1:3]))
    kept = [line for line in copy.config.read_text().splitlines(keepends=True) if not line.startswith("data:")]
    copy.config.write_text("".join([*kept, f"data: {{train: {{path: {path}, follow: true}}, shuffle: false}}\n"]))
    config = load_config(str(copy.config)).config
    record_data(config, copy.root)
    rows = JobRows.load(config)
    rows.record_epochs(copy.root)
    start = path.read_bytes()
    with path.open("ab") as file:
        file.write((run.root.parent / "raw.jsonl").read_bytes().splitlines(keepends=True)[3])
    rows.train(100)
    for line, content in ((2, start), (3, path.read_bytes())):
        (file_node,) = [
            one for one in ask("--row", f"{path}:{line}", source=copy.root)["nodes"] if one["kind"] == "file"
        ]
        assert file_node["sha256"] == hashlib.sha256(content).hexdigest()


def test_both_directions_agree_for_every_sample(ask: Any, run: RunFolder) -> None:
    whole = ask()
    assert whole["gaps"] == []
    with sqlite3.connect(run.ledger) as db:
        query = "SELECT group_id, sample_index, fate, step FROM samples JOIN groups USING (group_id) WHERE is_kept"
        samples = db.execute(query).fetchall()
    inside = set(named(whole, "came_from", "sample"))
    assert inside == {f"{group}.{index}" for group, index, fate, _ in samples if fate == "consumed"}
    for group, index, fate, step in samples:
        found = ask("--sample", f"{group}.{index}")
        (row,) = named(found, "came_from", "row")
        assert named(found, "came_from", "source") == [f"{run.root.parent}/raw.jsonl"]
        used = named(found, "went_into", "batch")
        assert used == ([f"step {step}"] if fate == "consumed" else [])
        back = ask("--row", row)
        assert f"{group}.{index}" in named(back, "went_into", "sample")
        for name in used:
            up = ask("--batch", name.removeprefix("step "))
            assert f"{group}.{index}" in named(up, "came_from", "sample")


def test_models_name_what_they_were_trained_on(ask: Any, run: RunFolder) -> None:
    export = ask(source=run.final)
    assert named(export, "subjects", "export") == ["final"]
    assert named(export, "came_from", "checkpoint") == ["checkpoints/step_000006"]
    checkpoint = ask(source=run.checkpoints / "step_000004")
    assert named(checkpoint, "came_from", "version") == [f"version {step}" for step in range(5)]
    assert named(checkpoint, "came_from", "batch") == [f"step {step}" for step in range(1, 5)]
    assert named(checkpoint, "went_into", "export") == []


def test_exports_elsewhere_are_named_also_when_they_are_gone(
    run: RunFolder, ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_run(run, tmp_path / "copy")
    target = tmp_path / "sent"
    assert main(["export", str(copy.root), str(target), "--version", "4"]) == 0
    capsys.readouterr()
    found = ask("--version", "3", source=copy.root)
    assert str(target) in named(found, "went_into", "export")
    assert named(ask("--run", str(copy.root), source=target), "came_from", "checkpoint") == ["checkpoints/step_000004"]
    shutil.rmtree(target)
    shutil.rmtree(copy.checkpoints / "step_000004")
    assert main(["lineage", str(copy.root), "--version", "3"]) == 0
    text = capsys.readouterr().out
    assert f"{target} (version 4; no longer stored)" in text
    assert "checkpoints/c4 (version 4; no longer stored)" in text, "the name that the ledger has"


def test_text_says_what_was_not_used_and_whether_links_are_missing(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lineage", str(run.root)]) == 0
    assert "complete: 26 samples of 15 groups" in capsys.readouterr().out
    with sqlite3.connect(run.ledger) as db:
        ((group, draw),) = db.execute("SELECT group_id, draw FROM groups WHERE fate = 'dropped'").fetchall()[-1:]
    assert main(["lineage", str(run.root), "--row", f"id=r{draw % 7}"]) == 0
    assert f"not trained on  group {group} (dropped: timeout (after 3 s))" in capsys.readouterr().out
    copy = copy_run(run, tmp_path / "copy")
    (copy.root / DATA_FILE).unlink()
    with sqlite3.connect(copy.ledger) as db:
        db.execute("DELETE FROM samples WHERE group_id = 0 AND sample_index = 1")
    assert main(["lineage", str(copy.root)]) == 1
    text = capsys.readouterr().out
    assert "the hashes of the run's files were not recorded" in text
    assert "has sample 0.1, which is not in the ledger" in text


def test_the_picture_has_every_kind_and_marks_the_subject(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "row.svg"
    assert main(["lineage", str(run.root), "--row", "id=r3", "--svg", str(path)]) == 0
    page = ElementTree.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    heads = [one.text for one in page.iter(f"{space}text") if one.get("class") == "head"]
    assert [head.split(" (")[0] for head in heads if head] == [
        "original file", "original row", "file", "row", "sample", "batch", "version", "checkpoint", "exported model",
    ]  # fmt: skip
    marked = [one for one in page.iter(f"{space}g") if str(one.get("class")).startswith("subject")]
    assert [str(one[0].text).rpartition("/")[2] for one in marked] == ["rows.jsonl:4"]
    assert main(["lineage", str(run.root), "--svg", str(path)]) == 0
    assert "… 11 more" in path.read_text(), "24 samples in a column of 14 boxes"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--row", "id=nobody"], "there is no row with id=nobody"),
        (["--row", "raw.jsonl:1"], "no row of the run is raw.jsonl:1"),
        (["--sample", "99.0"], "there is no group 99"),
        (["--sample", "0.9"], "group 0 has no sample 9"),
        (["--batch", "7"], "the run has no batch 7 -> the ledger has steps 1 to 6"),
        (["--version", "7"], "the run has no version 7"),
        (["--svg", "/no/folder/x.svg"], "cannot be written"),
    ],
)
def test_mistakes_are_one_message(
    run: RunFolder, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lineage", str(run.root), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert error in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"sources": [{"kind": "path"}]}', '{"sources": [{"key": "x", "files": [1]}]}']
)
def test_a_damaged_record_of_the_data_is_named(
    run: RunFolder, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_run(run, tmp_path / "copy")
    (copy.root / DATA_FILE).write_text(content)
    assert main(["lineage", str(copy.root)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {copy.root / DATA_FILE}: the file cannot be read")
