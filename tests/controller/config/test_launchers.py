"""Claims about every registered launcher's descriptor, about `launch.kind`, and about a launcher of the user's."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from valid_config import make

from areal_like.errors import UserError
from areal_like.import_path import import_object
from controller.config.launch_settings import LaunchSettings
from controller.config.launcher_descriptor import LauncherDescriptor
from controller.config.launchers import LAUNCHERS, find_launcher, launcher_of
from controller.config.loading import build
from controller.config.validation.run import cross_check
from controller.launch.choice import launcher_for, survey
from controller.launch.local import LocalLauncher
from controller.run_folder.run_folder import RunFolder


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=lambda launcher: launcher.name)
def test_every_launcher_accepts_default_settings_and_can_be_made(launcher: LauncherDescriptor) -> None:
    launch = LaunchSettings(kind=launcher.name)
    assert list(launcher.setting_problems(launch)) == []
    assert list(launcher.option_problems({})) == []
    assert launcher.node_wait_s(launch) > 0
    assert callable(import_object(launcher.factory, "launch.kind"))
    assert not launcher.survey or callable(import_object(launcher.survey, "launch.kind"))
    assert not launcher.section or launcher.section in LaunchSettings.model_fields
    (problem,) = launcher.option_problems({"queue": "long"})
    assert problem.keys[0] == "launch.options"


def test_the_local_launcher_shares_this_machine_and_ray_gives_each_process_its_own() -> None:
    local, ray = find_launcher("local"), find_launcher("ray")
    assert (local.is_one_machine, local.chooses_gpus, local.mirroring(LaunchSettings())) == (True, False, None)
    assert (ray.is_one_machine, ray.chooses_gpus) == (False, True)
    launch = LaunchSettings.model_validate({"ray": {"node_wait_s": 7, "mirror_every_s": 9, "local_dir": "/disk"}})
    assert ray.node_wait_s(launch) == 7
    mirroring = ray.mirroring(launch)
    assert mirroring is not None
    assert (mirroring.local_dir, mirroring.every_s) == ("/disk", 9)


def test_an_unknown_launcher_is_one_problem_with_the_nearest_name_and_the_others_follow() -> None:
    data = make().model_dump(mode="json", exclude_unset=True)
    _, problems = build({**data, "launch": {"kind": "rya"}, "group_size": 1})
    assert [problem.keys[0] for problem in problems] == ["launch.kind", "group_size"]
    assert str(problems[0]) == "launch.kind: no launcher `rya` -> did you mean ray?"


class Partition(LauncherDescriptor):
    """Processes on machines that share folders; each sees GPUs of its own."""

    name = title = "partition"
    factory = "my_launcher:make"
    is_one_machine = False
    chooses_gpus = True

    def option_problems(self, options: Any) -> Any:
        return iter(())


def make_launcher(config: Any, folder: RunFolder) -> LocalLauncher:
    return LocalLauncher(folder.logs, config.launch.options["host"])


@pytest.fixture
def _my_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_launcher")
    vars(module).update(PARTITION=Partition(), make=make_launcher)
    monkeypatch.setitem(sys.modules, "my_launcher", module)


@pytest.mark.usefixtures("_my_launcher")
def test_a_launcher_by_import_path_is_asked_as_the_built_in_ones_are(tmp_path: Path) -> None:
    options = {"kind": "my_launcher:PARTITION", "options": {"host": "127.0.0.2"}}
    config = make(launch=options, runs_dir=str(tmp_path), rollout__engine={"device": "cuda"}, rollout__num_workers=2)
    assert cross_check(config) == []
    assert launcher_of(config).title == "partition"
    assert config.trainer.weights.kind == "stream"
    assert config.rollout_devices == ("cuda", "cuda")
    assert survey(config).problems == []
    assert launcher_for(config, RunFolder(tmp_path)).host == "127.0.0.2"
    (problem,) = cross_check(config.model_copy(update={"runs_dir": "runs"}))
    assert "`runs` is a relative path" in str(problem)


def test_a_launcher_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(UserError, match="module no_such_launcher cannot be imported"):
        find_launcher("no_such_launcher:HERE")
