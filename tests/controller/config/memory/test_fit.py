"""Claims about what does not fit: refused beyond the estimate's error, with a change that does fit."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import config_of, make

from areal_like.decoder_shape import PUBLIC_SHAPES, DecoderShape
from controller.config.loading import build
from controller.config.memory.estimate import trainer_memory
from controller.config.memory.fit import (
    CONTEXT_BYTES,
    SMALLEST_MICRO_BATCH,
    fit_problems,
    fit_remarks,
    lacks,
    trainer_settings,
)
from controller.config.run_config import RunConfig
from controller.preflight import machine, preflight

SMALL, MIDDLE, LARGE = (PUBLIC_SHAPES[f"Qwen/Qwen3-{size}"] for size in ("1.7B", "8B", "32B"))
GPU = {"device": "cuda", "precision": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 16384}
BATCH = {"groups_per_step": 512, "group_size": 16}


def run(trainer: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return make(model={"path": "x/y", "dtype": "bfloat16"}, trainer={**GPU, **(trainer or {})}, **BATCH, **changes)


def refusals(config: RunConfig, shape: DecoderShape, device_bytes: float) -> list[str]:
    return [str(problem) for problem in fit_problems(config, shape, device_bytes)]


def with_change(config: RunConfig, change: str) -> RunConfig:
    """The config with the remedy `set key: value and key: value` carried out."""
    data = config.model_dump(mode="json")
    for setting in change.removeprefix("set ").split(" and "):
        key, value = setting.split(": ")
        section = data
        for part in key.split(".")[:-1]:
            section = section[part]
        section[key.rpartition(".")[2]] = int(value) if value.isdecimal() else value == "true" or value
    return RunConfig.model_validate(data)


def test_micro_batches_are_halved_first_down_to_a_part_or_the_longest_sequence() -> None:
    config = run(rollout={"engine": {"max_context": 512}})
    words = [words for words, _ in trainer_settings(config)]
    halved = [16384 >> times for times in range(1, SMALLEST_MICRO_BATCH.bit_length())]
    assert words[: len(halved) + 1] == [
        *(f"trainer.micro_batch_tokens: {tokens}" for tokens in halved), "trainer.backend: fsdp and trainer.ranks: 2"
    ]  # fmt: skip
    config = run(rollout={"engine": {"max_context": 8192}})
    assert [words for words, _ in trainer_settings(config)][:2] == [
        "trainer.micro_batch_tokens: 8192", "trainer.backend: fsdp and trainer.ranks: 2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "shape", "device_bytes", "remedy"),
    [
        ({"gradient_checkpointing": False}, SMALL, 80e9, "set trainer.micro_batch_tokens: 8192"),
        ({"gradient_checkpointing": False}, SMALL, 44e9, "set trainer.gradient_checkpointing: true"),
        ({}, MIDDLE, 80e9, "set trainer.backend: fsdp and trainer.ranks: 4"),
        ({"backend": "fsdp", "ranks": 2}, MIDDLE, 70e9, "set trainer.ranks: 4"),
        ({"backend": "fsdp", "ranks": 8, "fsdp": {"replicas": 4}}, MIDDLE, 70e9, "set trainer.fsdp.replicas: 2"),
        ({"backend": "deepspeed", "ranks": 8}, LARGE, 80e9, "use a smaller model, or a GPU with more memory"),
    ],
)
def test_the_remedy_is_the_smallest_change_and_fits(
    trainer: dict[str, Any], shape: DecoderShape, device_bytes: float, remedy: str
) -> None:
    config = run(trainer)
    (refused,) = refusals(config, shape, device_bytes)
    change = refused.partition(" -> ")[2]
    assert change.startswith(remedy), refused
    if "smaller model" not in change:
        assert lacks(with_change(config, change), shape, device_bytes) == []


def test_what_is_missing_by_less_than_the_error_of_the_estimate_is_a_remark() -> None:
    config = run()
    needed = trainer_memory(config, SMALL)[0].needed_bytes + CONTEXT_BYTES
    assert lacks(config, SMALL, needed) == []
    assert refusals(config, SMALL, needed * 0.9) == []
    (remark,) = fit_remarks(config, SMALL, needed * 0.9)
    assert "off by up to 15%" in remark
    assert len(refusals(config, SMALL, needed * 0.8)) == 1
    assert list(fit_remarks(config, SMALL, needed * 0.8)) == []


def test_an_engine_whose_cache_is_too_large_is_given_fewer_slots() -> None:
    engine = {"device": "cuda", "num_slots": 256, "max_context": 4096}
    config = make(model={"path": "x/y", "dtype": "bfloat16"}, rollout__engine=engine)
    (refused,) = refusals(config, MIDDLE, 80e9)
    assert "rollout worker" in refused
    assert refused.endswith("-> set rollout.engine.num_slots: 64")


def test_an_sglang_worker_whose_weights_do_not_fit_is_given_more_gpus() -> None:
    engine = {"kind": "sglang", "device": "cuda", "max_context": 4096}
    config = make(model={"path": "x/y", "dtype": "bfloat16"}, rollout__engine=engine)
    assert refusals(config, MIDDLE, 80e9) == []
    (refused,) = refusals(config, LARGE, 60e9)
    assert refused.endswith("-> set rollout.engine.sglang.tp_size: 2")


def test_engine_and_trainer_on_one_gpu_are_added_up_unless_they_take_turns() -> None:
    model = {"path": "x/y", "dtype": "bfloat16"}
    engine = {"device": "cuda", "num_slots": 64, "max_context": 4096}
    apart = make(
        model=model, trainer={**GPU, "device": "cuda:1"}, rollout__engine={**engine, "device": "cuda:0"}, **BATCH
    )
    assert refusals(apart, SMALL, 60e9) == []
    shared = make(model=model, trainer=GPU, rollout__engine=engine, **BATCH)
    (refused,) = refusals(shared, SMALL, 60e9)
    assert "trainer and rollout worker on one GPU" in refused
    assert "-> set placement: colocated" in refused
    turns = make(model=model, trainer=GPU, rollout__engine=engine, mode="sync", placement="colocated", **BATCH)
    assert refusals(turns, SMALL, 60e9) == []


def test_cpus_emulated_devices_and_backends_that_adapt_are_not_judged() -> None:
    assert lacks(make(), LARGE, 1e9) == []
    assert lacks(run({"backend": "auto"}), LARGE, 80e9) == []
    assert lacks(run(emulation={"model": "32b"}), LARGE, 80e9) == []


def test_a_gpu_of_this_machine_that_the_run_leaves_alone_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    on_cpu = preflight.look(make(), "validate").notes
    assert "2 GPUs of this machine are not used: trainer.device and rollout.engine.device are cpu" in " ".join(on_cpu)
    one = " ".join(preflight.look(make(trainer__device="cuda:0"), "validate").notes)
    assert "1 GPU of this machine is not used: rollout.engine.device is cpu" in one
    assert "set placement: colocated and mode: sync" in one
    both = make(rollout__engine__device="cuda:0", trainer__device="cuda:1")
    assert "not used" not in " ".join(preflight.look(both, "validate").notes)


@pytest.mark.processes
def test_a_state_that_no_named_gpu_holds_is_refused_with_a_change_by_which_all_of_it_fits() -> None:
    config = make(
        model={"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}, hardware__gpu="h100", trainer=GPU, **BATCH,
        rollout__engine={"kind": "sglang", "device": "cuda:1"},
    )  # fmt: skip
    words = [str(problem) for problem in preflight.look(config, "validate").problems]
    assert any("its GPU has 80 GB -> set trainer.backend: fsdp and trainer.ranks: 4" in word for word in words), words


def test_a_config_is_judged_by_the_gpu_it_names() -> None:
    named = make(
        model={"path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16"}, hardware__gpu="l40s",
        trainer={**GPU, "gradient_checkpointing": False}, **BATCH,
    )  # fmt: skip
    words = [str(problem) for problem in preflight.look(named, "validate").problems]
    assert any("of a GPU's 48 GB" in word and "gradient_checkpointing: true" in word for word in words), words
    config, (problem,) = build(config_of({"hardware.gpu": "h1000"}))
    assert config is None
    assert "hardware.gpu: 'h1000' is not a known GPU; did you mean 'h100'?" in str(problem)
