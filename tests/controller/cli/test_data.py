"""`areal-like data`: its arguments, exit status and output, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.cli.main import main

STAGES = "stages: [schema, exact_duplicates]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [{"question": f"What is {n} plus two?", "answer": str(n + 2)} for n in (1, 2, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "clean.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (tmp_path / "stages.yaml").write_text(STAGES)
    return tmp_path


def test_check_prints_counts_and_examples_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    assert main(["data", "check", "rows.jsonl", "--stages", "stages.yaml", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "3 rows, 1 with defects, 2 without" in out
    assert "rows.jsonl:3: same prompt (the prompt is the same as in rows.jsonl:1): What is 1 plus two?" in out
    assert sorted(folder.iterdir()) == before
    assert main(["data", "check", "clean.jsonl", "--stages", "stages.yaml"]) == 0


def test_check_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "rows.jsonl", "--stages", "stages.yaml", "--json", "--examples", "0"]) == 1
    page = json.loads(capsys.readouterr().out)
    assert (page["rows_in"], page["rows_out"]) == (3, 2)
    assert page["stages"][1]["examples"] == []


def test_clean_writes_a_folder_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "clean", "rows.jsonl", "-o", "out", "--stages", "stages.yaml"]
    assert main(words) == 0
    assert "written to out" in capsys.readouterr().out
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        "card.json", "card.md", "croissant.json", "manifest.json", "origins.jsonl", "removed.jsonl", "rows.jsonl",
    ]  # fmt: skip
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: out: already exists -> choose a different name, or remove the existing folder first; nothing is "
        "overwritten\n"
    )


def test_the_evaluation_option_adds_contamination(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rensa")
    words = ["data", "check", "clean.jsonl", "--stages", "stages.yaml", "--eval"]
    assert main([*words, "rows.jsonl"]) == 1
    assert "contamination" in capsys.readouterr().out
    assert main([*words, "missing.jsonl"]) == 2
    assert "missing.jsonl: no such file" in capsys.readouterr().err
    (folder / "stages.yaml").write_text("stages: [{kind: contamination, options: {files: [rows.jsonl]}}]\n")
    assert main([*words, "rows.jsonl"]) == 2
    assert "--eval: the list of stages already contains `contamination`" in capsys.readouterr().err


def test_card_describes_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "card", "rows.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "3 rows. Prompts are in column `question`, answers in `answer`." in out
    assert "1 rows have the prompt of an earlier row." in out
    assert main(["data", "card", "rows.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repeated_prompts"] == 1
    (folder / "rows.jsonl").write_text("{\n")
    assert main(["data", "card", "rows.jsonl"]) == 2
    assert "rows.jsonl:1: no line is a valid row" in capsys.readouterr().err


def test_a_card_shows_names_that_cannot_be_encoded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text('{"question": "What is it?", "\\udc80": 1}\n')
    assert main(["data", "card", "rows.jsonl"]) == 0
    assert main(["data", "card", "rows.jsonl", "--json"]) == 0
    assert capfd.readouterr().out.count("\\udc80") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["check", "rows.jsonl", "--columns", "prompt"],
            "--columns: `prompt` does not map a role to a column -> write ROLE=NAME, for example prompt=question",
        ),
        (
            ["check", "rows.jsonl", "--columns", "promt=question"],
            "`promt` is not a column role -> did you mean prompt?",
        ),
        (
            ["check", "rows.jsonl", "--columns", "answer=label"],
            "rows.jsonl:1: there is no column `label` for the answer",
        ),
        (["check", "rows.jsonl", "--stages", "none.yaml"], "none.yaml: the file cannot be read"),
        (["clean", "rows.jsonl", "-o", "none/out"], "none/out: the folder"),
        (["check", "rows.jsonl", "rows.jsonl"], "rows.jsonl: the file is listed twice"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    if "--stages" not in words and "check" in words:
        words = [*words, "--stages", "stages.yaml"]
    assert main(["data", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
