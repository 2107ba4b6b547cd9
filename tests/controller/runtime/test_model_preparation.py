"""Claims about preparing the starting model: the cache, and what is made of the process's end."""

from __future__ import annotations

import asyncio
import os
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from small_run import bounded, until

from areal_like.errors import DeadlineExceeded, ProcessDied, UserError
from controller.config.loading import load_config
from controller.launch.local import LocalLauncher
from controller.run_folder.run_folder import RunFolder
from controller.runtime import model_preparation
from controller.runtime.model_preparation import prepare
from controller.telemetry.display import Display

pytestmark = pytest.mark.processes

MAKE = """
import json, pathlib, sys
spec = json.loads(pathlib.Path(sys.argv[-1]).read_text())
rows = pathlib.Path(spec["sft_rows"]).read_text().splitlines()
status = pathlib.Path(spec["status_path"])
status.open("a").write(json.dumps({"step": len(rows), "num_steps": 3, "loss": 1.23456, "seconds": 0.5}) + "\\n")
folder = pathlib.Path(spec["out_dir"])
folder.mkdir(parents=True)
(folder / "config.json").write_text("{}")
"""


class Pretender(LocalLauncher):
    """Runs other code in place of `python -m trainer.prepare`."""

    def __init__(self, log_dir: Path, code: str) -> None:
        super().__init__(log_dir)
        self.code, self.num_starts = code, 0

    async def start(self, name, argv, environment):
        assert list(argv[:2]) == ["-m", "trainer.prepare"]
        self.num_starts += 1
        return await super().start(name, ["-c", self.code, *argv[2:]], environment)


class Scene:
    """A run folder, and what was shown."""

    def __init__(self, runs_dir: Path, *overrides: str) -> None:
        loaded = load_config("quickstart", [f"runs_dir={runs_dir}", "warm_start.data.limit=3", *overrides])
        self.config, self.shown = loaded.config, StringIO()
        self.folder = RunFolder.create(runs_dir, "job")
        self.display = Display("plain", Console(file=self.shown, width=200))

    async def prepare(self, launcher: LocalLauncher, **more: Any) -> model_preparation.Prepared:
        return await prepare(self.config, self.folder, launcher, self.display, **more)

    def launcher(self, code: str = MAKE) -> Pretender:
        return Pretender(self.folder.logs, code)


def test_equal_settings_are_prepared_once_and_others_again(tmp_path):
    async def test():
        first, second, other = Scene(tmp_path), Scene(tmp_path), Scene(tmp_path, "seed=2")
        made = await first.prepare(first.launcher())
        assert not made.was_cached
        assert made.model_dir.parent == tmp_path / ".prepared"
        idle = second.launcher()
        found = await second.prepare(idle)
        assert (found.model_dir, found.was_cached, idle.num_starts) == (made.model_dir, True, 0)
        assert (await other.prepare(other.launcher())).model_dir != made.model_dir

    bounded(test())


def test_another_users_prepared_models_are_left_alone(tmp_path, monkeypatch):
    assert model_preparation._cache_root(tmp_path) == tmp_path / ".prepared"
    (tmp_path / ".prepared").mkdir()
    assert model_preparation._cache_root(tmp_path) == tmp_path / ".prepared"
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert model_preparation._cache_root(tmp_path) == tmp_path / f".prepared-{other}"


def test_two_runs_that_want_the_same_model_at_once_make_it_once(tmp_path):
    async def test():
        first, second = Scene(tmp_path), Scene(tmp_path)
        slow = first.launcher("import time; time.sleep(0.5)" + MAKE)
        idle = second.launcher()
        made, found = await asyncio.gather(first.prepare(slow), second.prepare(idle))
        assert made.model_dir == found.model_dir
        assert (slow.num_starts, idle.num_starts) == (1, 0)
        assert "another run is preparing the same starting model" in second.shown.getvalue()

    bounded(test())


def test_run_whose_predecessor_failed_to_prepare_takes_its_turn(tmp_path):
    async def test():
        first, second = Scene(tmp_path), Scene(tmp_path)
        failing, able = first.launcher("import time, sys; time.sleep(0.5); sys.exit(1)"), second.launcher()
        died, made = await asyncio.gather(first.prepare(failing), second.prepare(able), return_exceptions=True)
        assert isinstance(died, ProcessDied)
        assert isinstance(made, model_preparation.Prepared)
        assert not made.was_cached

    bounded(test())


