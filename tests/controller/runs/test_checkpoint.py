"""`areal-like checkpoint`, `export` and `import`: what is asked, what is said, and the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_zoo as zoo
from safetensors.numpy import load_file, save_file

from areal_like.errors import UserError
from areal_like.wire.messages import RunPosition
from controller.run_folder.run_folder import RunFolder
from controller.runs.checkpoint import checkpoint
from controller.runs.convert import export, import_model
from controller.runtime.control_requests import Requests
from controller.runtime.evaluation_watch import keep_checkpoint
from controller.runtime.trainer_restart import find_checkpoint
from trainer.checkpoints import checkpoint as files
from trainer.checkpoints.checkpoint import CheckpointState, Retention


class Controller:
    """Takes requests whenever the command sleeps, and answers after some seconds; its clock is the sleeping."""

    def __init__(self, folder: RunFolder, answer: tuple[str, bool] | None = ("/run/step_000007", True)) -> None:
        self.folder, self.answer = folder, answer
        self.desk = Requests(folder.requests)
        self.now_s, self.keys = 0.0, []
        self.takes = True

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.takes:
            self.keys += [request.key for request in self.desk.take() if request.wish == "checkpoint"]
        if self.keys and self.now_s > 30.0 and self.answer is not None:
            text, is_granted = self.answer
            self.desk.answer(self.keys.pop(), text, is_granted=is_granted)


def run(tmp_path: Path, kind: Any = "running", **manner: Any) -> tuple[RunFolder, Controller, dict[str, Any]]:
    folder = zoo.make_run(tmp_path, kind)
    controller = Controller(folder, **manner)
    return folder, controller, {"sleep": controller.sleep, "clock": controller.clock}


def test_checkpoint_is_waited_for_longer_than_an_answer_and_its_place_is_printed(tmp_path, capsys):
    folder, _, time = run(tmp_path)
    assert checkpoint(folder, **time) == 0
    assert "/run/step_000007" in capsys.readouterr().out
    assert not list(folder.requests.iterdir())


def test_refusal_is_reported_with_status_1(tmp_path, capsys):
    folder, _, time = run(tmp_path, answer=("the disk is full", False))
    assert checkpoint(folder, **time) == 1
    assert "the disk is full" in capsys.readouterr().err


def test_controller_that_takes_no_request_is_reported_after_seconds(tmp_path, capsys):
    folder, controller, time = run(tmp_path)
    controller.takes = False
    assert checkpoint(folder, **time) == 1
    assert "the run did not reply within 10 s, because it is starting or ending" in capsys.readouterr().err
    assert controller.now_s < 20.0
    assert not list(folder.requests.iterdir())


def test_step_that_takes_too_long_is_reported(tmp_path, capsys):
    folder, _, time = run(tmp_path, answer=None)
    assert checkpoint(folder, timeout_s=60.0, **time) == 1
    assert "no checkpoint was saved within 1 min" in capsys.readouterr().err


def test_run_on_another_machine_is_asked_and_named_where_it_does_not_answer(tmp_path, capsys):
    folder, controller, time = run(tmp_path, "foreign")
    controller.takes = False
    assert checkpoint(folder, **time) == 1
    assert "it runs, or ran, on " in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["finished", "crashed", "failed"])
def test_run_that_does_not_go_on_is_a_users_mistake(tmp_path, kind):
    folder = zoo.make_run(tmp_path, kind)
    with pytest.raises(UserError, match="specify a run that is in progress; only such a run can save a checkpoint"):
        checkpoint(folder)


# ---------------------------------------------------------------- checkpoints on disk


def made(run_dir: Path, version: int, *, seq: int = 0) -> Path:
    """A checkpoint whose weight is its version."""

    def write(folder: Path) -> None:
        save_file({"w": np.full((2, 2), version, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "qwen3"}')

    state = CheckpointState(
        version=version, lineage="l0", run_id="r", config_digest="", position=RunPosition(ledger_seq=seq)
    )
    return files.save(run_dir, state, write, Retention(keep=9))[0]


def damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


def test_newest_checkpoint_that_is_whole_and_that_the_ledger_knows_is_taken_and_the_others_are_named(tmp_path):
    for version in (2, 4, 6, 8):
        made(tmp_path, version, seq=version * 10)
    damage(tmp_path / "checkpoints" / "step_000006")
    found = find_checkpoint(tmp_path, num_batches=7, ledger_seq=100)
    assert (found.version, found.path) == (4, tmp_path / "checkpoints" / "step_000004")
    assert "step_000008 was skipped: the ledger ends at step 7" in found.left_out[0]
    assert "step_000006 was skipped" in found.left_out[1]
    assert "is damaged" in found.left_out[1]


def test_checkpoint_that_knows_more_than_the_ledger_is_of_another_run(tmp_path):
    made(tmp_path, 2, seq=500)
    found = find_checkpoint(tmp_path, num_batches=7, ledger_seq=100)
    assert (found.version, found.path) == (0, None)
    assert "when the ledger contained 500 facts, but the ledger contains only 100" in found.left_out[0]


def test_export_takes_the_newest_whole_checkpoint_or_the_one_that_is_named(tmp_path, capsys):
    folder = zoo.make_run(tmp_path, "finished")
    for version in (2, 4, 6):
        made(folder.root, version)
    damage(folder.root / "checkpoints" / "step_000006")
    assert export(str(folder.root), str(tmp_path / "a"), version=None, dtype=None, lora=None) == 0
    assert load_file(tmp_path / "a" / "model.safetensors")["w"][0, 0] == 4
    assert "step_000004 of" in capsys.readouterr().out
    assert export(str(folder.root), str(tmp_path / "b"), version=2, dtype=None, lora=None) == 0
    assert load_file(tmp_path / "b" / "model.safetensors")["w"][0, 0] == 2
    one = folder.root / "checkpoints" / "step_000002"
    assert export(str(one), str(tmp_path / "c"), version=None, dtype="bfloat16", lora=None) == 0
    assert b'"dtype":"BF16"' in (tmp_path / "c" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="no checkpoint of version 3 -> available versions: 2, 4, 6"):
        export(str(folder.root), str(tmp_path / "d"), version=3, dtype=None, lora=None)
    with pytest.raises(UserError, match="a checkpoint has only one version"):
        export(str(one), str(tmp_path / "d"), version=3, dtype=None, lora=None)
    with pytest.raises(UserError, match="--lora: the checkpoint contains a full model"):
        export(str(one), str(tmp_path / "d"), version=None, dtype=None, lora="adapter")


def test_export_of_the_best_takes_the_one_that_is_kept_for_it(tmp_path, capsys):
    folder = zoo.make_run(tmp_path, "finished")
    for version in (2, 4):
        made(folder.root, version)
    with pytest.raises(UserError, match="the run has no best checkpoint"):
        export(str(folder.root), str(tmp_path / "a"), version=None, best=True, dtype=None, lora=None)
    kept = folder.best / "step_000002"
    keep_checkpoint(folder.root / "checkpoints" / "step_000002", kept, {"version": 2, "path": str(kept)})
    assert export(str(folder.root), str(tmp_path / "a"), version=None, best=True, dtype=None, lora=None) == 0
    assert load_file(tmp_path / "a" / "model.safetensors")["w"][0, 0] == 2
    assert "step_000002 of" in capsys.readouterr().out
    damage(kept)
    with pytest.raises(UserError, match="the best checkpoint is damaged"):
        export(str(folder.root), str(tmp_path / "b"), version=None, best=True, dtype=None, lora=None)


def test_run_without_a_checkpoint_is_reported_in_one_sentence(tmp_path):
    folder = zoo.make_run(tmp_path, "finished")
    with pytest.raises(UserError, match="the run has no complete checkpoint -> use areal-like checkpoint"):
        export(str(folder.root), str(tmp_path / "a"), version=None, dtype=None, lora=None)


def test_import_refuses_what_is_a_checkpoint_or_nothing(tmp_path, capsys):
    one = made(tmp_path, 2)
    with pytest.raises(UserError, match="the folder is already a checkpoint"):
        import_model(str(one), str(tmp_path / "a"))
    with pytest.raises(UserError, match="there is no such folder"):
        import_model(str(tmp_path / "nowhere"), str(tmp_path / "a"))
    export(str(one), str(tmp_path / "hf"), version=None, dtype=None, lora=None)
    assert import_model(str(tmp_path / "hf"), str(tmp_path / "a")) == 0
    assert "imported 1 tensors from " in capsys.readouterr().out
