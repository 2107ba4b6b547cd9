"""Claims about actions: the command of the same name, one at a time, its words back."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.dashboard.actions import ACTIONS, COMMAND, Actions, Busy, refusals, words_of
from controller.run_folder.owner_host import whereabouts
from controller.run_folder.run_folder import RunFolder
from controller.runs.stop import stop

FOLDER = RunFolder(Path("/runs/mine"))


def scripted(code: str) -> Actions:
    """Runs this Python instead of `areal-like`."""
    return Actions(command=(sys.executable, "-c", code))


def test_each_action_is_the_command_of_its_name_on_the_whole_path():
    assert [words_of(FOLDER, action, "rollout-1") for action in ACTIONS] == [
        ["checkpoint", "/runs/mine"], ["stop", "/runs/mine"], ["drain", "/runs/mine", "rollout-1"],
        ["add", "/runs/mine"],
    ]  # fmt: skip
    assert COMMAND[-2:] == ("-m", "controller")


@pytest.mark.parametrize("action", ["resume", "train", "", "--help", "stop --now"])
def test_no_other_command_can_be_reached(action):
    with pytest.raises(UserError, match="there is no action"):
        words_of(FOLDER, action, "")


@pytest.mark.parametrize("worker", ["", "trainer", "--timeout", "rollout-", "rollout-1 x", "rollout-1\n"])
def test_a_worker_is_a_rollout_worker_and_no_option(worker):
    with pytest.raises(UserError, match="the request does not name a rollout worker"):
        words_of(FOLDER, "drain", worker)


def test_a_run_of_another_machine_can_be_asked_for_everything_but_its_end(tmp_path, capsys):
    folder = zoo.make_run(tmp_path, "foreign")
    refused = refusals(whereabouts(folder))
    assert refused == {"stop": "the run can only be stopped on far-away; log in there and use areal-like stop"}
    assert stop(folder) == 3
    assert "it can only be stopped on that machine" in capsys.readouterr().err


def test_a_run_from_files_can_only_be_stopped(tmp_path):
    where = whereabouts(zoo.make_run(tmp_path, "running", objective="sft"))
    assert set(refusals(where)) == {"checkpoint", "drain", "add"}
    assert refusals(whereabouts(zoo.make_run(tmp_path, "running", "other"))) == {}


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed", None])
def test_a_run_that_is_not_in_progress_can_be_asked_for_nothing(tmp_path, kind):
    where = whereabouts(zoo.make_run(tmp_path, kind)) if kind else None
    assert refusals(where) == dict.fromkeys(ACTIONS, "the run is not in progress")


@pytest.mark.processes
def test_output_and_exit_status_come_back():
    async def scene():
        code = "import sys; print('asked', *sys.argv[1:]); print('<b>\\x1b[31m', file=sys.stderr)"
        done = await scripted(code).perform(FOLDER, "stop")
        assert done["is_done"]
        assert done["lines"][0] == "asked stop /runs/mine"
        assert "\x1b" not in done["lines"][1]
        failed = await scripted("raise SystemExit('refused')").perform(FOLDER, "add")
        assert failed == {"is_done": False, "lines": ["refused"]}

    asyncio.run(scene())


@pytest.mark.processes
def test_a_run_has_one_action_at_a_time_and_another_run_its_own(tmp_path):
    async def scene():
        go = tmp_path / "go"
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('done')"
        actions = scripted(code)
        first = asyncio.create_task(actions.perform(FOLDER, "stop"))
        other = asyncio.create_task(actions.perform(RunFolder(Path("/runs/other")), "stop"))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="still in progress"):
            await actions.perform(FOLDER, "checkpoint")
        go.touch()
        assert (await first)["lines"] == (await other)["lines"] == ["done"]
        assert (await actions.perform(FOLDER, "checkpoint"))["is_done"]

    asyncio.run(scene())


@pytest.mark.processes
def test_a_browser_that_goes_away_does_not_end_the_command_and_the_server_does(tmp_path):
    async def scene():
        started = tmp_path / "started"
        actions = scripted(f"import time; open({str(started)!r}, 'w').close(); time.sleep(600)")
        asked = asyncio.create_task(actions.perform(FOLDER, "stop"))
        while not started.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(actions._running) == 1
        await actions.close()
        assert not actions._running

    asyncio.run(scene())
