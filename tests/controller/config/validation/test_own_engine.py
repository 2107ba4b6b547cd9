"""Claims about an engine of the user's in a configuration: its descriptor is asked wherever ours are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from valid_config import make

from controller.config.run_config import RunConfig
from controller.config.stall_limit import longest_recovery
from controller.config.validation.pool_sizes import gpus_of_run, pool_sizes
from controller.config.validation.run import cross_check

TOY = "toy_engine.descriptor:TOY"
FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))


def toy(options: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    engine = {"kind": TOY, "options": options or {}, **changes.pop("engine", {})}
    return make(rollout__engine=engine, **changes)


def refusal(config: RunConfig) -> str:
    return "; ".join(map(str, cross_check(config)))


def test_a_valid_configuration_is_accepted_and_written_out_unchanged() -> None:
    config = toy({"num_tokens": 5})
    assert refusal(config) == ""
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_its_devices_make_the_pool() -> None:
    config = toy({"devices": 2}, engine={"device": "cuda"}, rollout__pool_gpus=6, trainer__device="cuda")
    assert config.rollout.num_workers == 3
    assert refusal(config) == ""
    assert config.rollout_devices == ("cuda:1", "cuda:3", "cuda:5")
    assert [pool.gpus for pool in pool_sizes(config)][:2] == [6, 1]
    assert gpus_of_run(config) == 7


def test_its_recovery_sets_the_stall_limit() -> None:
    assert longest_recovery(toy()).what == "the toy engine restarts"
    assert "before the toy engine restarts" in refusal(toy(launch__stall_after_s=400))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"options": {"tokens": 5}}, "rollout.engine.options: no option `tokens` -> num_tokens or devices"),
        ({"options": {"num_tokens": 1}}, "rollout.engine.options.num_tokens: leaves nothing to choose"),
        ({"rollout__interruption": "drain"}, "rollout.interruption: toy does not support `drain` -> use recompute"),
        ({"engine": {"sglang": {"tp_size": 2}}}, f"applies to SGLang, but rollout.engine.kind is {TOY}"),
        ({"trainer__weights": {"kind": "distributed"}}, "trainer.weights.kind: toy cannot join a process group"),
        (
            {"mode": "sync", "placement": "colocated"},
            "placement: colocated requires an engine that can release its memory, but toy cannot",
        ),
        ({"emulation": {}}, f"emulation: the engine {TOY} cannot be emulated -> set rollout.engine.kind to embedded"),
    ],
)
def test_what_it_cannot_do_is_refused_by_key(config: dict[str, Any], words: str) -> None:
    assert re.search(re.escape(words), refusal(toy(**config)))
