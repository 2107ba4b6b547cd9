"""Claims about runs whose ledger, checkpoints and metrics disagree: nothing is trained again over them unasked."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_entries import admit, checkpoint, finished, lineage, shipped
from valid_config import SMALL

from areal_like.errors import UserError
from areal_like.metrics import JsonlLog, read_jsonl
from controller.cli import jobs
from controller.config.loading import load_config
from controller.ledger.ledger import Ledger
from controller.ledger.mirror import HOME_FILE, LedgerHome
from controller.run_folder.run_folder import RunFolder
from controller.runtime import continuity, storage
from controller.runtime.conclusion import SessionResult
from controller.runtime.outcome import Outcome
from controller.runtime.session import RunSession

STEPS = 6


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return load_config("quickstart", [*SMALL, "runs_dir=runs"]).config


def saved(folder: RunFolder, version: int, **facts: object) -> Path:
    """A checkpoint folder, whole, as the trainer would leave it."""
    path = folder.checkpoints / f"step_{version:06d}"
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"format": 2, "files": {}}))
    run_id = folder.read_state()["run_id"]
    state = {"version": version, "lineage": "l0", "run_id": run_id, "config_digest": "", **facts}
    (path / "state.json").write_text(json.dumps(state))
    return path


def record(folder: RunFolder, steps: int) -> None:
    """The ledger of a run of so many steps, a checkpoint at every second one."""
    with Ledger(folder.root, run_id=folder.read_state()["run_id"]) as ledger:
        ledger.apply([lineage()])
        for step in range(1, steps + 1):
            ledger.apply([admit(step - 1), finished(step - 1, [0])])
            ledger.apply([shipped(step, step - 1)])
            if step % 2 == 0:
                ledger.apply([checkpoint(step)])


def measured(folder: RunFolder, steps: int) -> None:
    log = JsonlLog(folder.metrics)
    for step in range(1, steps + 1):
        log.append({"kind": "step", "time_s": float(step), "step": step})
    log.close()


@pytest.fixture
def stopped(config) -> RunFolder:
    """A run of six steps with checkpoints 2, 4 and 6, stopped."""
    folder = RunFolder.create(Path("runs"), "quickstart")
    rows = jobs.JobRows.load(config)
    folder.write_state("stopped", data=rows.fingerprints)
    record(folder, STEPS)
    measured(folder, STEPS)
    for version in (2, 4, 6):
        saved(folder, version)
    return folder


@pytest.fixture
def resume(config, stopped, monkeypatch):
    """Resume the stopped run as far as the trainer would start; returns the version it would start from."""

    async def serve(self, opened):
        start = self._start(opened)
        found.append(start.version if start.checkpoint else None)
        return SessionResult(Outcome("stopped", "far enough"))

    found: list[int | None] = []
    monkeypatch.setattr(RunSession, "_serve", serve)
    rows = jobs.JobRows.load(config)

    def go(*, accept_loss: bool = False) -> int | None:
        work = RunSession(config, stopped, rows, is_resume=True, accept_loss=accept_loss)
        asyncio.run(work.run())
        return found[-1]

    return go


def remove_ledger(folder: RunFolder) -> None:
    for path in folder.root.glob("ledger.sqlite*"):
        path.unlink()


def older_ledger(folder: RunFolder, steps: int) -> None:
    remove_ledger(folder)
    shutil.rmtree(folder.root / "segments")
    record(folder, steps)


def test_run_whose_files_agree_is_continued_from_its_newest_checkpoint(resume):
    assert resume() == STEPS


def test_deleted_newest_checkpoint_is_no_disagreement(resume, stopped):
    shutil.rmtree(stopped.checkpoints / "step_000006")
    assert resume() == 4


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: older_ledger(run, 3), "metrics.jsonl has step 6, but ledger.sqlite ends at step 3"),
        (lambda run: older_ledger(run, 0), "metrics.jsonl has step 6"),
        (lambda run: (remove_ledger(run), (run.root / "ledger.sqlite").touch()), "ledger.sqlite is empty"),
        (remove_ledger, "there is no ledger.sqlite"),
        (lambda run: saved(run, 8), "checkpoint step_000008 is of step 8, but ledger.sqlite ends at step 6"),
        (lambda run: saved(run, 5, lineage="l7"), "is of lineage l7, which is not in ledger.sqlite"),
        (lambda run: saved(run, 5, run_id="another"), "belongs to run another"),
        (lambda run: saved(run, 5, position={"ledger_seq": 10**6}), "the ledger contained 1000000 facts"),
        (lambda run: run.metrics.unlink(), "metrics.jsonl ends at step 0"),
        (lambda run: shutil.rmtree(run.checkpoints), "checkpoints/ contains none"),
    ],
    ids=[
        "older ledger", "ledger without steps", "empty ledger", "no ledger", "newer checkpoint", "other lineage",
        "other run", "other history", "no metrics", "no checkpoints",
    ],
)  # fmt: skip
def test_files_that_disagree_are_refused_with_ways_to_go_on_and_nothing_is_touched(resume, stopped, damage, words):
    damage(stopped)
    before = {
        path: path.read_bytes() for path in stopped.root.rglob("*") if path.is_file() and "ledger" not in path.name
    }
    with pytest.raises(UserError) as refusal:
        resume()
    assert words in str(refusal.value)
    assert "restore ledger.sqlite" in str(refusal.value)
    assert "areal-like export" in str(refusal.value)
    for path, content in before.items():
        assert path.read_bytes() == content


def test_accepted_loss_goes_on_from_the_newest_shared_state_and_keeps_later_checkpoints_aside(resume, stopped):
    older_ledger(stopped, 3)
    assert resume(accept_loss=True) == 2
    aside = sorted(path.name.split(".")[0] for path in (stopped.checkpoints / "set_aside").iterdir())
    assert aside == ["step_000004", "step_000006"]
    assert read_jsonl(stopped.metrics)[-1]["kind"] == continuity.LOSS_ROW
    assert resume() == 2, "an accepted loss is accepted once"


@pytest.mark.parametrize("is_deleted", [True, False])
def test_loss_of_the_ledger_is_never_accepted_over_good_checkpoints(resume, stopped, is_deleted):
    remove_ledger(stopped)
    if not is_deleted:
        (stopped.root / "ledger.sqlite").touch()
    with pytest.raises(UserError, match="checkpoint"):
        resume(accept_loss=True)
    assert len(list(stopped.checkpoints.glob("step_*"))) == 3


def only_first_checkpoint(folder: RunFolder, steps: int, version: int) -> None:
    """A cluster's controller was lost just after the run's first checkpoint, before the ledger was copied."""
    remove_ledger(folder)
    shutil.rmtree(folder.root / "segments")
    shutil.rmtree(folder.checkpoints)
    folder.checkpoints.mkdir()
    folder.metrics.unlink()
    with Ledger(folder.root, run_id=folder.read_state()["run_id"]) as ledger:
        ledger.apply([lineage()])
        for step in range(1, steps + 1):
            ledger.apply([admit(step - 1), finished(step - 1, [0]), shipped(step, step - 1)])
    saved(folder, version, position={"ledger_seq": 10**6})


def test_mirror_that_ends_just_before_the_first_checkpoint_is_continued_with_the_recorded_steps(
    resume, stopped, monkeypatch
):
    only_first_checkpoint(stopped, steps=2, version=2)
    with pytest.raises(UserError, match="ends before the first checkpoint"):
        resume()
    home = SimpleNamespace(is_restored=True, folder=stopped.root)
    monkeypatch.setattr(storage, "open_ledger_home", lambda *_: home)
    assert resume() is None
    assert [path.name.split(".")[0] for path in (stopped.checkpoints / "set_aside").iterdir()] == ["step_000002"]


def test_mirror_without_steps_of_the_first_checkpoint_begins_again_only_when_the_loss_is_accepted(
    resume, stopped, monkeypatch
):
    only_first_checkpoint(stopped, steps=1, version=2)
    home = SimpleNamespace(is_restored=True, folder=stopped.root)
    monkeypatch.setattr(storage, "open_ledger_home", lambda *_: home)
    with pytest.raises(UserError, match="resume --accept-loss"):
        resume()
    assert len(list(stopped.checkpoints.glob("step_*"))) == 1
    assert resume(accept_loss=True) is None


def test_damaged_checkpoints_all_of_them_are_no_fresh_start_unless_accepted(resume, stopped):
    for path in stopped.checkpoints.glob("step_*"):
        (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="there is no checkpoint from which the run could continue"):
        resume()
    assert resume(accept_loss=True) is None


def test_ledger_of_another_run_is_refused(resume, stopped):
    stopped.write_state("stopped", run_id="different")
    with pytest.raises(UserError, match="belongs to run"):
        resume(accept_loss=True)


def test_state_without_the_data_it_was_started_with_is_refused(config, stopped):
    stopped.config.write_text(jobs.dump_yaml(config))
    state = stopped.read_state()
    del state["data"]
    stopped.state.write_text(json.dumps(state))
    with pytest.raises(UserError, match="does not record the data that the run was started with"):
        jobs.resume(stopped.root)


def test_database_file_alone_holds_every_recorded_step(tmp_path):
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([lineage()])
        for step in range(1, 4):
            ledger.apply([admit(step - 1), finished(step - 1, [0])])
            ledger.apply([shipped(step, step - 1)])
            assert ledger.wait_for_copy(60.0)
            (tmp_path / "copy").mkdir(exist_ok=True)
            shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "copy" / "ledger.sqlite")
            shutil.copytree(tmp_path / "segments", tmp_path / "copy" / "segments", dirs_exist_ok=True)
            with Ledger(tmp_path / "copy") as copy:
                assert len(copy.load().batches) == step
                assert copy.run_id == "r"
                assert copy.lineages() == {"l0": 0}


def test_closing_leaves_no_write_ahead_log_even_while_somebody_reads(tmp_path):
    ledger = Ledger(tmp_path)
    reader = sqlite3.connect(tmp_path / "ledger.sqlite")
    ledger.apply([lineage(), admit(0)])
    reader.execute("SELECT COUNT(*) FROM groups").fetchone()
    ledger.close()
    log = tmp_path / "ledger.sqlite-wal"
    assert not log.exists() or log.stat().st_size == 0
    reader.close()


def test_newer_ledger_on_this_machine_is_not_thrown_away_for_an_older_mirror(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    home = LedgerHome(run, tmp_path / "local", "r1")
    with Ledger(home.open(), run_id="r1") as ledger:
        ledger.apply([lineage(), admit(0)])
        home.copy()
        ledger.apply([finished(0, [0]), shipped(1, 0)])
    home.unlock()
    (run / HOME_FILE).unlink()
    again = LedgerHome(run, tmp_path / "local", "r1")
    with pytest.raises(UserError, match="is newer"):
        again.open()
    assert (home.folder / "ledger.sqlite").exists()
