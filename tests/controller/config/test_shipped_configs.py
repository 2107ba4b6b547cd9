"""Claims about the configs that come with the program: valid, and fit for the hardware their names and headers say."""

from __future__ import annotations

import re
from functools import cache

import pytest

from areal_like.emulation.machines import gpu_named
from controller.config.loading import find_config, load_config, shipped_configs
from controller.config.memory.estimate import estimate, shape_of_run
from controller.config.memory.fit import lacks, needed_on_device
from controller.config.problems import ConfigError
from controller.config.validation.pool_sizes import gpus_of_run, gpus_of_worker
from controller.data.length_distribution import parse_lengths
from controller.simulate.forecast import Forecast, forecast


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_have_no_contradictions_and_are_named_as_their_file(name: str) -> None:
    config = load_config(name).config
    assert config.name == name
    if named := re.search(r"_(\d+)gpu$", name):
        assert gpus_of_run(config) == int(named[1])
        assert config.hardware.gpu is not None


GPU_RECIPES = [name for name in shipped_configs() if name.endswith("gpu")]


def header_of(name: str) -> str:
    return " ".join(line.lstrip("# ") for line in find_config(name).read_text().splitlines()[:24])


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_shipped_config_fits_the_hardware_it_names_with_the_memory_its_header_says(name: str) -> None:
    config = load_config(name).config
    shape = shape_of_run(config, None)
    assert shape is not None
    gpu = gpu_named(config.hardware.gpu or "")
    assert lacks(config, shape, gpu.memory) == []
    found = estimate(config, shape, gpu.memory)
    header = header_of(name)
    assert f"a trainer's GPU {max(map(needed_on_device, found.trainer)) / 1e9:.0f} GB" in header
    assert f"host memory {found.host_bytes / 1e9:.0f} GB" in header
    assert gpu.name.upper() in header
    assert "Not run on a GPU" in header


@cache
def forecast_of(name: str, num_workers: int | None = None, ranks: int | None = None) -> Forecast | None:
    """Of the config's own split, or of another one; None if that is invalid or does not fit the GPUs."""
    overrides = [] if ranks is None else [f"rollout.num_workers={num_workers}", f"trainer.ranks={ranks}"]
    own = load_config(name).config
    if ranks is not None and own.trainer.device.startswith("cuda:"):
        overrides.append(f"trainer.device=cuda:{gpus_of_run(own) - ranks:.0f}")
    try:
        config = load_config(name, overrides).config
    except ConfigError:
        return None
    shape = shape_of_run(config, None)
    assert shape is not None
    if lacks(config, shape, gpu_named(config.hardware.gpu or "").memory):
        return None
    lengths = re.search(rf"areal-like validate {name} --lengths (\S+)", header_of(name))
    return forecast(config, shape, parse_lengths(lengths[1], config.sampling.max_new_tokens) if lengths else None)


IN_EVERY_RUN = ("gsm8k_1.7b_1gpu", "math_8b_8gpu", "math_8b_64gpu", "areal_math_1.5b_128gpu")
"""A change of the forecast changes their hours too: one GPU, one node, several, and one of the paper's runs."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.thorough) for name in GPU_RECIPES],
)
def test_the_hours_in_a_header_are_those_of_the_forecast(name: str) -> None:
    found = forecast_of(name)
    assert found is not None
    assert f"{found.hours:,.1f} h, {found.gpu_hours:,.0f} GPU-hours" in header_of(name)


SPLIT = [name for name in GPU_RECIPES if not load_config(name).config.is_colocated and not name.startswith("areal_")]
"""Recipes whose split is ours: the paper's runs have the paper's."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPLIT)
def test_no_split_next_to_that_of_a_recipe_fits_and_is_faster(name: str) -> None:
    """As `simulate` chooses: of plans within 2 % of the fastest, the freshest. One GPU of eight is moved."""
    config, own = load_config(name).config, forecast_of(name)
    assert own is not None
    each, moved = gpus_of_worker(config), max(1, int(gpus_of_run(config)) // 8)
    faster = []
    for change in (-max(1, moved // each), max(1, moved // each)):
        workers, ranks = config.rollout.num_workers + change, config.trainer.ranks - change * each
        other = forecast_of(name, workers, ranks) if workers > 0 and ranks > 0 else None
        if other is not None and other.step_s < own.step_s / 1.02:
            faster.append(f"{workers * each}:{ranks}: {other.step_s:.1f} s instead of {own.step_s:.1f} s")
    assert faster == []


SERVED = [name for name in shipped_configs() if load_config(name).config.rollout.engine.kind == "sglang"]


@pytest.mark.parametrize("name", SERVED)
def test_a_config_for_sglang_is_valid_with_vllm_and_needs_the_same_gpus(name: str) -> None:
    before = load_config(name).config
    if before.is_colocated:
        with pytest.raises(ConfigError) as raised:
            load_config(name, ["rollout.engine.kind=vllm"])
        assert [problem.what for problem in raised.value.problems] == [
            "placement: colocated requires an engine that can release its memory, but vLLM cannot"
        ]
        return
    overrides = ["rollout.engine.kind=vllm"]
    if before.rollout.engine.python is not None:  # of a cluster: each engine's interpreter is named
        overrides.append("rollout.engine.python=/opt/vllm/bin/python")
    loaded = load_config(name, overrides)
    engine, config = loaded.config.rollout.engine, loaded.config
    assert (engine.vllm.tp_size, engine.vllm.memory_fraction) == (
        before.rollout.engine.sglang.tp_size, before.rollout.engine.sglang.memory_fraction,
    )  # fmt: skip
    assert "rollout.engine.kind=vllm: rollout.engine.sglang is used as rollout.engine.vllm" in loaded.notes
    assert gpus_of_run(config) == gpus_of_run(before)
    shape = shape_of_run(config, None)
    assert shape is not None
    assert lacks(config, shape, gpu_named(config.hardware.gpu or "").memory) == []


def test_there_are_configs_for_sglang() -> None:
    assert len(SERVED) >= 10
    assert set(IN_EVERY_RUN) <= set(GPU_RECIPES)
