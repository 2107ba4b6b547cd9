"""Claims about a run from files at work: what it shows, how each end of its process is reported, how it is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_run import until

from areal_like.errors import OperationError, ProcessDied, UserError
from controller.config.offline_config import OfflineConfig
from controller.run_folder.run_folder import RunFolder
from controller.runtime import offline_session
from controller.runtime.offline_session import OfflineSession

pytestmark = pytest.mark.processes

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(offline_session, "OFFLINE", "fake_offline")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    folder = RunFolder.create(tmp_path, "r")
    folder.write_state("running", command="sft", objective="sft")
    return folder


def session(folder: RunFolder, manner: str, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1) -> OfflineSession:
    monkeypatch.setenv("AREAL_FAKE", manner)
    config = OfflineConfig.model_validate(
        {
            "model": {"init": {"model_type": "qwen3"}},
            "data": {"train": "f"},
            "metrics": {"report": False, "display": "plain"},
            "trainer": {"ranks": ranks},
        }
    )
    return OfflineSession(config, folder, "sft")


def test_a_finished_run_leaves_its_summary(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asyncio.run(session(folder, "finishes", monkeypatch).run()) == 0
    assert folder.read_state()["status"] == "finished"
    summary = json.loads(folder.summary.read_text())
    assert (summary["status"], summary["steps"], summary["train_rows"]) == ("finished", 2, 4)
    status = json.loads(folder.status.read_text())
    assert (status["status"], status["step"], status["num_steps"]) == ("finished", 2, 2)
    assert f"run r: {folder.root}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("manner", "kind", "words"),
    [
        ("refuses", UserError, "f:1: has no `prompt` -> remove the row"),
        ("diverges", OperationError, "the policy has diverged at version 1"),
        ("dies", ProcessDied, "process trainer ended with status -9"),
    ],
)
def test_each_bad_end_of_the_process_is_reported_and_recorded(
    folder: RunFolder, manner: str, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=words):
        asyncio.run(session(folder, manner, monkeypatch).run())
    state = folder.read_state()
    assert state["status"] == "failed"
    assert words in state["reason"]
    assert json.loads(folder.status.read_text())["status"] == "failed"


@pytest.mark.parametrize("manner", ["notices", "hangs"])
def test_a_lost_rank_ends_the_run_and_is_named(folder: RunFolder, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_session, "LOST_GRACE_S", 0.5)
    with pytest.raises(ProcessDied, match=r"^process trainer-1 ended with status -9$"):
        asyncio.run(session(folder, manner, monkeypatch, ranks=2).run())
    assert folder.read_state()["status"] == "failed"
    specs = [json.loads((folder.processes / f"{name}.json").read_text()) for name in ("trainer", "trainer-1")]
    assert [(one["rank"], one["num_ranks"]) for one in specs] == [(0, 2), (1, 2)]
    assert specs[0]["ranks_address"] == specs[1]["ranks_address"] != ""


@pytest.mark.parametrize(("manner", "num_signals"), [("stops", 1), ("imports", 1), ("stays", 2)])
def test_one_signal_ends_it_after_its_step_and_a_second_one_at_once(
    folder: RunFolder, manner: str, num_signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted() -> int:
        running = asyncio.create_task(session(folder, manner, monkeypatch).run())
        await until(lambda: folder.metrics.is_file() and b'"step"' in folder.metrics.read_bytes())
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.3)
        return await running

    assert asyncio.run(interrupted()) == 0
    assert folder.read_state()["status"] == "stopped"
    assert json.loads(folder.summary.read_text())["steps"] == 1


def test_a_signal_before_there_is_a_process_ends_it_when_it_has_started(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(folder, "stops", monkeypatch)
    start = one._launcher.start

    async def signalled_start(*arguments: Any) -> int | None:
        one._on_signal("SIGTERM")
        return await start(*arguments)

    monkeypatch.setattr(one._launcher, "start", signalled_start)
    assert asyncio.run(one.run()) == 0
    assert folder.read_state()["status"] == "stopped"


def test_a_sink_that_cannot_be_opened_is_recorded(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UserError("tensorboard is not installed", where="metrics.tensorboard")

    monkeypatch.setattr(offline_session, "open_sinks", refuse)
    with pytest.raises(UserError, match="tensorboard is not installed"):
        asyncio.run(session(folder, "finishes", monkeypatch).run())
    assert folder.read_state()["status"] == "failed"


def test_rows_of_an_earlier_session_are_not_shown_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.metrics.write_text('{"kind": "step", "step": 9, "epoch": 9.0, "tokens": 1}\nhalf a li')
    assert asyncio.run(session(folder, "finishes", monkeypatch).run()) == 0
    assert json.loads(folder.summary.read_text())["steps"] == 2