def test_progress_is_shown_and_demonstrations_do_not_stay_behind(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        (scene.folder.logs / "prepare.status.jsonl").write_text(
            '{"step": 99, "num_steps": 99, "loss": 9.0, "seconds": 1}\n'
        )
        await scene.prepare(scene.launcher())
        assert "warm start 3/3  loss 1.2346" in scene.shown.getvalue()
        assert "99/99" not in scene.shown.getvalue(), "that was an earlier stretch of the run"
        assert not (scene.folder.processes / "demonstrations.jsonl").exists()

    bounded(test())


def test_time_left_of_downloads_and_steps_follows_their_pace():
    download = model_preparation._progress({"num_bytes": 10**9, "total_bytes": 4 * 10**9, "seconds": 5.0})
    assert download.line() == "download 1.0 GB of 4.0 GB  15 s left"
    steps = model_preparation._progress({"step": 50, "num_steps": 300, "loss": None, "seconds": 4.0})
    assert steps.line() == "warm start 50/300  loss -  20 s left"
    first = model_preparation._progress({"step": 1, "num_steps": 300, "loss": None, "seconds": 70.0})
    assert first.line() == "warm start 1/300  loss -"
    unknown = model_preparation._progress({"num_bytes": 10**9, "total_bytes": None, "seconds": 5.0})
    assert unknown.line() == "download 1.0 GB"


def test_plain_model_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "model").mkdir()

    async def test():
        scene = Scene(tmp_path, f"model.path={tmp_path / 'model'}", "model.tokenizer=from_model", "warm_start=null")
        launcher = scene.launcher()
        prepared = await scene.prepare(launcher)
        assert (prepared.model_dir, launcher.num_starts) == (tmp_path / "model", 0)

    bounded(test())


def test_home_folder_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()

    async def test():
        scene = Scene(tmp_path, "model.path=~/model", "model.tokenizer=from_model", "warm_start=null")
        assert (await scene.prepare(scene.launcher())).model_dir == tmp_path / "model"

    bounded(test())


def test_users_mistake_is_reported_in_the_words_of_the_process(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        code = "import sys; print('error: model.init: no such key `hidden`'); sys.exit(2)"
        with pytest.raises(UserError, match="no such key `hidden`"):
            await scene.prepare(scene.launcher(code))

    bounded(test())


def test_crash_brings_the_end_of_the_log(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        with pytest.raises(ProcessDied) as caught:
            await scene.prepare(scene.launcher("raise RuntimeError('out of memory')"))
        assert "out of memory" in caught.value.tail

    bounded(test())


def test_model_that_another_run_completed_meanwhile_is_used(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        code = MAKE + "\nprint('error: already exists')\nsys.exit(2)"
        prepared = await scene.prepare(scene.launcher(code))
        assert (prepared.model_dir / "config.json").is_file()
        with pytest.raises(UserError, match="already exists"):  # a folder that was named must be its own
            await scene.prepare(scene.launcher(code), out_dir=tmp_path / "mine")

    bounded(test())


def test_preparation_that_does_nothing_any_more_ends_with_words(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        launch = scene.config.launch.model_copy(update={"stall_after_s": 0.5})  # validate refuses so short a limit
        scene.config = scene.config.model_copy(update={"launch": launch})
        launcher = scene.launcher("import time; time.sleep(60)")
        with pytest.raises(DeadlineExceeded, match="process `prepare`"):
            await scene.prepare(launcher)
        await launcher.stop_all(1.0)

    bounded(test())


def test_stop_during_preparation_leaves_no_process_and_no_demonstrations(tmp_path):
    async def test():
        scene = Scene(tmp_path)
        launcher = scene.launcher("import time; time.sleep(60)")
        task = asyncio.create_task(scene.prepare(launcher))
        await until(lambda: launcher.is_running("prepare"))
        pid = launcher.pid_of("prepare")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await launcher.stop_all(1.0)
        assert pid is not None
        assert not psutil.pid_exists(pid)
        assert not (scene.folder.processes / "demonstrations.jsonl").exists()

    bounded(test())
