"""Claims about every registered engine's descriptor, and about `rollout.engine.kind`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_like.errors import UserError
from areal_like.import_path import import_factory
from rollout.config import EngineSettings
from rollout.engine.descriptor import KIND_KEY, EngineDescriptor, EngineJob
from rollout.engine.emulated_descriptor import EMULATED
from rollout.engine.registry import ENGINES, find_engine

ALL = [*ENGINES.values(), EMULATED]


def job(engine: EngineDescriptor, **settings: object) -> EngineJob:
    return EngineJob(
        settings=EngineSettings.model_validate({"kind": engine.name, "device": "cpu", **settings}),
        num_workers=2, interruption="recompute", model_dtype="float32", startup_timeout_s=30.0, is_colocated=False,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ALL, ids=lambda engine: engine.name)
def test_default_settings_of_every_engine_are_accepted_by_it(engine: EngineDescriptor) -> None:
    assert list(engine.setting_problems(job(engine))) == []
    assert list(engine.option_problems({})) == []
    assert engine.devices_per_worker(EngineSettings()) == 1
    assert list(engine.server_ports(job(engine))[1]) == []
    assert all(recovery.longest_s > 0 and recovery.keys for recovery in engine.recoveries(job(engine)))


@pytest.mark.parametrize("engine", ALL, ids=lambda engine: engine.name)
def test_every_engine_names_a_function_that_makes_it(engine: EngineDescriptor) -> None:
    assert import_factory(engine.factory, KIND_KEY).__name__ == "make"


@pytest.mark.parametrize("engine", ALL, ids=lambda engine: engine.name)
def test_every_engine_refuses_options_that_it_does_not_know(engine: EngineDescriptor) -> None:
    (problem,) = engine.option_problems({"speed": 3})
    assert problem.keys[0] == "rollout.engine.options"
    assert "speed" in problem.what


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_sections_and_interpreters_are_those_of_the_settings(engine: EngineDescriptor) -> None:
    assert find_engine(engine.name) is engine
    assert not engine.section or engine.section in EngineSettings.model_fields
    own = engine.environment
    assert engine.interpreter(EngineSettings()) == (own.python if own else None)
    assert engine.interpreter(EngineSettings(python="/opt/python")) == ("/opt/python" if own else None)


def test_an_engine_with_neither_capability_refuses_what_needs_them() -> None:
    class Plain(EngineDescriptor):
        name = title = "plain"
        factory = "plain:make"

    (group,) = Plain().group_problems(job(Plain()), None)
    assert group.what == "plain cannot join a process group"
    (shared,) = Plain().colocation_problems(job(Plain()))
    assert (shared.keys[0], shared.what) == (
        "placement",
        "placement: colocated requires an engine that can release its memory, but plain cannot",
    )


def test_emulated_devices_take_the_place_of_the_engine_that_is_named() -> None:
    assert find_engine("embedded", is_emulated=True) is EMULATED
    assert [name for name, engine in ENGINES.items() if engine.can_be_emulated] == ["embedded"]


def test_an_unknown_engine_is_one_error_with_the_nearest_name() -> None:
    with pytest.raises(UserError) as caught:
        find_engine("sglnag")
    assert str(caught.value) == "rollout.engine.kind: no engine `sglnag` -> did you mean sglang?"


@pytest.mark.processes
def test_the_registry_imports_neither_torch_nor_an_engine() -> None:
    code = "import sys, rollout.engine.registry; print({'torch', 'transformers', 'aiohttp'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
