"""Claims about the commands that train from files: what they refuse, what a run folder says, what resume knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.cli import jobs, offline_jobs
from controller.cli.main import main
from controller.config import machine_gpus, model_folder
from controller.preflight import machine
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


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "remedy"),
    [
        (["trainer={device: cuda, ranks: 2}"], 1, "trainer.ranks: 1, or trainer.device: cpu"),
        (["trainer={device: 'cuda:3', ranks: 1}"], 2, "trainer.device: cpu"),
        (["trainer={device: 'cuda:1', ranks: 2}"], 2, "trainer.ranks: 1, or trainer.device: cpu"),
    ],
)
def test_ranks_without_a_gpu_each_are_refused(
    sessions: list[OfflineSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    num_gpus: int,
    remedy: str,
) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: num_gpus)
    assert main(["sft", "job.yaml", *overrides]) == 2
    assert not sessions
    error = capsys.readouterr().err
    assert f"but this machine has {num_gpus}" in error
    assert remedy in error


@pytest.mark.parametrize(("ranks", "device"), [(2, "cuda"), (3, "cpu")])
def test_auto_takes_gpus_only_if_each_rank_gets_one(
    sessions: list[OfflineSession], monkeypatch: pytest.MonkeyPatch, ranks: int, device: str
) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    monkeypatch.setattr(machine_gpus, "usable_gpus", lambda: 2)
    assert main(["sft", "job.yaml", f"trainer.ranks={ranks}"]) == 0
    assert sessions[0]._config.trainer.device == device


@pytest.mark.parametrize("command", ["validate", "sft"])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model={path: /nope}"], "model.path: /nope: no such folder"),
        (["model.init.model_type=qwen33"], "no causal language model of type `qwen33`"),
        (["data.train=none.jsonl"], "none.jsonl: the file cannot be read"),
    ],
)
def test_what_is_missing_is_found_before_a_run_folder_is_made(
    sessions: list[OfflineSession],
    capsys: pytest.CaptureFixture[str],
    command: str,
    overrides: list[str],
    words: str,
) -> None:
    assert main([command, "job.yaml", *overrides]) == 2
    assert not sessions
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["validate", "sft"])
def test_targets_of_an_adapter_are_compared_with_the_models_files(
    sessions: list[OfflineSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (4, 4), "model.layers.0.self_attn.o_proj.weight": (4, 4)}
    monkeypatch.setattr(model_folder, "problems_of", lambda path, tokenizer: ([], {}, True))
    monkeypatch.setattr(model_folder, "tensor_shapes", lambda path: shapes)
    words = ["model={path: /some}", "trainer.lora={rank: 2, targets: [q_prj]}"]
    assert main([command, "job.yaml", *words]) == 2
    assert "the model has no linear module q_prj -> did you mean q_proj?" in capsys.readouterr().err
    assert main([command, "job.yaml", words[0], "trainer.lora={rank: 2, targets: [q_proj]}"]) == 0
    assert len(sessions) == (command == "sft")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "1", "chosen": "2", "rejected": "2"}', "rows.jsonl:1: `chosen` and `rejected` are equal"),
        ('{"prompt": "1", "rejected": "2"}', "rows.jsonl:1: the row has no `chosen`"),
        ('{"prompt": "1"}', "rows.jsonl:1: the row has no `completion`"),
    ],
)
def test_validate_checks_rows_by_the_objective_that_their_columns_are_for(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str], row: str, words: str
) -> None:
    Path("rows.jsonl").write_text(row + "\n")
    assert main(["validate", "job.yaml"]) == 2
    assert words in capsys.readouterr().err
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert main(["validate", "job.yaml"]) == 0


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
    assert "error: rows.jsonl: the file contains no rows" in capsys.readouterr().err
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
    assert "the run is finished" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="unknown training objective: telepathy"):
        offline_jobs.resume(folder)


def test_a_damaged_config_of_a_run_is_named(sessions: list[OfflineSession]) -> None:
    main(["sft", "job.yaml"])
    folder = as_ended("stopped")
    folder.config.write_text("epochs: none\n")
    with pytest.raises(UserError, match=r"epochs: the value must be a whole number"):
        offline_jobs.resume(folder)


def test_dpo_starts_a_run_of_its_objective(sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpo", "job.yaml"]) == 2
    assert "rows.jsonl:1: the row has no `chosen`" in capsys.readouterr().err
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert main(["dpo", "job.yaml", "dpo.loss=ipo"]) == 0
    assert len(sessions) == 1
    assert (state()["command"], state()["objective"]) == ("dpo", "dpo")


def test_a_reward_model_takes_texts_as_its_scorer_does(
    sessions: list[OfflineSession], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    assert main(["reward-model", "job.yaml", "data.add_bos=never"]) == 2
    assert (
        "a reward model reads prompt and answer in the format of the scorer `reward_model`" in capsys.readouterr().err
    )
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
    assert said.startswith("error: quickstart: data.train is not a file, so this is the config of a run with rollouts")
    assert said.count("error:") == 1
    assert main(["train", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: job.yaml: data.train is a file, so this config trains from files")
    assert said.count("error:") == 1
    assert not sessions
