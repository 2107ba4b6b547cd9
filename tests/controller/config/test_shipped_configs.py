"""Claims about the configs that come with the program: valid, and fit for the hardware their names and headers say."""

from __future__ import annotations

import re

import pytest

from areal_like.emulation.machines import gpu_named
from controller.config.loading import find_config, load_config, shipped_configs
from controller.config.memory.estimate import estimate, shape_of_run
from controller.config.memory.fit import lacks, needed_on_device
from controller.config.problems import ConfigError
from controller.config.validation.pool_sizes import gpus_of_run


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_have_no_contradictions_and_are_named_as_their_file(name: str) -> None:
    config = load_config(name).config
    assert config.name == name
    if named := re.search(r"_(\d+)gpu$", name):
        assert gpus_of_run(config) == int(named[1])
        assert config.hardware.gpu is not None


@pytest.mark.parametrize("name", [name for name in shipped_configs() if name.endswith("gpu")])
def test_a_shipped_config_fits_the_hardware_it_names_with_the_memory_its_header_says(name: str) -> None:
    config = load_config(name).config
    shape = shape_of_run(config, None)
    assert shape is not None
    gpu = gpu_named(config.hardware.gpu or "")
    assert lacks(config, shape, gpu.memory) == []
    found = estimate(config, shape, gpu.memory)
    header = " ".join(line.lstrip("# ") for line in find_config(name).read_text().splitlines()[:24])
    assert f"a trainer's GPU {max(map(needed_on_device, found.trainer)) / 1e9:.0f} GB" in header
    assert f"host memory {found.host_bytes / 1e9:.0f} GB" in header
    assert gpu.name.upper() in header
    assert "Not run on a GPU" in header


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
