"""Claims about replaying a run that a trainer left, without processes: same bits, or the first difference by name."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replayable_run import MadeRun, make_run, play_here
from safetensors.torch import load_file, save_file

from areal_like.config import ModelSettings, ProcessSpec
from areal_like.errors import LedgerError, UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay import replay as module
from controller.runs.replay.recording import Origin, open_recording
from controller.runs.replay.replay import replay_run
from controller.runs.replay.tensors import digests_in, total

VARIANTS: dict[str, dict[str, Any]] = {
    "critic-mini-batches-and-passes": {
        "critic": {}, "advantage": {"kind": "gae"}, "mini_batches": 2, "passes_per_batch": 2,
    },
    "lora": {"lora": {"rank": 2}},
    "version-logprobs": {
        "version_logprobs": {}, "mini_batches": 2, "loss": {"corrections": [{"kind": "balance_heuristic"}]},
    },
    "reference-cosine-and-rate-by-ess": {
        "loss": {"kl_coef": 0.1}, "gradient_cosine": {"every_steps": 1}, "lr_by_ess": {},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", play_here)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """A run of five steps with a fall-back after the third; tests change a copy of its folder."""
    return make_run(tmp_path_factory.mktemp("made"), starts=((0, 3), (2, 5)))


@pytest.fixture
def run(made: MadeRun, tmp_path: Path) -> RunFolder:
    folder = tmp_path / "runs" / "made"
    shutil.copytree(made.folder.root, folder)
    return RunFolder(folder)


def replayed(run: RunFolder, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    status = replay_run(run, **{"first": None, "last": None, **options})
    return status, capsys.readouterr().out


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_of_a_run_with_three_restarts_ends_with_the_weights_of_final(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, starts=((0, 1), (0, 3), (2, 3), (2, 5)), settings=VARIANTS[variant]).folder
    status, said = replayed(run, capsys)
    assert status == 0, said
    digests = digests_in(run.final)
    assert f"final ({len(digests)} tensors): equal, sha256 {total(digests)}" in said
    assert "checkpoint 4 (" in said
    assert "checkpoint 5 (" in said
    assert "the trainer was started 2 times, at versions 0, 2" in said
    assert "equal: 5 steps with " in said


def test_replay_from_a_checkpoint_trains_only_the_later_steps(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = replayed(run, capsys, first=4)
    assert status == 0, said
    assert "replaying steps 5 to 5 from checkpoint 4" in said
    assert "equal: 1 steps" in said
    status, said = replayed(run, capsys, last=4)
    assert status == 0, said
    assert "checkpoint 4 (" in said
    assert "final" not in said


def test_damaged_checkpoint_is_not_started_from(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier one is used, or the starting model; the replay finds what is wrong with the damaged one."""
    flip(run.checkpoints / "step_000004" / "model.safetensors")
    assert replay_run(run, first=4, last=None) == 1
    shown = capsys.readouterr()
    assert "checkpoint 4 was skipped" in shown.err
    assert "from the starting model" in shown.out
    assert "different: checkpoint 4: model: " in shown.out


