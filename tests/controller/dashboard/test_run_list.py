"""Claims about the rows of the list of runs."""

from __future__ import annotations

import json
import os
import time

import pytest
from report_run import HOSTILE, report_run, write_state

from areal_like.errors import UserError
from areal_like.process import boot_id
from controller.dashboard.run_list import RunList, find_run, is_run
from controller.run_folder.run_folder import RunFolder


def quick_run(runs, name, **more):
    return report_run(runs, name, num_steps=3, has_pulses=False, has_traces=False, has_ledger=False, **more)


def by_name(found) -> dict:
    return {row["name"]: row for row in found["runs"]}


def test_a_running_run_shows_its_step_reward_accuracy_and_time(tmp_path):
    folder = RunFolder.create(tmp_path, "mine")
    folder.write_state("running")
    folder.status.write_text(
        json.dumps({"format": 1, "time_s": 5000.0, "step": 4, "num_steps": 9, "eta_s": 60.0,
                    "accuracy": {"0": 0.25, "4": 0.5}, "last_step": {"step": 4, "reward_mean": 0.75}})
    )  # fmt: skip
    runs = RunList(tmp_path)
    (row,) = runs.refresh()["runs"]
    expected = {"kind": "running", "step": 4, "num_steps": 9, "accuracy": 0.5, "reward": 0.75, "eta_s": 60.0}
    assert {key: row[key] for key in expected} == expected
    assert row["updated_s"] == 5000.0
    assert runs.refresh() == {}


def test_only_what_changed_is_sent_and_what_is_gone_is_named(tmp_path):
    runs = RunList(tmp_path)
    assert runs.refresh() == {}
    for name in ("one", "two"):
        quick_run(tmp_path, name)
    assert set(by_name(runs.refresh())) == {"one", "two"}
    write_state(RunFolder(tmp_path / "two"), "failed", reason="the disk is full")
    changed = by_name(runs.refresh())
    assert set(changed) == {"two"}
    assert changed["two"]["words"] == "the disk is full"
    for path in sorted((tmp_path / "one").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert runs.refresh() == {"runs": [], "gone": ["one"]}
    assert set(by_name(runs.snapshot())) == {"two"}


def test_a_run_whose_controller_was_killed_becomes_crashed_without_a_change_of_files(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path, "mine")
    folder.write_state("running")
    runs = RunList(tmp_path)
    assert runs.refresh()["runs"][0]["kind"] == "running"
    monkeypatch.setattr("controller.run_folder.owner_host.is_same_process", lambda pid, started_s: False)
    (row,) = runs.refresh()["runs"]
    assert row["kind"] == "crashed"
    assert "resume" in row["words"]


def test_a_run_of_another_machine_is_named_as_such(tmp_path):
    folder = RunFolder.create(tmp_path, "away")
    write_state(folder, "running", host="node<7>", boot_id=boot_id(), updated_s=time.time())
    (row,) = RunList(tmp_path).refresh()["runs"]
    assert (row["kind"], row["words"]) == ("foreign", "recorded as running on node<7>")


@pytest.mark.parametrize("state", ["{", "[]", "", '{"format": 99}', "{}"])
def test_a_damaged_run_is_a_row_that_says_so_and_hides_no_other(tmp_path, state):
    quick_run(tmp_path, "whole")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "state.json").write_text(state)
    rows = by_name(RunList(tmp_path).refresh())
    assert rows["broken"]["kind"] == "damaged"
    assert rows["broken"]["words"]
    assert rows["whole"]["kind"] == "finished"


def test_what_is_no_run_is_not_listed(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "file").write_text("")
    assert RunList(tmp_path).refresh() == {}
    assert not is_run(tmp_path / "absent")


def test_a_folder_whose_name_is_not_utf8_is_not_listed(tmp_path):
    quick_run(tmp_path, "run")
    named = RunFolder.create(tmp_path, "other").root
    try:
        os.rename(named, os.fsencode(tmp_path) + b"/r\xff")
    except OSError:
        pytest.skip("the file system has only names in UTF-8")
    assert set(by_name(RunList(tmp_path).refresh())) == {"run"}


def test_text_of_a_run_is_printable(tmp_path):
    quick_run(tmp_path, "mine")
    write_state(RunFolder(tmp_path / "mine"), "failed", reason=HOSTILE)
    (row,) = RunList(tmp_path).refresh()["runs"]
    assert row["words"].isprintable()


def test_a_folder_that_is_gone_is_a_problem_in_words(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        RunList(tmp_path / "absent").refresh()


@pytest.mark.parametrize("name", ["absent", "", ".", "..", "../mine", "a/b", "x\0y"])
def test_only_names_of_runs_in_the_folder_are_found(tmp_path, name):
    runs = tmp_path / "runs"
    quick_run(runs, "inside")
    quick_run(tmp_path, "mine")
    os.makedirs(runs / "a" / "b")
    (runs / "a" / "b" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="there is no run"):
        find_run(runs, name)
    assert find_run(runs, "inside").name == "inside"
