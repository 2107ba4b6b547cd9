"""The command in a child process: its mistakes and failures are exceptions with the words that it printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_like.errors import RunFailed, UserError
from controller.python_api import controller_process
from controller.python_api.controller_process import ControllerProcess

pytestmark = pytest.mark.processes


@pytest.fixture
def command(monkeypatch):
    """Replaces the command by a program."""

    def use(program: str) -> None:
        monkeypatch.setattr(controller_process, "guarded", lambda words: [sys.executable, "-c", program, *words[4:]])

    return use


def test_mistake_is_a_user_error_with_the_lines_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "quickstart", "num_stepps=3", "group_size=-1"]
    said = subprocess.run([sys.executable, "-m", "controller", *words], capture_output=True, text=True).stderr
    with pytest.raises(UserError) as error:
        controller_process.start(words)
    assert said.count("error: ") >= 2
    assert str(error.value) == "\n".join(line.removeprefix("error: ") for line in said.splitlines())


def test_scratch_file_of_a_config_is_called_config_in_messages(command, tmp_path):
    command("import sys; print(f'error: {sys.argv[2]}:3: no such key', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UserError, match=r"^config:3: no such key$"):
        controller_process.start(["train", controller_process.CONFIG], config_text="name: mine")


def test_failure_is_raised_with_its_message_and_a_crash_with_its_last_line(command):
    command("import sys; print('error: disk full'); sys.exit(1)")
    with pytest.raises(RunFailed, match=r"^disk full$"):
        controller_process.start(["train", "mine"])
    command("raise ZeroDivisionError('by zero')")
    with pytest.raises(RunFailed, match="status 1: ZeroDivisionError: by zero"):
        controller_process.start(["train", "mine"])
    command("")
    with pytest.raises(RunFailed, match="before it created the run's folder"):
        controller_process.start(["train", "mine"])


def test_folder_is_the_announced_one(command, tmp_path):
    command(
        "import os, pathlib, sys\n"
        "target = pathlib.Path(os.environ['AREAL_LIKE_FOLDER_FILE'])\n"
        f"target.with_suffix('.tmp').write_text({str(tmp_path / 'runs' / 'first')!r})\n"
        "target.with_suffix('.tmp').replace(target)\n"
        "print('ready')\n"
        "sys.exit(1)"
    )
    process = controller_process.start(["train", "mine"])
    assert process.folder.name == "first"
    assert process.wait()
    assert process.output == "ready\n"
    with pytest.raises(RunFailed, match="status 1: ready") as error:
        process.check()
    assert error.value.run == "first"


def test_child_that_is_killed_is_gone(command):
    command("import time; time.sleep(600)")
    process = ControllerProcess(["train", "mine"], None)
    assert process.is_alive
    process.check()
    process.kill()
    assert not process.is_alive


@pytest.mark.parametrize("status", [0, 130])
def test_command_that_succeeded_or_was_interrupted_has_no_complaint(command, status):
    command(f"import sys; print('error: not one'); sys.exit({status})")
    process = ControllerProcess(["train", "mine"], None)
    assert process.wait(300.0)
    process.check()
