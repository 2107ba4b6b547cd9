"""What an engine says of itself where it overrides nothing."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.config import EngineSettings
from rollout.engine.descriptor import EngineDescriptor, EngineEnvironment, EngineJob, ServingDemand
from rollout.engine.embedded_descriptor import EMBEDDED
from rollout.engine.emulated_descriptor import EMULATED


class Echo(EngineDescriptor):
    name = title = "echo"
    factory = "my_engine.engine:make"


def job_of(**settings: Any) -> EngineJob:
    return EngineJob(
        settings=EngineSettings(device="cpu", **settings), num_workers=1, interruption="recompute",
        model_dtype="bfloat16",
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
    assert words(Echo().option_problems({"a": 1, "b": 2})) == ["echo has no options, but these are set: a, b"]


@pytest.mark.parametrize("can", [True, False])
def test_what_an_engine_cannot_do_is_a_problem(can: bool) -> None:
    class Able(Echo):
        joins_process_groups = releases_memory = can

    assert words(Able().group_problems(job_of(), None)) == ["echo cannot join a process group"] * (not can)
    assert words(Able().colocation_problems(job_of())) == [
        "placement: colocated requires an engine that can release its memory, but echo cannot"
    ] * (not can)


DEMAND = ServingDemand(weights_bytes=1000.0, cache_token_bytes=2.0)


def test_an_engine_has_one_device_unless_it_says_which_settings_give_it_more() -> None:
    assert Echo().settings_for_devices(1) == {}
    assert Echo().settings_for_devices(0) is Echo().settings_for_devices(2) is None


@pytest.mark.parametrize("devices", [1, 2])
def test_memory_is_one_copy_of_the_weights_and_a_cache_for_every_slot(devices: int) -> None:
    class Wide(Echo):
        def devices_per_worker(self, settings: EngineSettings) -> int:
            return devices

    memory = Wide().memory(job_of(num_slots=3, max_context=5), DEMAND)
    assert memory.parts == {"weights": 1000.0 / devices, "KV cache": 30.0 / devices}
    assert memory.needed_bytes == 1030.0 / devices


def test_embedded_engine_holds_two_sets_of_weights() -> None:
    memory = EMBEDDED.memory(job_of(num_slots=3, max_context=5), DEMAND)
    assert memory.parts == {"weights": 1000.0, "next weights": 1000.0, "KV cache": 30.0}
    assert memory.needed_bytes == 2030.0


def test_fewer_slots_are_proposed_the_smallest_change_first() -> None:
    found = list(Echo().memory_settings(job_of(num_slots=9)))
    assert [words for words, _ in found] == [f"rollout.engine.num_slots: {slots}" for slots in (4, 2, 1)]
    assert [settings.num_slots for _, settings in found] == [4, 2, 1]
    assert list(Echo().memory_settings(job_of(num_slots=1))) == []


@pytest.mark.parametrize(
    ("section", "remedy"), [("", "remove these options"), ("echo", "use the settings in rollout.engine.echo instead")]
)
def test_options_are_to_be_written_where_the_engine_is_configured(section: str, remedy: str) -> None:
    class Sectioned(Echo):
        pass

    Sectioned.section = section
    (problem,) = Sectioned().option_problems({"a": 1})
    assert (problem.keys, problem.remedy) == (("rollout.engine.options", "rollout.engine.kind"), remedy)


def test_an_engine_promises_nothing_that_it_does_not_say() -> None:
    echo = Echo()
    assert (echo.section, echo.environment, echo.interruptions) == ("", None, ("recompute", "keep_kv", "drain"))
    assert (echo.joins_process_groups, echo.releases_memory, echo.can_be_emulated) == (False, False, False)


def test_emulated_devices_have_no_memory_to_hand_over_whatever_the_job() -> None:
    (problem,) = EMULATED.colocation_problems(job_of())
    assert (
        problem.what
        == "placement: colocated requires an engine that can release its memory, but emulated devices have no memory"
    )
    assert (problem.keys, problem.remedy) == (("placement", "emulation"), "set placement: disaggregated")
