"""Whether a run goes on is judged right, whatever its folder says."""

from __future__ import annotations

import json
import os
import time

import psutil
import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.run_folder.owner_host import refuse_if_elsewhere, status_exit, whereabouts


@pytest.mark.processes
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_kind_is_distinguished(tmp_path, kind):
    found = whereabouts(zoo.make_run(tmp_path, kind))
    assert found.kind == kind
    assert kind in found.words or kind == "foreign"
    assert "\n" not in found.words


def test_reason_of_an_end_is_in_the_words(tmp_path):
    assert whereabouts(zoo.make_run(tmp_path, "failed")).words == "failed just now: trainer: disk full"


def test_reused_process_id_is_no_sign_of_life(tmp_path):
    folder = zoo.make_run(tmp_path, "running", controller_started_s=psutil.Process().create_time() - 100)
    assert whereabouts(folder).kind == "crashed"


def test_restart_of_the_machine_is_a_crash_although_the_process_id_lives(tmp_path):
    folder = zoo.make_run(tmp_path, "running", boot_id="before")
    zoo.write_status(folder, age_s=500)
    zoo.edit_state(folder, updated_s=time.time() - 500)
    found = whereabouts(folder)
    assert found.kind == "crashed"
    assert "restarted" in found.words
    assert "8 min 20 s ago" in found.words


def test_machine_of_the_same_name_that_writes_now_is_another_one(tmp_path):
    assert whereabouts(zoo.make_run(tmp_path, "running", boot_id="other")).kind == "foreign"


def test_foreign_host_is_named_with_the_age_of_its_word(tmp_path):
    folder = zoo.make_run(tmp_path, "foreign")
    zoo.write_status(folder, age_s=3600)
    zoo.edit_state(folder, updated_s=time.time() - 7200)
    assert "far-away" in whereabouts(folder).words
    assert "1 h ago" in whereabouts(folder).words


@pytest.mark.processes
def test_run_of_an_older_version_without_host_is_judged_by_its_process(tmp_path):
    assert whereabouts(zoo.make_run(tmp_path, "running", host=None, boot_id=None)).kind == "running"
    assert whereabouts(zoo.make_run(tmp_path, "crashed", host=None, boot_id=None)).kind == "crashed"


@pytest.mark.parametrize("state", [{"controller_pid": "x"}, {"controller_pid": -1}, {"controller_started_s": "noon"}])
def test_state_with_nonsense_about_the_process_is_a_crash(tmp_path, state):
    assert whereabouts(zoo.make_run(tmp_path, "running", **state)).kind == "crashed"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"status": "running"}'])
def test_damaged_state_is_one_sentence(tmp_path, text):
    folder = zoo.make_run(tmp_path)
    folder.state.write_text(text)
    with pytest.raises(UserError, match="damaged"):
        whereabouts(folder)


def test_newer_state_is_one_sentence(tmp_path):
    folder = zoo.make_run(tmp_path, format=99)
    with pytest.raises(UserError, match="newer version"):
        whereabouts(folder)


def test_exit_status_stands_for_the_run():
    found = {kind: status_exit(kind) for kind in zoo.KINDS}
    assert found == {"running": 0, "finished": 0, "stopped": 0, "failed": 1, "crashed": 1, "foreign": 3}


@pytest.mark.processes
def test_run_that_another_machine_writes_to_now_is_not_resumed_here(tmp_path):
    folder = zoo.make_run(tmp_path, "foreign")
    with pytest.raises(UserError, match="far-away"):
        refuse_if_elsewhere(folder)
    zoo.write_status(folder, age_s=900)
    zoo.edit_state(folder, updated_s=time.time() - 900)
    refuse_if_elsewhere(folder)
    refuse_if_elsewhere(zoo.make_run(tmp_path, "crashed"))


@pytest.mark.processes
def test_looking_changes_nothing(tmp_path):
    folder = zoo.make_run(tmp_path, "crashed")
    before = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")}
    whereabouts(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*")} == before
    assert json.loads(folder.state.read_text())["controller_pid"] != os.getpid()