def test_other_tensor_in_final_is_named_with_how_much_it_differs(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.final / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1.0
    save_file(tensors, file, {"format": "pt"})
    status, said = replayed(run, capsys)
    assert status == 1
    assert "different: final: model.layers.1.mlp.up_proj.weight: 1 of 1,536 values differ, by at most 1" in said


def test_other_reward_in_the_ledger_is_found_in_the_step_that_used_it(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, "UPDATE samples SET value = value + 1 WHERE group_id = 6 AND sample_index = 0")
    status, said = replayed(run, capsys)
    assert status == 1
    assert "different: step 3: reward_mean is " in said


def test_damaged_tokens_are_named_with_their_step(run: RunFolder) -> None:
    with sqlite3.connect(run.ledger) as db:
        ((number,),) = db.execute("SELECT file FROM samples WHERE group_id = 9 AND sample_index = 0").fetchall()
    flip(run.root / "segments" / f"{number:06d}.seg")
    with pytest.raises(LedgerError, match=r"the batch of step 4 cannot be read: .* is damaged"):
        replay_run(run, first=None, last=None)


def test_purged_tokens_are_refused_with_a_checkpoint_after_which_all_are_kept(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, "UPDATE samples SET file = NULL WHERE group_id IN (6, 7)")
    with pytest.raises(UserError, match="the tokens of 8 samples of step 3") as raised:
        replay_run(run, first=None, last=None)
    assert raised.value.remedy.startswith("replay only a later part with --from 4; set ledger.keep_mb: null")
    assert replayed(run, capsys, first=4)[0] == 0


def test_missing_starting_model_is_refused(run: RunFolder) -> None:
    rewrite(run, lambda spec: spec.model_copy(update={"model": ModelSettings(path="/nowhere")}))
    with pytest.raises(UserError, match="the starting model no longer exists"):
        replay_run(run, first=None, last=None)


def test_relative_starting_model_is_of_the_folder_in_which_the_run_was_started(
    made: MadeRun, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(run, lambda spec: spec.model_copy(update={"model": ModelSettings(path="prepared")}))
    monkeypatch.chdir(tmp_path)
    with open_recording(run) as recording:
        recording.check_origin(Origin(0, None), 5)


def test_ledger_of_an_older_schema_is_replayed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, "ALTER TABLE batches DROP COLUMN reused")
    status, said = replayed(run, capsys, first=4)
    assert status == 0, said


def test_damaged_records_are_named_and_rows_without_a_step_are_skipped(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with run.metrics.open("a") as file:
        file.write('{"kind": "step", "step": null}\n{"kind": "step"}\n{"kind": "step", "step": "9"}\n')
    change(run, "DELETE FROM batches WHERE step = 3")
    with pytest.raises(UserError, match="the ledger has no batch of step 3") as raised:
        replay_run(run, first=None, last=None)
    assert raised.value.remedy.startswith("replay only a later part with --from 4; run areal-like verify")
    assert replayed(run, capsys, first=4)[0] == 0
    change(run, "UPDATE lineages SET checkpoint_version = 'x' WHERE lineage = 'l1'")
    with pytest.raises(UserError, match="cannot be read"):
        replay_run(run, first=None, last=None)
    change(run, "UPDATE meta SET value = 'x' WHERE key = 'schema'")
    with pytest.raises(UserError, match="cannot be read"):
        replay_run(run, first=None, last=None)
    run.ledger.write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="cannot be read"):
        replay_run(run, first=None, last=None)


def test_step_that_needs_earlier_versions_starts_only_where_the_trainer_did(run: RunFolder) -> None:
    settings = VARIANTS["version-logprobs"]
    rewrite(run, lambda spec: spec.model_copy(update={"settings": {**spec.settings, **settings}}))
    with pytest.raises(UserError) as raised:
        replay_run(run, first=4, last=None)
    assert raised.value.where == "trainer.version_logprobs"


def test_other_mistakes_are_refused(run: RunFolder) -> None:
    for options, what in (({"first": None, "last": 6}, "no step 6"), ({"first": 6, "last": None}, "no step 6")):
        with pytest.raises(UserError, match=what) as raised:
            replay_run(run, **options)
        assert raised.value.remedy == "the run has steps 1 to 5"
    run.write_state("running")
    with pytest.raises(UserError, match="still in progress"):
        replay_run(run, first=None, last=None)
    run.write_state("finished")
    (run.processes / "trainer.json").unlink()
    with pytest.raises(UserError, match="never started"):
        replay_run(run, first=None, last=None)
    run.write_state("finished", objective="sft")
    with pytest.raises(UserError, match="trains from files"):
        replay_run(run, first=None, last=None)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def rewrite(run: RunFolder, change: Callable[[ProcessSpec], ProcessSpec]) -> None:
    file = run.processes / "trainer.json"
    change(ProcessSpec.load(file)).save(file)


def change(run: RunFolder, statement: str) -> None:
    with sqlite3.connect(run.ledger) as db:
        db.execute(statement)
