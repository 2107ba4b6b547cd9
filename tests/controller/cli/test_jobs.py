"""Claims about the commands: what resume refuses, what it finds again, and what a crash at any moment leaves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from small_run import until
from valid_config import SMALL

from areal_like.errors import LedgerError, OperationError, UserError
from areal_like.metrics import read_jsonl
from areal_like.store_owner import OWNER_FILE, claim
from controller.cli import jobs
from controller.config.early_stop_settings import EarlyStopSettings
from controller.config.loading import load_config
from controller.config.run_config import PrometheusSettings
from controller.data import job_rows, table
from controller.ledger.ledger import Ledger
from controller.run_folder.run_folder import RunFolder
from controller.runtime import conclusion, session, storage
from controller.runtime.conclusion import SessionResult
from controller.runtime.model_preparation import Prepared
from controller.runtime.outcome import Outcome
from controller.runtime.session import RunSession
from controller.runtime.signals import Signals
from controller.runtime.starting_point import find_start
from controller.telemetry.progress import Progress
from controller.telemetry.sinks import Sinks

pytestmark = pytest.mark.processes


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A small configuration; the working folder is tmp_path/home."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return load_config("quickstart", [*SMALL, "runs_dir=runs"]).config


@pytest.fixture
def stretches(monkeypatch) -> list[RunSession]:
    """Stretches that were begun; none does anything."""
    begun: list[RunSession] = []

    async def run(self: RunSession) -> int:
        begun.append(self)
        return 0

    monkeypatch.setattr(RunSession, "run", run)
    return begun


def test_rows_that_were_read_for_the_checks_are_not_read_again(config, stretches, monkeypatch):
    tables = job_rows.Tables(table.load_train(config), table.load_eval(config))
    for name in ("load_training", "load_eval"):
        monkeypatch.setattr(job_rows, name, lambda _: pytest.fail("read twice"))
    jobs.train(config, tables=tables)
    assert stretches[0].rows.train_table is tables.train


def stopped_run(config) -> RunFolder:
    jobs.train(config)
    folder = RunFolder.find("quickstart")
    folder.write_state("stopped")
    return folder


def test_resume_finds_the_run_from_anywhere_with_relative_paths_as_they_were_meant(
    config, stretches, tmp_path, monkeypatch
):
    folder = stopped_run(config)
    monkeypatch.chdir("/")
    assert jobs.resume(folder.root) == 0
    again = stretches[-1]
    assert again.is_resume
    assert Path.cwd() == tmp_path / "home"
    assert again.config.runs_dir == str(tmp_path / "home" / "runs")
    assert again.rows.fingerprints == stretches[0].rows.fingerprints


def test_a_run_that_ended_early_goes_on_only_when_asked_and_then_without_the_rule(config, stretches):
    folder = stopped_run(config.model_copy(update={"early_stop": EarlyStopSettings()}))
    folder.write_state("finished", reason="early stop: accuracy was not better")
    with pytest.raises(UserError, match=r"finished \(early stop: .*\) -> run areal-like resume --past-early-stop"):
        jobs.resume(folder.root)
    assert jobs.resume(folder.root, past_early_stop=True) == 0
    assert stretches[-1].config.early_stop is None
    folder.write_state("stopped")
    assert jobs.resume(folder.root) == 0
    assert stretches[-1].config.early_stop is None, "also after a further stop"
    folder.write_state("finished")
    with pytest.raises(UserError, match="start a new run with more steps"):
        jobs.resume(folder.root, past_early_stop=True)


def test_resume_makes_a_folder_that_others_may_enter_private_and_says_so(config, stretches, capsys):
    folder = stopped_run(config)
    folder.root.chmod(0o755)
    assert jobs.resume(folder.root) == 0
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert "was accessible to other users (mode 755)" in capsys.readouterr().err
    folder.write_state("stopped")
    assert jobs.resume(folder.root) == 0
    assert "was accessible" not in capsys.readouterr().err


def test_resume_of_a_moved_run_looks_next_to_it(config, stretches, tmp_path):
    folder = stopped_run(config)
    (tmp_path / "elsewhere").mkdir()
    moved = folder.root.rename(tmp_path / "elsewhere" / "job")
    jobs.resume(moved)
    assert stretches[-1].folder.root == moved
    assert stretches[-1].config.runs_dir == str(tmp_path / "elsewhere")


def test_resume_with_other_rows_is_refused_and_names_them(config, stretches):
    folder = stopped_run(config)
    text = folder.config.read_text()
    folder.config.write_text(text.replace("limit: 20", "limit: 19"))
    with pytest.raises(UserError, match=r"data\.train: the rows differ from the rows"):
        jobs.resume(folder.root)
    folder.config.write_text(text.replace("limit: 4", "limit: 5"))
    with pytest.raises(UserError, match=r"data\.eval"):
        jobs.resume(folder.root)
    assert len(stretches) == 1


def test_finished_and_running_runs_are_not_resumed(config, stretches):
    folder = stopped_run(config)
    folder.write_state("finished")
    with pytest.raises(UserError, match="finished"):
        jobs.resume(folder.root)
    folder.write_state("running")
    with pytest.raises(UserError, match="still in progress"):
        jobs.resume(folder.root)


def test_folder_of_an_evaluation_is_not_resumed_as_a_training_run(config, stretches):
    jobs.evaluate(config)
    assert stretches[-1].is_evaluation
    folder = RunFolder.find("quickstart-eval")
    folder.write_state("failed")
    with pytest.raises(UserError, match="areal-like eval"):
        jobs.resume(folder.root)
    assert jobs.read_config(folder) == config, "its config can be used again"


def test_damaged_config_of_a_run_is_reported_in_words(config, stretches):
    folder = stopped_run(config)
    for text in ("a: [", "\0", "num_steps: many\n", "[]"):
        folder.config.write_text(text)
        with pytest.raises(UserError):
            jobs.resume(folder.root)


def test_run_that_an_earlier_version_started_is_resumed_with_the_defaults_of_today(config, stretches):
    folder = stopped_run(config)
    data = yaml.safe_load(folder.config.read_text())
    data["launch"] |= {"curve": "auto", "stall_after_s": 300.0, "silence_s": 20.0}
    data["rollout"]["engine"]["sglang"] |= {"load_timeout_s": 600.0, "stall_timeout_s": 300.0}
    folder.config.write_text(yaml.safe_dump(data))
    assert jobs.resume(folder.root) == 0
    resumed = stretches[-1].config
    assert resumed.launch == config.launch.model_copy(update={"silence_s": 20.0})
    assert resumed.rollout == config.rollout


def test_unknown_key_in_the_config_of_a_run_is_refused(config, stretches):
    folder = stopped_run(config)
    data = yaml.safe_load(folder.config.read_text())
    data["launch"]["bend"] = 300.0
    folder.config.write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match="bend: no such key"):
        jobs.resume(folder.root)


def test_sft_into_a_folder_with_something_in_it_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        jobs.sft(load_config("quickstart", ["out=out", f"runs_dir={tmp_path / 'runs'}"]).config)
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- one stretch


def pretend(monkeypatch, serve) -> None:
    monkeypatch.setattr(RunSession, "_serve", serve)


def test_locked_run_is_left_alone_to_the_last_byte(config, monkeypatch):
    async def never(self, *_):
        raise AssertionError("served")

    pretend(monkeypatch, never)
    folder = RunFolder.create(Path("runs"), "quickstart")
    rows = jobs.JobRows.load(config)
    folder.write_state("running")
    before = folder.state.read_bytes()
    with Ledger(folder.root), pytest.raises(UserError, match="another controller"):
        asyncio.run(RunSession(config, folder, rows, is_resume=True).run())
    assert folder.state.read_bytes() == before


def test_run_stopped_in_its_preparation_can_be_resumed(config, monkeypatch):
    async def slow(*_, **__):
        await asyncio.sleep(60)

    monkeypatch.setattr(session, "prepare", slow)

    async def interrupted(work: RunSession) -> int:
        running = asyncio.create_task(work.run())
        await until(lambda: (work.folder.root / "ledger.sqlite").exists() and work.folder.read_state()["reason"] == "")
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        return await running

    monkeypatch.setattr(jobs, "run_to_end", lambda work: asyncio.run(work))
    folder = RunFolder.create(Path("runs"), "quickstart")
    folder.write_state("running")
    rows = jobs.JobRows.load(config)
    for is_resume in (False, True):
        assert asyncio.run(interrupted(RunSession(config, folder, rows, is_resume=is_resume))) == 0
        state = folder.read_state()
        assert state["status"] == "stopped"
        assert state["reason"] == "before the first step"
        assert json.loads(folder.status.read_text())["status"] == "stopped"


def test_run_whose_ledger_is_gone_although_it_has_checkpoints_is_refused(config):
    folder = RunFolder.create(Path("runs"), "quickstart")
    folder.write_state("stopped")
    checkpoint = folder.checkpoints / "step_000004"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="no ledger"):
        asyncio.run(RunSession(config, folder, jobs.JobRows.load(config), is_resume=True).run())


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (UserError("no such scorer"), UserError, "failed"),
        (LedgerError("disk full"), LedgerError, "failed"),
        (OSError(28, "No space left on device"), OperationError, "failed"),
        (RuntimeError("our own mistake"), RuntimeError, "failed"),
    ],
)
def test_every_end_by_an_error_is_written_down(config, monkeypatch, error, raised, status):
    async def serve(self, *_):
        raise error

    pretend(monkeypatch, serve)
    with pytest.raises(raised):
        jobs.train(config)
    folder = RunFolder.find("quickstart")
    assert folder.read_state()["status"] == status
    assert json.loads(folder.status.read_text())["status"] == status


def test_status_says_what_preparation_does_while_it_lasts(config, monkeypatch):
    seen = []

    async def serve(self, opened):
        display = opened.telemetry.display
        async with opened.telemetry.status.preparing(lambda: display.progress_text, lambda: {"prepare": {"pid": 7}}):
            display.progress(Progress("warm start", 50, 300, 12.0, "loss 1.5"))
            await until(lambda: "50/300" in self.folder.status.read_text())
            seen.append(json.loads(self.folder.status.read_text()))
        return SessionResult(Outcome("completed", "done"))

    pretend(monkeypatch, serve)
    jobs.train(config)
    (status,) = seen
    assert (status["status"], status["preparing"]) == ("preparing", "warm start 50/300  loss 1.5  12 s left")
    assert status["processes"] == {"prepare": {"pid": 7}}
    last = json.loads(RunFolder.find("quickstart").status.read_text())
    assert (last["status"], last["preparing"], last["processes"]) == ("finished", "", {})


def test_losses_of_sinks_are_in_the_summary_and_the_last_rows(config, monkeypatch):
    class Broken:
        name, kinds = "broken", frozenset({"step"})

        def write(self, record):
            raise ConnectionError("refused")

        def close(self):
            pass

    async def serve(self, opened):
        opened.telemetry.journal.append({"kind": "step", "step": 1, "time_s": 0.0})
        return SessionResult(Outcome("completed", "done"), {"groups_drawn": 0})

    pretend(monkeypatch, serve)
    monkeypatch.setattr(session, "open_sinks", lambda *_: Sinks([Broken()]))
    monkeypatch.setattr(conclusion, "_audit_words", lambda folder: "clean")
    jobs.train(config)
    folder = RunFolder.find("quickstart")
    assert json.loads(folder.summary.read_text())["sinks"] == {"broken": {"written": 0, "lost": 1}}
    (row,) = [row for row in read_jsonl(folder.metrics) if row["kind"] == "sink"]
    assert (row["sink"], row["event"], row["lost"]) == ("broken", "closed", 1)
    assert "ConnectionError: refused" in row["error"]


def test_port_of_the_metrics_in_use_ends_the_run_before_anything_is_prepared(config, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(session, "prepare", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        metrics = config.metrics.model_copy(update={"prometheus": PrometheusSettings(port=taken.getsockname()[1])})
        with pytest.raises(UserError, match="port is in use"):
            jobs.train(config.model_copy(update={"metrics": metrics}))
    folder = RunFolder.find("quickstart")
    assert folder.read_state()["status"] == json.loads(folder.status.read_text())["status"] == "failed"


def test_controller_logs_into_its_own_file(config, monkeypatch):
    async def serve(self, *_):
        logging.getLogger("controller.runtime.server").warning("rollout-0 cannot be reached")
        return SessionResult(Outcome("completed", "done"))

    pretend(monkeypatch, serve)
    jobs.train(config)
    assert "rollout-0 cannot be reached" in (RunFolder.find("quickstart").logs / "controller.log").read_text()


def test_named_model_is_evaluated_as_it_is_without_a_warm_start(tmp_path, stretches, capsys):
    overrides = ["data.train.limit=20", "data.eval.limit=4", f"model.path={tmp_path}", f"runs_dir={tmp_path}"]
    config = load_config("quickstart", overrides).config
    assert config.warm_start is not None
    jobs.evaluate(config)
    assert stretches[-1].config.warm_start is None
    assert "warm_start is ignored" in capsys.readouterr().out


def test_evaluation_without_a_single_score_fails(config, monkeypatch):
    async def serve(self, *_):
        return SessionResult(Outcome("completed", "0 steps done"))

    pretend(monkeypatch, serve)
    with pytest.raises(OperationError, match="no answer was scored"):
        jobs.evaluate(config)
    assert RunFolder.find("quickstart-eval").read_state()["status"] == "failed"


@pytest.mark.parametrize("has_shared_memory", [True, False])
def test_ranks_meet_in_shared_memory_and_not_where_tmpdir_may_lack_locks(tmp_path, monkeypatch, has_shared_memory):
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    for place in (shared, temporary):
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(storage, "SHARED_MEMORY", shared if has_shared_memory else tmp_path / "none")
    with storage.rendezvous_folder() as folder:
        assert folder.parent == (shared if has_shared_memory else temporary)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_port_in_use_is_a_users_mistake_and_gives_the_weights_back(config, monkeypatch, tmp_path):
    async def prepared(*_, **__):
        return Prepared(tmp_path, 0.0, was_cached=True)

    monkeypatch.setattr(session, "prepare", prepared)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "areal_like-ranks-of-a-killed-controller"
    left.mkdir()
    claim(left)
    owner = json.loads((left / OWNER_FILE).read_text())
    (left / OWNER_FILE).write_text(json.dumps({**owner, "identity": "another process"}))

    async def main() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        taken = config.model_copy(update={"launch": config.launch.model_copy(update={"port": port})})
        folder = RunFolder.create(Path("runs"), "quickstart")
        folder.write_state("running")
        work = RunSession(taken, folder, jobs.JobRows.load(config))
        async with server:
            with pytest.raises(UserError, match="port is in use"):
                await work.run()

    asyncio.run(main())
    run_id = RunFolder.find("quickstart").read_state()["run_id"]
    assert not list(Path("/dev/shm").glob(f"areal_like-{run_id}*"))
    assert not list(tmp_path.glob("areal_like-ranks-*")), "its own and what a killed controller left"


def test_newest_whole_checkpoint_that_the_ledger_knows_is_the_one_to_go_on_from(config, monkeypatch):
    from controller.coordinator.snapshot import BatchRecord, LedgerState
    from controller.telemetry.display import Display

    folder = RunFolder.create(Path("runs"), "quickstart")
    for version in (2, 4, 6, 8):
        checkpoint = folder.checkpoints / f"step_{version:06d}"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").write_text(json.dumps({"format": 2, "files": {}}))
        facts = {"version": version, "lineage": "l0", "run_id": "r", "config_digest": ""}
        (checkpoint / "state.json").write_text(json.dumps(facts))
    (folder.checkpoints / "step_000006" / "manifest.json").write_text("{")
    batches = tuple(BatchRecord(step=step, lineage="l0", groups=()) for step in range(1, 8))
    state = LedgerState(
        num_lineages=1, num_drawn=0, num_filtered=0, dropped={}, live=(), batches=batches, checkpoints=(), evals=()
    )
    ledger: Any = SimpleNamespace(seq=0)
    start = find_start(folder, ledger, state, Display("plain"), is_resume=True, accept_loss=False)
    assert start.checkpoint == folder.checkpoints / "step_000004", (
        "8 is beyond the ledger, 6 is damaged; no report is needed"
    )
    assert start.version == 4


def test_full_disk_is_reported_with_the_path_and_what_to_do(config, monkeypatch):
    async def serve(self, *_):
        raise OSError(28, "No space left on device", "/runs/x/metrics.jsonl")

    pretend(monkeypatch, serve)
    with pytest.raises(OperationError, match=r"/runs/x/metrics.jsonl: No space left.* -> free some disk space"):
        jobs.train(config)


# ---------------------------------------------------------------- signals


def test_signal_before_there_is_a_server_is_handed_over_to_it():
    async def test():
        received: list[str] = []
        with Signals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: stop._asked.is_set())
            stop.hand_to(received.append)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: len(received) == 2)
        assert received == ["a signal", "SIGTERM"]

    asyncio.run(test())


def test_work_that_fails_raises_although_nobody_asked_to_stop():
    async def fail() -> None:
        raise UserError("no")

    async def test():
        with Signals() as stop, pytest.raises(UserError):
            await stop.unless_asked(fail())

    asyncio.run(test())
