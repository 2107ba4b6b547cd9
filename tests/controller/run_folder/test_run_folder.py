"""Claims about run folders."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from areal_like.errors import UserError
from areal_like.process import boot_id, private_files
from controller.run_folder.run_folder import RunFolder


def test_taken_name_gets_the_next_number(tmp_path):
    names = [RunFolder.create(tmp_path / "runs", "job").name for _ in range(3)]
    assert names == ["job", "job-2", "job-3"]


@pytest.mark.parametrize("name", ["", ".", "..", ".prepared", "a/b", "a\0b", "a\nb", " a", "a ", "\ud800"])
def test_name_that_is_no_folder_is_refused_in_words(tmp_path, name):
    with pytest.raises(UserError, match="is not a valid folder name"):
        RunFolder.create(tmp_path, name)


@pytest.mark.parametrize("name", ["größe", "[bold]x", "a b", "100%", "日本", "'q'"])
def test_odd_name_is_taken_as_it_is(tmp_path, name):
    assert RunFolder.create(tmp_path, name).root == (tmp_path / name).resolve()


def test_folder_that_cannot_be_made_is_a_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the run's folder cannot be created"):
        RunFolder.create(tmp_path / "file", "job")


@pytest.mark.parametrize("name", ["-rf", "--help", "x" * 300])
def test_name_that_a_command_takes_for_an_option_or_that_is_too_long_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="is not a valid folder name"):
        RunFolder.create(tmp_path, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("odd", [[], {}, 7, True])
def test_value_of_another_kind_in_the_status_file_is_left_out(tmp_path, odd):
    folder = RunFolder.create(tmp_path, "job")
    folder.write_state("running", data={"data.train": "abc"})
    folder.state.write_text(json.dumps({**json.loads(folder.state.read_text()), "status": odd, "host": odd}))
    assert folder.read_state()["data"] == {"data.train": "abc"}
    assert not {"status", "host"} & set(folder.read_state())


def test_run_is_found_by_name_and_by_path_and_a_typo_names_the_nearest(tmp_path):
    folder = RunFolder.create(tmp_path, "quickstart")
    folder.write_state("stopped")
    assert RunFolder.find("quickstart", tmp_path).root == folder.root
    assert RunFolder.find(str(folder.root)).root == folder.root
    with pytest.raises(UserError, match="known runs: quickstart"):
        RunFolder.find("quikstart", tmp_path)
    with pytest.raises(UserError, match="start a run first"):
        RunFolder.find("x", tmp_path / "empty")


def test_state_keeps_what_is_not_given_again_and_its_run_id(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.write_state("running", command="train", data={"data.train": "abc"})
    first = folder.read_state()
    folder.write_state("failed", reason="disk full")
    second = folder.read_state()
    assert second["run_id"] == first["run_id"]
    assert (second["command"], second["data"], second["reason"]) == ("train", {"data.train": "abc"}, "disk full")
    folder.write_state("running")
    assert folder.read_state()["reason"] == "", "the reason of an earlier end is none of this stretch's"


def test_state_says_on_which_machine_since_which_boot_and_when_it_ended(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.write_state("running")
    state = folder.read_state()
    assert state["host"] == socket.gethostname()
    assert state["boot_id"] == boot_id()
    assert "ended_s" not in state
    folder.write_state("stopped")
    state = folder.read_state()
    assert state["ended_s"] == state["updated_s"]
    folder.write_state("running")
    assert "ended_s" not in folder.read_state(), "a resumed run has not ended"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', '{"status": "running"}'])
def test_damaged_state_is_refused_in_words(tmp_path, text):
    folder = RunFolder.create(tmp_path, "job")
    folder.state.write_text(text)
    with pytest.raises(UserError, match="damaged"):
        folder.read_state()
    with pytest.raises(UserError, match="damaged"):
        folder.write_state("running")


def test_folder_of_a_newer_version_is_refused(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.state.write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="newer version"):
        folder.read_state()


def test_run_whose_controller_lives_is_not_resumed(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.write_state("running")
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        folder.refuse_if_running()
    folder.write_state("stopped")
    folder.refuse_if_running()


@pytest.mark.processes
def test_run_whose_controller_was_killed_is_resumed_although_its_state_says_running(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.write_state("running")
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    for facts in ({"controller_pid": dead.pid}, {"controller_started_s": 1.0}, {"controller_pid": "?"}):
        folder.write_state("running", **facts)
        folder.refuse_if_running()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o002, 0o775), (0o077, 0o700)])
def test_folder_of_runs_follows_the_users_umask_and_each_run_is_private(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with private_files():
            folder = RunFolder.create(tmp_path / "shared" / "runs", "job")
            (folder.root / "later").mkdir()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.root.parent, folder.root, folder.root / "later")]
    assert modes == [mode, 0o700, 0o700]
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == mode


def test_folder_of_an_earlier_version_is_made_private_once(tmp_path):
    folder = RunFolder.create(tmp_path, "job")
    folder.root.chmod(0o755)
    assert folder.make_private() == 0o755
    assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    assert folder.make_private() is None
