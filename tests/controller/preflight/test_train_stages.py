"""A job with stages trains on what `areal-like data clean` writes, and resumes with it; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from valid_config import SMALL

from areal_like.errors import UserError
from controller.cli import jobs
from controller.cli.main import main
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.cleaned_rows import as_recorded, cleaned_folder
from controller.data.origins import read_record
from controller.data.table import load_train
from controller.preflight.train_stages import CleanedTrain, words
from controller.report.data import RunData
from controller.report.overview import figures
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.data_rows import read_rows
from controller.runtime.session import RunSession

ROWS = [{"prompt": f"{n}+1=", "answer": str((n + 1) % 10), "terms": [n, 1]} for n in (1, 2, 1, 3, 4)]
STAGES = "data.train.stages=[schema, exact_duplicates]"


@pytest.fixture
def words_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n")
    return [*SMALL, "runs_dir=runs", "data.train={path: rows.jsonl}", STAGES]


@pytest.fixture
def config(words_of_rows: list[str]) -> RunConfig:
    return load_config("quickstart", words_of_rows).config


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[RunSession]:
    """Sessions that were begun; none does anything."""
    sessions: list[RunSession] = []

    async def run(self: RunSession) -> int:
        sessions.append(self)
        return 0

    monkeypatch.setattr(RunSession, "run", run)
    return sessions


def test_a_job_reads_what_data_clean_writes(config: RunConfig, begun: list[RunSession], tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text("stages: [schema, exact_duplicates]\n")
    assert main(["data", "clean", "rows.jsonl", "-o", "clean", "--stages", "stages.yaml"]) == 0
    assert jobs.train(config) == 0
    folder = RunFolder(tmp_path / "runs" / config.name)
    for name in ("rows.jsonl", "removed.jsonl", "manifest.json", "origins.jsonl"):
        own = (cleaned_folder(folder.root) / name).read_bytes()
        assert own == (tmp_path / "clean" / name).read_bytes(), name
    by_hand = load_config("quickstart", [*SMALL, "data.train={path: clean/rows.jsonl}"]).config
    table = begun[0].rows.train_table
    assert table is not None
    assert table.fingerprint == load_train(by_hand).fingerprint
    assert [row["prompt"] for row in table] == ["1+1=", "2+1=", "3+1=", "4+1="]
    assert folder.read_state()["cleaning"] == {
        "rows_in": 6, "rows_out": 4,
        "stages": [{"kind": "schema", "removed": 1}, {"kind": "exact_duplicates", "removed": 1}],
    }  # fmt: skip
    (source,) = [one for one in read_record(folder.root)["sources"] if one["key"] == "data.train"]
    assert source["files"][0]["set"]["sources"][0]["name"] == "rows.jsonl"
    rows, why = read_rows(folder)
    assert why == ""
    assert rows is not None
    assert rows.where(0).startswith(str(cleaned_folder(folder.root)))


def test_the_report_counts_what_each_stage_removed(config: RunConfig, begun: list[RunSession], tmp_path: Path) -> None:
    jobs.train(config)
    folder = RunFolder(tmp_path / "runs" / config.name)
    folder.metrics.write_text("")
    (figure,) = [one for one in figures(RunData.load(folder)) if one.label == "rows kept"]
    assert (figure.value, figure.note) == ("4", "of 6; removed by schema 1, exact_duplicates 1")


def test_a_resume_reads_the_recorded_set_and_not_the_file(
    config: RunConfig, begun: list[RunSession], tmp_path: Path
) -> None:
    jobs.train(config)
    folder = RunFolder(tmp_path / "runs" / config.name)
    folder.write_state("stopped")
    (tmp_path / "rows.jsonl").unlink()
    assert jobs.resume(folder.root) == 0
    first, again = (session.rows.train_table for session in begun)
    assert first is not None
    assert again is not None
    assert first.fingerprint == again.fingerprint
    (cleaned_folder(folder.root) / "rows.jsonl").unlink()
    folder.write_state("stopped")
    with pytest.raises(UserError, match="the file with the cleaned rows of this run is missing"):
        jobs.resume(folder.root)
    with pytest.raises(UserError, match="missing"):
        as_recorded(config, folder.root)


def test_rows_that_were_cleaned_for_the_checks_are_not_cleaned_again(
    config: RunConfig, begun: list[RunSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = CleanedTrain(config)
    assert words(cleaned.report) == "data.train.stages removed 2 of 6 rows (schema 1, exact_duplicates 1)"

    def fail(*_: Any) -> None:
        raise AssertionError("cleaned again")

    monkeypatch.setattr(jobs, "CleanedTrain", fail)
    assert jobs.train(config, cleaned=cleaned) == 0
    assert not cleaned.folder.exists()
    assert begun[0].rows.train_table is not None


def test_a_temporary_set_is_removed_with_its_object(config: RunConfig) -> None:
    cleaned = CleanedTrain(config)
    place = cleaned.folder.parent
    assert place.is_dir()
    del cleaned
    assert not place.exists()


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("data.train.stages=[schem]", "data.train.stages.0: there is no stage `schem` -> did you mean schema?"),
        ("data.train.stages=[{kind: length, options: {min_promt: 3}}]", "data.train.stages.0: length has no option"),
        (
            "data.train.stages=[exact_duplicates, schema]",
            "data.train.stages.1: the stage `schema` must be the first stage",
        ),
        ("data.train.stages=[exact_duplicates]", "rows.jsonl:2: the line is not JSON"),
        ("data.train.stages=[schema, {kind: length, options: {min_prompt: 99}}]", "removed all 6 rows"),
        ("data.train.stages=['no_such_module:stage']", "data.train.stages.0: "),
        ("data.train={generator: running_sum}", "can only clean files, but the rows come from a generator"),
    ],
)
def test_mistakes_are_one_line_of_validate(
    words_of_rows: list[str], override: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*words_of_rows[:-1], override]
    if override.startswith("data.train={"):
        overrides = [*words_of_rows[:-2], "data.train={generator: running_sum, stages: [schema]}"]
    assert main(["validate", "quickstart", *overrides]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert error in lines[0]
