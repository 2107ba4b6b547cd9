"""Claims about a backend of the user's in a configuration: its descriptor is asked wherever ours are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from valid_config import config_of, make

from areal_like.setting_problem import SettingProblem
from controller.config.loading import build
from controller.config.run_config import RunConfig
from controller.config.trainer_memory import memory_problem, trainer_state
from controller.config.validation.run import cross_check
from controller.preflight import preflight
from trainer.backends.descriptor import BackendDescriptor, RequiredPackage
from trainer.config import TrainerSettings

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
TOY = "toy_backend.descriptor:TOY"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))


def toy(**changes: Any) -> RunConfig:
    return make(**{"trainer__backend": TOY, "trainer__backend_options": {"lr": 0.1}, **changes})


def refusals(config: RunConfig) -> list[str]:
    return list(map(str, cross_check(config)))


def test_a_valid_configuration_is_accepted_and_written_out_unchanged() -> None:
    assert refusals(toy()) == []
    assert RunConfig.model_validate(toy().model_dump(mode="json")) == toy()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__backend_options": {}}, "trainer.backend_options: `lr` is not a number -> {lr: 0.1}"),
        (
            {"trainer__ranks": 2},
            "trainer.ranks: the backend toy supports one process, but trainer.ranks is 2 -> set trainer.backend to "
            "fsdp, deepspeed or auto",
        ),
        (
            {"mode": "sync", "placement": "colocated"},
            "keeps its state on them -> set trainer.backend: torch, or fsdp with trainer.fsdp.cpu_offload: true",
        ),
        (
            {"trainer__critic": {}, "trainer__advantage": {"kind": "gae"}},
            f"trainer.critic: {TOY} cannot train a critic -> set trainer.backend to torch or fsdp or deepspeed or auto",
        ),
    ],
)
def test_what_its_descriptor_excludes_is_refused(changes: dict[str, Any], words: str) -> None:
    (refusal,) = refusals(toy(**changes))
    assert words in refusal


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("fsdq", "trainer.backend: no trainer backend `fsdq` -> did you mean fsdp?"),
        ("megatron", "-> torch, fsdp, deepspeed, auto, or module:ATTRIBUTE"),
        ("toy_backend.descriptor:TOYS", "did you mean toy_backend.descriptor:TOY?"),
        ("toy_backend.descriptor:OPTIONS_KEY", "is neither an instance nor a subclass of BackendDescriptor"),
        ("no_such_module:TOY", "cannot be imported"),
    ],
)
def test_a_name_that_is_no_backend_is_one_problem_with_the_others(backend: str, words: str) -> None:
    config, problems = build(config_of({"trainer.backend": backend, "sampling.top_p": 0.5}))
    assert config is None
    assert [problem.keys[0] for problem in problems] == ["trainer.backend", "sampling.top_p"]
    assert words in str(problems[0])


def test_options_are_for_backends_of_ones_own() -> None:
    (refusal,) = refusals(make(trainer={"backend": "fsdp", "backend_options": {"x": 1}}))
    assert (
        "trainer.backend_options: fsdp has no options, but these are set: x -> use the settings in trainer.fsdp instead"
        in refusal
    )


def test_its_state_is_counted_as_it_lays_it_out() -> None:
    config = toy(trainer__device="cuda")
    state = trainer_state(config, 1e9)
    assert (state.device_bytes, state.host_bytes, state.words) == (8e9, 0.0, "1G parameters, without moments")
    assert memory_problem(config, state, 7e9) is not None
    assert memory_problem(config, state, 9e9) is None


class Needy(BackendDescriptor):
    name = "needy"
    factory = "x:y"
    packages = (RequiredPackage("a_package_that_is_missing", "pip install it"),)

    def setting_problems(self, settings: TrainerSettings) -> Any:
        yield SettingProblem(("trainer.threads",), "never enough", "more")


NEEDY = Needy()


def test_its_packages_and_settings_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = make(trainer__backend=f"{Path(__file__).stem}:NEEDY")
    assert refusals(config) == ["trainer.threads: never enough -> more"]
    found = [str(problem) for problem in preflight.look(config, "validate").problems]
    assert "trainer.backend: the package a_package_that_is_missing is not installed -> pip install it" in found
