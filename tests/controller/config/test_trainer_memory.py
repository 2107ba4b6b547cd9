"""What the trainer's state takes at least, and what no device can hold."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.derived import derive
from controller.config.trainer_memory import memory_problem, num_parameters, parameters_of, trainer_state
from controller.preflight import preflight

QWEN3_8B = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
            "tie_word_embeddings": False}  # fmt: skip
QWEN3_32B = {**QWEN3_8B, "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
             "intermediate_size": 25600}  # fmt: skip
QWEN3_30B_A3B = {**QWEN3_8B, "num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4,
                 "intermediate_size": 6144, "num_experts": 128, "moe_intermediate_size": 768}  # fmt: skip


def problem_of(model: dict[str, Any], device_bytes: float | None = None, **trainer: Any) -> str:
    config = make(trainer={"device": "cuda", **trainer})
    problem = memory_problem(config, trainer_state(config, num_parameters(model) or 0), device_bytes)
    return "" if problem is None else str(problem)


@pytest.mark.parametrize(
    ("model", "published"), [(QWEN3_8B, 8.19e9), (QWEN3_32B, 32.8e9), (QWEN3_30B_A3B, 30.5e9)]
)  # fmt: skip
def test_parameters_are_counted_to_a_few_percent(model: dict[str, Any], published: float) -> None:
    assert num_parameters(model) == pytest.approx(published, rel=0.03)
    assert num_parameters({"text_config": model, "vision_config": {}}) == num_parameters(model)


@pytest.mark.parametrize(
    "missing", sorted(QWEN3_8B.keys() - {"num_key_value_heads", "head_dim", "tie_word_embeddings"})
)
def test_a_config_without_a_size_gives_no_figure(missing: str) -> None:
    assert num_parameters({key: value for key, value in QWEN3_8B.items() if key != missing}) is None
    assert num_parameters({**QWEN3_8B, missing: "many"}) is None


def test_half_a_terabyte_on_one_gpu_is_refused_wherever_it_is_validated() -> None:
    refused = problem_of(QWEN3_32B)
    assert "524 GB" in refused
    assert "no GPU has more than 300 GB" in refused
    assert "trainer.ranks: 2 or more" in refused
    assert problem_of(QWEN3_8B) == "", "131 GB fit some GPUs"


def test_a_device_whose_memory_is_known_decides() -> None:
    assert "its GPU has 80 GB" in problem_of(QWEN3_8B, 80e9)
    assert problem_of(QWEN3_8B, 141e9) == ""


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        ({"backend": "fsdp", "ranks": 8}, False),
        ({"backend": "fsdp", "ranks": 1}, True),
        ({"backend": "fsdp", "ranks": 1, "fsdp": {"cpu_offload": True}}, False),
        ({"backend": "auto", "ranks": 1}, False),
        ({"backend": "deepspeed", "ranks": 8, "deepspeed": {"stage": 3}}, False),
        ({"backend": "deepspeed", "ranks": 4, "deepspeed": {"stage": 1}}, True),
        ({"backend": "deepspeed", "ranks": 8, "deepspeed": {"stage": 2}}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_what_is_spread_over_ranks_or_kept_in_host_memory_is_counted_so(trainer: dict[str, Any], refused: bool) -> None:
    assert bool(problem_of(QWEN3_32B, **trainer)) is refused


def test_emulated_devices_hold_anything() -> None:
    config = make(trainer__device="cuda", emulation={"model": "32b"})
    assert memory_problem(config, trainer_state(config, 32.8e9), None) is None


def test_validate_refuses_the_impossible_and_names_the_figure_of_the_possible() -> None:
    large = make(model={"path": "Qwen/Qwen3-32B"}, trainer__device="cuda")
    assert parameters_of(large, QWEN3_32B) == num_parameters(QWEN3_32B)
    config = make(model={"init": {"model_type": "qwen3", **QWEN3_32B}, "tokenizer": "bytes"}, trainer__device="cuda")
    words = [str(problem) for problem in preflight.look(config, "validate").problems]
    assert any("524 GB" in word for word in words), words
    figures = {number.name: number.value for number in derive(config)}
    assert figures["trainer state per rank"] == "524 GB"


def test_a_model_that_is_not_here_yet_is_known_by_its_name() -> None:
    config = make(model={"path": "Qwen/Qwen3-8B"}, trainer__device="cuda")
    assert {n.name: n.value for n in derive(config)}["trainer state per rank"] == "131 GB"
    assert parameters_of(make(model={"path": "someone/something"}), None) is None


def test_a_trainer_on_a_cpu_that_this_machine_cannot_hold_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 8e9}))
    model = {"init": {"model_type": "qwen3", **QWEN3_8B}, "tokenizer": "bytes"}
    absent = [str(problem) for problem in preflight.look(make(model=model), "validate").absent]
    assert any("131 GB of host memory" in words and "this machine has 8 GB" in words for words in absent), absent


def test_every_rank_of_the_trainer_is_named_with_its_device() -> None:
    config = make(
        trainer={"device": "cuda:2", "backend": "fsdp", "ranks": 2},
        rollout={"num_workers": 2, "engine": {"device": "cuda"}},
    )
    found = {number.name: (number.value, number.formula) for number in derive(config)}
    assert found["devices"] == ("4", "rollout on cuda:0, cuda:1; trainer on cuda:2, cuda:3")
