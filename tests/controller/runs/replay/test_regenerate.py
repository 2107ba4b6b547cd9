"""Claims about drawing the answers of a run again, without processes: the same tokens, or the first difference."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_answers import ENGINE, EngineAnswers, engine_here
from replayable_run import make_run, play_here

from areal_like.config import ModelSettings, ProcessSpec
from areal_like.errors import LedgerError, UserError
from areal_like.trajectory import Trajectory
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay import regenerate as module
from controller.runs.replay import several_starts
from controller.runs.replay.regenerate import regenerate_run
from trainer.config import LoraSettings
from trainer.model.lora import Merged

SINGLE: dict[str, Any] = {"engine": ENGINE}
STARTS = ((0, 3), (2, 5))
Change = Callable[[Trajectory], Trajectory]


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_starts, "play", play_here)
    monkeypatch.setattr(module, "open_engine", engine_here)


class ChangedAnswers(EngineAnswers):
    """The recorded sample 2 of group 7 (step 3, versions 1 to 2) is not what the engine sampled."""

    def __init__(self, model_dir: Path, change: Change) -> None:
        super().__init__(model_dir)
        self._change = change

    def __call__(self, group_id: int, index: int, step: int) -> Trajectory:
        found = super().__call__(group_id, index, step)
        return self._change(found) if (group_id, index) == (7, 2) else found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of five steps with a fall-back after the third, whose answers an engine sampled; tests change a copy."""
    root = tmp_path_factory.mktemp("made")
    return make_run(root, starts=STARTS, rollout=SINGLE, answers=EngineAnswers(root / "prepared")).folder


@pytest.fixture
def run(made: RunFolder, tmp_path: Path) -> RunFolder:
    folder = tmp_path / "runs" / "made"
    shutil.copytree(made.root, folder)
    return RunFolder(folder)


def regenerated(
    run: RunFolder, capsys: pytest.CaptureFixture[str], status: int | None = 0, **options: Any
) -> dict[str, Any]:
    """The JSON of the command, which must exit with `status`. Before it may be lines that libraries print when they are
    imported."""
    chosen = {"first": None, "last": None, "num_samples": None, **options}
    assert regenerate_run(run, as_json=True, **chosen) == status
    said = capsys.readouterr().out
    found: dict[str, Any] = json.loads(said[said.index("{\n") :])
    return found


