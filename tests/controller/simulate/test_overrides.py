"""Claims about the best plan as settings: with them the config has the plan's machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import GPUS, MODELS
from areal_like.emulation.roofline import Measured
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.config.validation.pool_sizes import gpus_of_run
from controller.simulate import plan
from controller.simulate.job import Outcome
from controller.simulate.overrides import overrides_of, unfit_words

RECIPE = "gsm8k_8b_8gpu"
OUTCOME = Outcome(2, 1.0, 1, 1.0, 1.0, 1, 0.0, 0.0, 0.0, 0.0, 0.0)


def trial(
    config: RunConfig, workers: int, ranks: int, varied: dict[str, str] | None = None, **setup: Any
) -> plan.Trial:
    made = plan.Setup(config, Lengths("x", mean=100.0, cap=200), 3, GPUS["h100"], MODELS["qwen3-8b"], **setup)
    return plan.Trial(varied or {}, made, OUTCOME, workers, ranks, 0.0)


def applied(settings: list[str]) -> RunConfig:
    return load_config(RECIPE, settings).config


def test_settings_make_a_config_with_the_plans_split() -> None:
    settings = overrides_of(trial(load_config(RECIPE).config, 3, 2, {"rollout_share": "0.6"}))
    assert sorted(settings) == ["rollout.num_workers=3", "trainer.device=cuda:3", "trainer.ranks=2"]
    config = applied(settings)
    assert (gpus_of_run(config), config.trainer_devices) == (5, ("cuda:3", "cuda:4"))
    assert overrides_of(trial(config, 3, 2)) == [], "it is what the config has"


def test_keys_of_the_sweep_gpus_of_a_worker_and_another_gpu_are_settings_too() -> None:
    settings = overrides_of(
        replace(trial(load_config(RECIPE).config, 2, 4, {"mini": "1"}, tp=2), varied={"trainer.mini_batches": "2"})
    )
    assert {"trainer.mini_batches=2", "rollout.engine.sglang.tp_size=2", "trainer.device=cuda:4"} <= set(settings)
    assert applied(settings).trainer.mini_batches == 2
    other = trial(load_config(RECIPE).config, 3, 2)
    other = replace(other, setup=replace(other.setup, gpu=GPUS["h200"]))
    assert "hardware.gpu=h200" in overrides_of(other)


def test_a_synchronous_plan_has_engines_and_trainer_on_the_same_gpus() -> None:
    sync = load_config(RECIPE, ["mode=sync"]).config
    settings = overrides_of(trial(sync, 8, 8, {"mode": "sync"}))
    config = applied(settings)
    assert (config.is_colocated, gpus_of_run(config), config.trainer.fsdp.cpu_offload) == (True, 8, True)


def test_one_process_that_becomes_several_ranks_shards() -> None:
    config = load_config(RECIPE, ["trainer.backend=torch", "trainer.ranks=1"]).config
    assert "trainer.backend=fsdp" in overrides_of(trial(config, 4, 2))


def test_workers_of_several_gpus_get_an_engine_that_can_have_them() -> None:
    config = load_config("quickstart").config  # the embedded engine has one
    settings = overrides_of(trial(config, 2, 4, tp=2))
    assert {"rollout.engine.kind=sglang", "rollout.engine.sglang.tp_size=2"} <= set(settings)


def test_measured_machines_are_the_configs_own() -> None:
    found = trial(load_config(RECIPE).config, 7, 1, {"groups_per_step": "8"})
    measured = Measured(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 4)
    assert overrides_of(replace(found, setup=replace(found.setup, gpu=None, measured=measured))) == [
        "groups_per_step=8"
    ]


def test_a_plan_that_does_not_fit_its_gpus_says_so() -> None:
    config = load_config(RECIPE).config
    assert unfit_words(trial(config, 5, 3), applied(overrides_of(trial(config, 5, 3)))) == []
    (words,) = unfit_words(trial(config, 7, 1), applied(overrides_of(trial(config, 7, 1))))
    assert "of a GPU's 80 GB" in words
