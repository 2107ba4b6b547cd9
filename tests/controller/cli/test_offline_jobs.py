"""Claims about the commands that train from files: what they refuse, what a run folder says, what resume knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.cli import jobs, offline_jobs
from controller.cli.main import main
from controller.run_folder.run_folder import RunFolder
from controller.runtime.offline_session import OfflineSession

pytestmark = pytest.mark.processes  # state.json names the platform, which asks `uname`

CONFIG = """\
name: job
model: {init: {model_type: qwen3}, tokenizer: bytes}
data: {train: rows.jsonl}
metrics: {report: false}
"""


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[OfflineSession]:
    """Sessions that were begun; none does anything. The working folder has a config and its rows."""
    begun: list[OfflineSession] = []

    async def run(self: OfflineSession) -> int:
        begun.append(self)
        return 0

    monkeypatch.setattr(OfflineSession, "run", run)
    monkeypatch.setattr(offline_jobs, "enlist", lambda folder: None)
    monkeypatch.setattr(jobs, "enlist", lambda folder: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    return begun


def state(name: str = "job") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path("runs") / name / "state.json").read_text())
    return found


def as_ended(status: Any) -> RunFolder:
    folder = RunFolder(Path("runs/job").resolve())
    folder.write_state(status)
    return folder


def test_a_run_folder_says_what_it_trains_on_what(sessions: list[OfflineSession]) -> None:
    assert main(["sft", "job.yaml", "epochs=3"]) == 0
    assert len(sessions) == 1
    assert (state()["command"], state()["objective"]) == ("sft", "sft")
    assert set(state()["data"]) == {"data.train"}
    assert offline_jobs.read_config(RunFolder(Path("runs/job"))).epochs == 3


def test_validate_prints_a_config_that_trains_from_files(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "job.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "batch_size: 32" in printed
    assert printed.endswith("# job.yaml is valid\n")
    assert not sessions


def test_mistakes_in_rows_leave_no_run_folder(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("")
    assert main(["sft", "job.yaml"]) == 2
    assert "error: rows.jsonl: contains no rows" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert not sessions


def test_resume_continues_a_run_that_was_stopped(sessions: list[OfflineSession]) -> None:
    main(["sft", "job.yaml"])
    as_ended("stopped")
    assert main(["resume", "runs/job"]) == 0
    assert len(sessions) == 2
    assert state()["status"] == "running"
    assert state()["objective"] == "sft"


def test_resume_refuses_a_finished_run(sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]) -> None:
    main(["sft", "job.yaml"])
    as_ended("finished")
    assert main(["resume", "runs/job"]) == 2
    assert "this run is finished" in capsys.readouterr().err


def test_resume_refuses_rows_that_have_changed(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["sft", "job.yaml"])
    as_ended("stopped")
    Path("rows.jsonl").write_text('{"prompt": "1", "completion": "3"}\n')
    assert main(["resume", "runs/job"]) == 2
    assert "data.train: the rows differ" in capsys.readouterr().err
    assert len(sessions) == 1


def test_resume_refuses_an_objective_of_a_newer_version(sessions: list[OfflineSession]) -> None:
    main(["sft", "job.yaml"])
    folder = as_ended("stopped")
    folder.write_state("stopped", objective="telepathy")
    with pytest.raises(UserError, match="no such objective: telepathy"):
        offline_jobs.resume(folder)


def test_a_damaged_config_of_a_run_is_named(sessions: list[OfflineSession]) -> None:
    main(["sft", "job.yaml"])
    folder = as_ended("stopped")
    folder.config.write_text("epochs: none\n")
    with pytest.raises(UserError, match=r"epochs: must be a whole number"):
        offline_jobs.resume(folder)


def test_dpo_starts_a_run_of_its_objective(sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpo", "job.yaml"]) == 2
    assert "rows.jsonl:1: has no `chosen`" in capsys.readouterr().err
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert main(["dpo", "job.yaml", "dpo.loss=ipo"]) == 0
    assert len(sessions) == 1
    assert (state()["command"], state()["objective"]) == ("dpo", "dpo")


def test_a_reward_model_takes_texts_as_its_scorer_does(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert main(["reward-model", "job.yaml", "data.add_bos=never"]) == 2
    assert "a reward model reads prompt and answer as scorer `reward_model` gives them" in capsys.readouterr().err
    assert main(["reward-model", "job.yaml"]) == 0
    assert (state()["command"], state()["objective"]) == ("reward-model", "reward_model")
    as_ended("stopped")
    assert main(["resume", "runs/job"]) == 0
    assert len(sessions) == 2


def test_a_command_and_a_config_that_do_not_go_together_are_one_sentence(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dpo", "quickstart"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: quickstart: this is the config of a run with rollouts")
    assert said.count("error:") == 1
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: job.yaml: this config trains from files")
    assert said.count("error:") == 1
    assert not sessions
