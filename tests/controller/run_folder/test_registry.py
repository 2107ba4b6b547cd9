"""Runs are found again wherever their folders lie, and what is gone is forgotten."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.run_folder import registry
from controller.run_folder.locate import find_run


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "areal_like" / "runs"


def roots() -> list[Path]:
    return [entry.root for entry in registry.known()]


class TestRegistry:
    def test_runs_of_every_folder_are_known_newest_first(self, tmp_path):
        first, second = zoo.make_run(tmp_path / "a"), zoo.make_run(tmp_path / "b")
        assert registry.enlist(first)
        assert registry.enlist(second)
        assert registry.enlist(first), "resumed"
        assert roots() == [first.root, second.root]

    def test_run_whose_folder_is_gone_is_forgotten(self, tmp_path, state_home):
        folder = zoo.make_run(tmp_path)
        registry.enlist(folder)
        shutil.rmtree(folder.root)
        assert roots() == []
        assert list(state_home.iterdir()) == []

    def test_run_of_another_machine_is_remembered_for_a_month(self, tmp_path, state_home):
        registry.enlist(zoo.make_run(tmp_path))
        (file,) = state_home.iterdir()
        file.write_text(json.dumps({"root": "/not/here", "host": "far-away", "registered_s": 1000.0}))
        (entry,) = registry.known(now_s=1000.0 + 86400)
        assert not entry.is_here
        assert registry.known(now_s=1000.0 + 31 * 86400) == []
        assert not file.exists()

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"root": 3}', '{"root": "relative"}'])
    def test_damaged_entry_is_deleted(self, state_home, text):
        state_home.mkdir(parents=True)
        (state_home / "x.json").write_text(text)
        assert roots() == []
        assert list(state_home.iterdir()) == []

    def test_registry_is_bounded(self, tmp_path, state_home, monkeypatch):
        monkeypatch.setattr(registry, "MAX_ENTRIES", 3)
        folders = [zoo.make_run(tmp_path, name=f"n{number}") for number in range(5)]
        for number, folder in enumerate(folders):
            registry.enlist(folder)
            for file in state_home.glob("*.json"):
                os.utime(file, (number, number)) if file.stat().st_mtime > 1000 else None
        assert {root.name for root in roots()} == {"n2", "n3", "n4"}

    def test_place_that_cannot_be_written_costs_a_run_nothing(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        assert not registry.enlist(zoo.make_run(tmp_path))
        assert roots() == []

    def test_relative_place_is_ignored_as_the_specification_says(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", "here")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert registry.registry_dir() == tmp_path / "home" / ".local" / "state" / "areal_like" / "runs"

    @pytest.mark.processes
    def test_run_is_found_by_what_its_processes_were_started_with(self, tmp_path):
        folder = zoo.make_run(tmp_path, "running")
        spec = folder.processes / "rollout-0.json"
        code = "import sys; sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-S", "-c", code, "--spec", str(spec)], stdin=subprocess.PIPE)
        try:
            assert folder.root in registry.seen_in_processes()
        finally:
            child.communicate(b"")
        assert folder.root not in registry.seen_in_processes()


class TestFinding:
    def test_by_path_by_name_and_by_name_from_anywhere(self, tmp_path):
        here, far = zoo.make_run(tmp_path / "runs", name="job"), zoo.make_run(tmp_path / "far" / "off", name="deep")
        registry.enlist(far)
        assert find_run("job").root == here.root
        assert find_run(str(here.root)).root == here.root
        assert find_run("runs/job/").root == here.root
        assert find_run("deep").root == far.root

    def test_inside_its_folder_a_dot_will_do(self, tmp_path, monkeypatch):
        folder = zoo.make_run(tmp_path)
        monkeypatch.chdir(folder.root)
        assert find_run(".").root == folder.root

    def test_name_of_two_runs_is_refused_with_their_folders(self, tmp_path):
        for place in ("a", "b"):
            registry.enlist(zoo.make_run(tmp_path / place, name="twin"))
        with pytest.raises(UserError, match="2 runs have this name") as refused:
            find_run("twin")
        assert str(tmp_path / "a" / "twin") in str(refused.value)

    def test_typo_names_the_nearest(self, tmp_path):
        zoo.make_run(tmp_path / "runs", name="quickstart")
        registry.enlist(zoo.make_run(tmp_path / "far", name="quick-two"))
        with pytest.raises(UserError, match="known runs: quickstart"):
            find_run("quikstart")
        with pytest.raises(UserError, match="quick-two"):
            find_run("quick-tow")

    def test_without_any_run_the_way_to_the_first_is_reported(self):
        with pytest.raises(UserError, match="areal-like train"):
            find_run("x")

    def test_half_written_folder_is_distinguished_from_none(self, tmp_path):
        folder = zoo.make_run(tmp_path / "runs", name="half")
        folder.config.write_text("name: half\n")
        folder.state.unlink()
        with pytest.raises(UserError, match="was interrupted"):
            find_run("half")

    def test_folder_of_runs_names_what_is_in_it(self, tmp_path):
        zoo.make_run(tmp_path / "runs", name="job")
        with pytest.raises(UserError, match=r"folder of runs.*job"):
            find_run("runs")

    @pytest.mark.parametrize("text", ["", "/", "a\0b", "~nobody/x", "x" * 5000])
    def test_nonsense_is_a_mistake_and_nothing_worse(self, text):
        with pytest.raises(UserError):
            find_run(text)

    def test_entry_of_a_moment_ago_is_newest(self, tmp_path):
        registry.enlist(zoo.make_run(tmp_path))
        assert time.time() - registry.known()[0].registered_s < 60