def test_answers_with_versions_that_change_within_them_are_drawn_again_without_a_difference(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    found = regenerated(run, capsys)
    with sqlite3.connect(run.ledger) as db:
        query = "SELECT SUM(num_tokens), SUM(first_version < last_version) FROM samples"
        ((num_tokens, num_mixed),) = db.execute(query)
    assert num_mixed > 10
    assert (found["samples"], found["tokens"], found["tokens_drawn"]) == (60, num_tokens, num_tokens)
    assert (found["versions"], found["versions_replayed"]) == (5, 3), "0 and checkpoint 4 are there; 1 to 3 are made"
    assert found["first"] is None
    assert (found["different_tokens"], found["different_logprobs"], found["different_ends"]) == (0, 0, 0)
    assert found["largest_gap_nats"] < found["allowed_nats"] == 1e-4
    assert regenerate_run(run, first=None, last=None, num_samples=None, as_json=False) == 0
    said = capsys.readouterr().out
    assert "made: tokens and log-probs of the answers of steps 1 to 5, with 5 versions" in said
    assert f"equal: 60 samples with {num_tokens:,} tokens" in said


def test_turns_draw_from_the_stream_of_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = EngineAnswers(tmp_path / "prepared", num_turns=2)
    run = make_run(tmp_path, starts=((0, 2),), saved=(1, 2), rollout={**SINGLE, "workflow": "tools"}, answers=answers)
    found = regenerated(run.folder, capsys)
    assert found["first"] is None
    assert found["tokens_drawn"] == found["tokens"] > 300
    assert found["versions_replayed"] == 0


class MergedAnswers(EngineAnswers):
    """Answers of a policy with an adapter, which engines receive merged."""

    def take(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        super().take(version, Merged(weights, LoraSettings(rank=2).scale))


def test_versions_of_an_adapter_are_merged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints have the adapter alone: also their versions come from the trainer."""
    answers, settings = MergedAnswers(tmp_path / "prepared"), {"lora": {"rank": 2}}
    run = make_run(tmp_path, starts=((0, 3),), saved=(2,), settings=settings, rollout=SINGLE, answers=answers).folder
    found = regenerated(run, capsys)
    assert found["first"] is None
    assert (found["versions"], found["versions_replayed"]) == (3, 2)


def test_answer_without_a_number_in_a_sample_of_several_is_compared_by_log_probs_alone(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, "rollout-0", settings={**SINGLE, "workflow": "my_module:BestOfTwo"})
    found = regenerated(run, capsys, last=1)
    assert (found["tokens_drawn"], found["samples"], found["first"]) == (0, 12, None)


def token(one: Trajectory) -> Trajectory:
    tokens_T = one.tokens_T.copy()
    tokens_T[6] = 3 + (tokens_T[6] - 2) % 58
    return msgspec.structs.replace(one, tokens_T=tokens_T)


def logprob(one: Trajectory) -> Trajectory:
    logprobs_T = one.logprobs_T.copy()
    logprobs_T[6] -= 1e-3
    return msgspec.structs.replace(one, logprobs_T=logprobs_T)


def version(one: Trajectory) -> Trajectory:
    versions_T = one.versions_T.copy()
    versions_T[6] += 1
    return msgspec.structs.replace(one, versions_T=versions_T)


def shorter(one: Trajectory) -> Trajectory:
    columns = ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T")
    return msgspec.structs.replace(one, **{name: getattr(one, name)[:-1] for name in columns})


CHANGES: dict[str, tuple[Change, dict[str, Any]]] = {
    "token": (token, {"kind": "token", "token": 3, "version": 1}),
    "log-prob": (logprob, {"kind": "log-prob", "token": 3, "version": 1}),
    "version": (version, {"token": 3, "version": 2}),
    "end": (shorter, {"kind": "end"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_altered_record_is_named_with_sample_turn_token_and_version(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected = CHANGES[name]
    answers = ChangedAnswers(tmp_path / "prepared", change)
    run = make_run(tmp_path, starts=((0, 3),), saved=(1, 2), rollout=SINGLE, answers=answers).folder
    first = regenerated(run, capsys, 1)["first"]
    where = {"step": 3, "group": 7, "sample": 2, "trajectory": 0, "turn": 0}
    assert {key: first[key] for key in where | expected} == where | expected
    assert regenerate_run(run, first=2, last=None, num_samples=None, as_json=False) == 1
    said = capsys.readouterr().out
    assert "different: step 3: group 7 sample 2, turn 0" in said
    assert "equal:" not in said


def test_only_samples_of_the_chosen_steps_are_compared(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    found = regenerated(run, capsys, first=2, last=3)
    assert (found["steps"], found["samples"]) == ([3, 3], 12)
    chosen = [regenerated(run, capsys, num_samples=7) for _ in range(2)]
    assert chosen[0]["samples"] == chosen[1]["samples"] == 7
    assert chosen[0]["tokens"] == chosen[1]["tokens"]


def test_keys_and_values_of_earlier_versions_leave_only_the_first_version_of_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = EngineAnswers(tmp_path / "prepared", interruption="keep_kv")
    settings = {**SINGLE, "interruption": "keep_kv"}
    run = make_run(tmp_path, starts=((0, 3),), saved=(1, 2), rollout=settings, answers=answers).folder
    found = regenerated(run, capsys)
    assert found["first"] is None
    ((reason, number),) = found["tokens_not_compared"].items()
    assert "keep_kv" in reason
    assert number > 50
    rewrite(run, "rollout-0", settings=SINGLE)
    assert regenerated(run, capsys, 1)["different_logprobs"] > 0, "recomputed keys and values give other log-probs"


def test_tokens_of_an_engine_with_another_sampler_are_not_drawn(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, "rollout-0", settings={"engine": {**ENGINE, "kind": "vllm"}})
    found = regenerated(run, capsys)
    assert (found["compared"], found["tokens_drawn"], found["ties"], found["first"]) == (["logprobs"], 0, 0, None)
    assert found["allowed_nats"] == 1e-3
    regenerate_run(run, first=4, last=None, num_samples=None, as_json=False)
    assert "the sampler of vLLM cannot be repeated; only log-probs" in capsys.readouterr().out


def test_engine_that_rounds_weights_is_refused(run: RunFolder) -> None:
    sglang = {"quantization": "fp8"}
    rewrite(run, "rollout-0", settings={"engine": {**ENGINE, "kind": "sglang", "sglang": sglang}})
    with pytest.raises(UserError, match="quantised its weights or KV cache") as raised:
        regenerate_run(run, first=None, last=None, num_samples=None, as_json=False)
    assert raised.value.where == "rollout.engine.sglang.quantization"


def test_versions_that_cannot_be_made_are_counted_and_the_others_are_compared(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 2 needs the tokens of step 2, which are gone; version 3 as well; 4 has a checkpoint."""
    change(run, "UPDATE samples SET file = NULL WHERE group_id IN (3, 4)")
    found = regenerated(run, capsys)
    assert found["samples_not_compared"] == {"their tokens are no longer stored": 8}
    assert found["first"] is None
    reasons = list(found["tokens_not_compared"])
    assert [reason.partition(":")[0] for reason in reasons] == ["version 2 cannot be made", "version 3 cannot be made"]
    assert "there is no checkpoint, and the tokens of step 2 are no longer stored" in reasons[0]
    assert min(found["tokens_not_compared"].values()) > 10


def test_without_any_version_the_command_refuses(run: RunFolder) -> None:
    for folder in run.checkpoints.iterdir():
        if folder.name != "step_000005":
            shutil.rmtree(folder)
    rewrite(run, "trainer", model=ModelSettings(path="/nowhere"))
    with pytest.raises(
        UserError, match="the weights of none of the recorded versions can be restored: neither the starting model"
    ) as raised:
        regenerate_run(run, first=None, last=None, num_samples=None, as_json=False)
    assert raised.value.where == str(run.root)


def test_versions_without_a_token_to_compare_are_refused(run: RunFolder) -> None:
    """Group 13 has tokens of version 3, which cannot be made, and after them of version 4."""
    rewrite(run, "rollout-0", settings={**SINGLE, "interruption": "keep_kv"})
    change(run, "UPDATE samples SET file = NULL WHERE group_id IN (3, 4, 12, 14)")
    with pytest.raises(UserError, match="no token can be compared: version 3 cannot be made"):
        regenerate_run(run, first=4, last=None, num_samples=None, as_json=False)


def test_weights_of_another_model_are_refused(run: RunFolder, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(run.checkpoints / "step_000004", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    rewrite(run, "rollout-0", model=ModelSettings(path=str(folder)))
    with pytest.raises(UserError, match="the weights do not fit the model of the run: version 0"):
        regenerate_run(run, first=None, last=1, num_samples=None, as_json=False)


def test_mistakes_and_damage_are_one_message(run: RunFolder) -> None:
    for options, what in (
        ({"num_samples": 0}, "the number of samples to compare is 0"),
        ({"first": 5}, "--from is 5, but it must be less than the last step, 5"),
        ({"last": 9}, "no step 9"),
    ):
        with pytest.raises(UserError, match=what):
            regenerate_run(run, as_json=False, **{"first": None, "last": None, "num_samples": None, **options})
    change(run, "UPDATE samples SET last_version = 9 WHERE group_id = 14 AND sample_index = 3")
    with pytest.raises(LedgerError, match="group 14 sample 3 is recorded with versions 2 to 9, but its tokens"):
        regenerate_run(run, first=4, last=None, num_samples=None, as_json=False)
    change(run, "UPDATE samples SET file = NULL")
    with pytest.raises(UserError, match="no answers of steps 1 to 5 are stored"):
        regenerate_run(run, first=None, last=None, num_samples=None, as_json=False)
    (run.processes / "rollout-0.json").unlink()
    with pytest.raises(UserError, match="the run never started a rollout worker"):
        regenerate_run(run, first=None, last=None, num_samples=None, as_json=False)


def rewrite(run: RunFolder, name: str, **fields: Any) -> None:
    file = run.processes / f"{name}.json"
    ProcessSpec.load(file).model_copy(update=fields).save(file)


def change(run: RunFolder, statement: str) -> None:
    with sqlite3.connect(run.ledger) as db:
        db.execute(statement)
