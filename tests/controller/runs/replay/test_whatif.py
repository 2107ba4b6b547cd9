"""Claims about `areal-like whatif` on recorded batches, without processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from replayable_run import MadeRun, make_run, play_here

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay import whatif as module
from controller.runs.replay.whatif import replay_changed
from controller.runs.replay.whatif_settings import Answer, answer_of

QUICKSTART = Path(__file__).resolve().parents[4] / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", play_here)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    run = make_run(tmp_path_factory.mktemp("made"), starts=((0, 4),), saved=(2, 4))
    shutil.copy(QUICKSTART, run.folder.config)
    return run


def asked(
    run: RunFolder, capsys: pytest.CaptureFixture[str], *overrides: str, **options: Any
) -> tuple[int, dict[str, Any]]:
    chosen: dict[str, Any] = {"first": None, "last": None, "min_ess": 0.0, "as_json": True, **options}
    status = replay_changed(run, overrides, **chosen)
    return status, json.loads(capsys.readouterr().out)


def test_recorded_settings_give_the_recorded_steps(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = asked(made.folder, capsys, "trainer.loss.eps_high=0.2")
    assert status == 0
    assert [row["step"] for row in found["steps"]] == [1, 2, 3, 4]
    for row in found["steps"]:
        assert row["loss"] == row["recorded_loss"] is not None
        assert row["grad_norm"] == row["recorded_grad_norm"]
        assert row["kl_nats"] == pytest.approx(row["recorded_kl_behaviour_proximal"], rel=1e-5)
        assert 0 < row["answer_ess"] <= 1
        assert 0 < row["ess"] <= 1


def test_another_rate_changes_the_policy_after_the_first_step_and_nothing_of_the_run(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in made.folder.root.rglob("*") if file.is_file()}
    _, found = asked(made.folder, capsys, "trainer.optimizer.lr=0.2")
    first, *rest = found["steps"]
    assert (first["loss"], first["grad_norm"]) == (first["recorded_loss"], first["recorded_grad_norm"])
    assert all(row["grad_norm"] != row["recorded_grad_norm"] for row in rest)
    assert {file: file.read_bytes() for file in made.folder.root.rglob("*") if file.is_file()} == before


def test_a_part_of_the_run_starts_from_its_checkpoint(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--from: there is no step 99"):
        asked(made.folder, capsys, "trainer.mini_batches=3", first=99, last=3)
    _, found = asked(made.folder, capsys, "trainer.mini_batches=3", first=3, last=3)
    assert [row["step"] for row in found["steps"]] == [3]
    with pytest.raises(UserError, match="checkpoints of the run do not contain the parameters of this component"):
        asked(made.folder, capsys, "trainer.lora={}", first=3)


def test_replay_ends_before_the_first_step_whose_samples_say_too_little(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = ["trainer.optimizer.lr=1", "trainer.optimizer.warmup_steps=0"]
    _, whole = asked(made.folder, capsys, *fast)
    sizes = [row["ess"] for row in whole["steps"]]
    step = next(number for number in (2, 3, 4) if sizes[number - 1] < min(sizes[: number - 1]))
    status, found = asked(made.folder, capsys, *fast, min_ess=sizes[step - 1] * (1 + 1e-9))
    assert status == 1
    assert [row["step"] for row in found["steps"]] == list(range(1, step))
    assert found["refused"]["step"] == step
    assert found["refused"]["ess"] == sizes[step - 1]
    assert replay_changed(made.folder, fast, first=None, last=None, min_ess=1.0, as_json=False) == 1
    said = capsys.readouterr().out
    assert "stopped before step 1: the effective sample size is" in said
    assert "below --min-ess 1, so the recorded samples are too unlikely under the changed policy" in said


def test_table_has_each_step_next_to_the_record(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"first": None, "last": 2, "min_ess": 0.0, "as_json": False}
    assert replay_changed(made.folder, ["trainer.loss.eps_high=0.4"], **options) == 0
    said = capsys.readouterr().out
    assert "steps 1 to 2 from the starting model, with trainer.loss.eps_high=0.4" in said
    assert "2 steps: the policy differs by at most" in said


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("sampling.temperature=0.5", "this setting changes what is sampled"),
        ("model.path=x", "this setting changes what is sampled"),
        ("rollout.workflow=a:b", "this setting changes what is sampled"),
        ("reward.scorers=[]", "this setting changes the scores of samples"),
        ("trainer.ranks=2", "this setting does not change the results of a step"),
        ("trainer.teacher.path=x", "log-probs of other models"),
        ("eval.every_steps=3", "this setting changes neither"),
        ("trainer.loss.eps_high", "is not of the form key.path=value"),
    ],
)
def test_settings_that_the_record_cannot_answer_are_refused(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        answer_of([override])


def test_settings_are_answered_by_replay_or_by_simulation_not_by_both() -> None:
    assert answer_of(["trainer.loss.eps_high=0.4", "trainer.advantage.kind=rloo"]) is Answer.REPLAY
    assert answer_of(["staleness.max_staleness=8", "rollout.routing.policy=x"]) is Answer.SIMULATION
    with pytest.raises(UserError, match="a changed schedule produces batches that differ"):
        answer_of(["mode=sync", "trainer.loss.eps_high=0.4"])


def test_settings_are_checked_with_the_config_of_the_run(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="eps_high"):
        asked(made.folder, capsys, "trainer.loss.eps_high=-1")


def test_trainers_that_cannot_be_compared_are_refused(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "made"
    shutil.copytree(made.folder.root, folder)
    run = RunFolder(folder)
    file = run.processes / "trainer.json"
    spec = ProcessSpec.load(file)
    spec.model_copy(update={"settings": {**spec.settings, "version_logprobs": {}}}).save(file)
    with pytest.raises(UserError, match="log-probs of the recorded versions"):
        asked(run, capsys, "trainer.loss.eps_high=0.4")
    spec.model_copy(update={"num_ranks": 2}).save(file)
    spec.save(run.processes / "trainer-1.json")
    with pytest.raises(UserError, match="has 2 ranks"):
        asked(run, capsys, "trainer.loss.eps_high=0.4")
