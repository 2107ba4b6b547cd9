"""What an engine says of itself where it overrides nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.config import EngineSettings
from rollout.engine.descriptor import EngineDescriptor, EngineEnvironment, EngineJob


class Echo(EngineDescriptor):
    name = title = "echo"
    factory = "my_engine.engine:make"


def job_of(**settings: Any) -> EngineJob:
    return EngineJob(
        settings=EngineSettings(**settings), num_workers=1, interruption="recompute", model_dtype="bfloat16",
        startup_timeout_s=1.0, is_colocated=False,
    )  # fmt: skip


def words(problems: Any) -> list[str]:
    return [problem.what for problem in problems]


@pytest.mark.parametrize(("given", "dtype"), [(None, "bfloat16"), ("float32", "float32")])
def test_an_engine_computes_in_the_dtype_of_its_setting_or_else_of_the_model(given: Any, dtype: str) -> None:
    assert job_of(dtype=given).dtype == dtype


def test_an_engine_needs_one_device_a_worker_no_interpreter_and_no_ports() -> None:
    echo, job = Echo(), job_of()
    assert echo.devices_per_worker(job.settings) == 1
    assert echo.interpreter(job.settings) is None
    assert echo.server_ports(job) == ("", ())
    assert echo.rounding_key(job.settings) == ""
    nothing = (
        echo.setting_problems(job), echo.model_problems(job, {}), echo.environment_problems(job),
        echo.recoveries(job), echo.advice(job),
    )  # fmt: skip
    assert [list(one) for one in nothing] == [[]] * 5


@pytest.mark.parametrize(("python", "wanted"), [(None, "/env/python"), ("/mine/python", "/mine/python")])
def test_an_engine_with_an_environment_of_its_own_runs_in_that_of_the_setting(python: Any, wanted: str) -> None:
    class Apart(Echo):
        environment = EngineEnvironment("/env/python", "echo", "make echo")

    assert Apart().interpreter(job_of(python=python).settings) == wanted


def test_options_are_refused_where_there_are_none() -> None:
    assert list(Echo().option_problems({})) == []
    assert words(Echo().option_problems({"a": 1, "b": 2})) == ["echo has no options (here: a, b)"]


@pytest.mark.parametrize("can", [True, False])
def test_what_an_engine_cannot_do_is_a_problem(can: bool) -> None:
    class Able(Echo):
        joins_process_groups = releases_memory = can

    assert words(Able().group_problems(job_of(), None)) == ["echo cannot join a process group"] * (not can)
    assert words(Able().colocation_problems(job_of())) == ["echo cannot release its memory"] * (not can)
