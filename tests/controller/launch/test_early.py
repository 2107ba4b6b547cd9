"""Claims about a fork server that is started before the run is known: it is used once, or ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import bounded, until

from controller.cli import main as command_line
from controller.launch import early
from controller.launch.environments import child_environment
from controller.launch.launcher import tail_of
from controller.launch.local import LocalLauncher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux only")

MODULE = "import os\nPID = os.getpid()\nprint('was imported')\n"
CHILD = "import preloaded\nprint(preloaded.PID)\n"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> early.EarlyServer:
    """A server that imports a module of a few lines."""
    (tmp_path / "preloaded.py").write_text(MODULE)
    (tmp_path / "early_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(early.SHARED, raising=False)
    monkeypatch.setattr(early, "PRELOAD", ("preloaded",))
    monkeypatch.setattr(early, "_may_help", lambda: True)
    early.start()
    assert early._started is not None
    return early._started


@pytest.mark.processes
def test_the_launcher_takes_it_over_with_what_it_has_printed(tmp_path: Path, started: early.EarlyServer) -> None:
    async def test() -> None:
        launcher = LocalLauncher(tmp_path, preload=("preloaded",), forked=("early_child",))
        await launcher.open(lambda *words: None)
        assert early._started is None
        await launcher.start("child", ["-m", "early_child"], child_environment(1, user_path=tmp_path))
        await until(lambda: not launcher.is_running("child"))
        assert int(tail_of(launcher.log_of("child"))) == started.pid
        await launcher.close()
        assert started._process.returncode == -9
        assert launcher.log_of("forkserver").read_text() == "was imported\n"

    bounded(test())


@pytest.mark.processes
def test_it_is_ended_where_nobody_takes_it(started: early.EarlyServer) -> None:
    early.start()
    assert early._started is started, "there is one"
    assert early.take(("something", "else")) is None
    early.discard()
    assert started._process.returncode == -9
    assert early._started is None
    early.discard()


def test_one_that_cannot_be_started_leaves_the_run_to_start_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object, **more: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(early, "_may_help", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", full)
    early.start()
    assert early.take(early.PRELOAD) is None


def test_it_helps_on_a_machine_with_several_cores_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(early.SHARED, raising=False)
    monkeypatch.setattr(early, "GPUS", (tmp_path / "gpu",))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert early._may_help()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert not early._may_help()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "gpu").touch()
    assert not early._may_help()
    (tmp_path / "gpu").unlink()
    monkeypatch.setenv(early.SHARED, "/a/server/of/others")
    assert not early._may_help()


@pytest.mark.parametrize(("command", "is_started"), [("train", True), ("validate", False)])
def test_a_run_that_is_refused_ends_it(
    command: str, is_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[str] = []
    monkeypatch.setattr(early, "start", lambda: called.append("start"))
    monkeypatch.setattr(early, "discard", lambda: called.append("discard"))
    assert command_line.main([command, str(tmp_path / "nothing.yaml")]) == 2
    assert called == (["start", "discard"] if is_started else [])
    assert "error: " in capsys.readouterr().err
