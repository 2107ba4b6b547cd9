"""What the trainer's state takes at least, and what no device can hold."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from controller.config.derived import derive
from controller.config.trainer_memory import host_problem, memory_problem, num_parameters, parameters_of, trainer_state
from controller.preflight import memory, preflight

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
    assert "no known GPU has more than 300 GB" in refused
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


def test_a_critic_takes_as_much_as_the_policy() -> None:
    alone, both = (
        trainer_state(make(trainer={"critic": critic, "advantage": {"kind": kind}}), 8e9)
        for critic, kind in ((None, "grpo"), ({}, "gae"))
    )
    assert both.device_bytes == 2 * alone.device_bytes
    assert "16G parameters of policy and critic" in both.words


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
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 8e9}))
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


# ------------------------------------------------------------ the arithmetic, exactly

TINY = {"num_hidden_layers": 3, "hidden_size": 10, "vocab_size": 100, "num_attention_heads": 5, "intermediate_size": 7}
ZERO_ON_TWO = "1G parameters, ZeRO {} over 2 ranks"
EMBEDDINGS, MLP, NORMS = 100 * 10, 3 * 10 * 7, 7 * 10


@pytest.mark.parametrize(
    ("more", "parameters"),
    [
        ({}, 3 * (10 * 2 * 2 * (5 + 5) + MLP) + 2 * EMBEDDINGS + NORMS),
        ({"num_key_value_heads": 1}, 3 * (10 * 2 * 2 * (5 + 1) + MLP) + 2 * EMBEDDINGS + NORMS),
        ({"head_dim": 4}, 3 * (10 * 4 * 2 * (5 + 5) + MLP) + 2 * EMBEDDINGS + NORMS),
        ({"tie_word_embeddings": True}, 3 * (400 + MLP) + EMBEDDINGS + NORMS),
        ({"num_experts": 1, "moe_intermediate_size": 2}, 3 * (400 + MLP) + 2 * EMBEDDINGS + NORMS),
        ({"num_experts": 2, "moe_intermediate_size": 4}, 3 * (420 + 3 * 10 * 2 * 4) + 2 * EMBEDDINGS + NORMS),
        ({"num_experts": 2}, 3 * (420 + 2 * MLP) + 2 * EMBEDDINGS + NORMS),
        ({"model_type": "qwen3"}, 3 * (400 + MLP + 2 * 2) + 2 * EMBEDDINGS + NORMS),
        ({"model_type": "qwen2"}, 3 * (400 + MLP + 3 * 10) + 2 * EMBEDDINGS + NORMS),
    ],
)
def test_parameters_are_those_of_attention_feed_forward_and_embeddings(more: dict[str, Any], parameters: int) -> None:
    assert num_parameters({**TINY, **more}) == parameters


def test_embeddings_that_the_whole_model_ties_are_counted_once() -> None:
    tied = {"text_config": TINY, "tie_word_embeddings": True}
    assert num_parameters(tied) == num_parameters({**TINY, "tie_word_embeddings": True})


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3"])
def test_a_size_that_is_no_positive_whole_number_gives_no_figure(size: object) -> None:
    assert num_parameters({**TINY, "hidden_size": size}) is None


@pytest.mark.parametrize(
    ("trainer", "on_device", "in_host", "words"),
    [
        ({"backend": "torch"}, 16e9, 0, "1G parameters x 16 bytes"),
        ({"backend": "fsdp", "ranks": 4}, 4e9, 0, "1G parameters x 16 bytes / 4 ranks"),
        ({"backend": "fsdp", "ranks": 2, "fsdp": {"cpu_offload": True}}, 0, 8e9,
         "1G parameters x 16 bytes / 2 ranks, in host memory"),
        ({"backend": "fsdp", "ranks": 8, "fsdp": {"replicas": 2}}, 4e9, 0,
         "1G parameters, 1/4 on each rank of 2 replicas"),
        ({"backend": "fsdp", "ranks": 2, "fsdp": {"replicas": 2, "cpu_offload": True}}, 0, 16e9,
         "1G parameters, 1/1 on each rank of 2 replicas, in host memory"),
        ({"backend": "torch", "fsdp": {"cpu_offload": True}}, 16e9, 0, "1G parameters x 16 bytes"),
        ({"backend": "auto"}, 16e9, 0, "1G parameters x 16 bytes"),
        ({"backend": "deepspeed", "deepspeed": {"stage": 1}}, 16e9, 0, "1G parameters, ZeRO 1 over 1 rank"),
        ({"backend": "deepspeed", "ranks": 2, "deepspeed": {"stage": 1}}, 12e9, 0, ZERO_ON_TWO.format(1)),
        ({"backend": "deepspeed", "ranks": 2, "deepspeed": {"stage": 2}}, 10e9, 0, ZERO_ON_TWO.format(2)),
        ({"backend": "deepspeed", "ranks": 2, "deepspeed": {"stage": 3}}, 8e9, 0, ZERO_ON_TWO.format(3)),
        ({"backend": "deepspeed", "ranks": 2, "deepspeed": {"stage": 2, "offload_optimizer": True}}, 6e9, 4e9,
         ZERO_ON_TWO.format(2)),
        ({"backend": "deepspeed", "ranks": 2, "deepspeed": {"stage": 3, "offload_optimizer": True,
          "offload_param": True}}, 2e9, 6e9, ZERO_ON_TWO.format(3)),
    ],
)  # fmt: skip
def test_the_state_of_a_rank_is_divided_as_its_backend_divides_it(
    trainer: dict[str, Any], on_device: float, in_host: float, words: str
) -> None:
    config = make(trainer={"device": "cuda", **trainer})
    state = trainer_state(config, 1e9)
    assert (state.device_bytes, state.host_bytes, state.words) == (on_device, in_host, words)


@pytest.mark.parametrize(
    ("backend", "device", "parameters", "is_moved"),
    [
        ("auto", "cuda", 300e9 / 16, False), ("auto", "cuda", 301e9 / 16, True), ("auto", "cpu", 301e9 / 16, False),
        ("torch", "cuda", 301e9 / 16, False),
    ],
)  # fmt: skip
def test_auto_moves_to_host_memory_what_no_gpu_holds(
    backend: str, device: str, parameters: float, is_moved: bool
) -> None:
    state = trainer_state(make(trainer={"device": device, "backend": backend}), parameters)
    assert (state.host_bytes > 0) == is_moved
    assert state.device_bytes + state.host_bytes == parameters * 16


def problem_with(parameters: float, device_bytes: float | None, **trainer: Any) -> Any:
    config = make(trainer={"device": "cuda", **trainer})
    return memory_problem(config, trainer_state(config, parameters), device_bytes)


def test_a_state_that_just_fits_is_no_problem_and_the_remedy_names_ranks_that_are_enough() -> None:
    assert problem_with(1e9, 16e9, backend="torch") is None
    found = problem_with(1e9, 15e9, backend="torch")
    assert found.keys == ("trainer.backend", "trainer.ranks", "model.path")
    assert found.remedy == "set trainer.backend: fsdp and trainer.ranks: 2 or more, or use a smaller model"
    assert "ranks: 4 or more" in problem_with(1e9, 4e9, backend="fsdp", ranks=2).remedy
    assert problem_with(1e9, 4e9, backend="fsdp", ranks=4) is None
    assert "ranks: 9 or more" in problem_with(1e9, 6e9, backend="fsdp", ranks=3, fsdp={"replicas": 3}).remedy
    assert problem_with(1e9, 6e9, backend="fsdp", ranks=9, fsdp={"replicas": 3}) is None
    assert problem_with(300e9 / 16, None, backend="torch") is None
    assert problem_with(301e9 / 16, None, backend="torch") is not None


def test_auto_is_no_problem_where_the_device_is_known_since_it_moves_what_does_not_fit() -> None:
    assert problem_with(1e9, 1e9, backend="auto") is None
    assert problem_with(301e9 / 16, None, backend="auto") is None


def test_host_memory_holds_all_ranks_that_keep_their_state_there() -> None:
    offloaded = make(trainer={"device": "cuda", "backend": "fsdp", "ranks": 2, "fsdp": {"cpu_offload": True}})
    state = trainer_state(offloaded, 1e9)
    assert host_problem(offloaded, state, 16e9) is None
    found = host_problem(offloaded, state, 15e9)
    assert found is not None
    assert found.keys == ("trainer.ranks", "trainer.device", "model.path")
    assert "take 16 GB of host memory (1G parameters x 16 bytes / 2 ranks, in host memory)" in found.what
    on_cpu = make(trainer={"device": "cpu"})
    assert host_problem(on_cpu, trainer_state(on_cpu, 1e9), 16e9) is None
    assert host_problem(on_cpu, trainer_state(on_cpu, 1e9), 15e9) is not None
    on_gpu = make(trainer={"device": "cuda", "backend": "torch"})
    assert host_problem(on_gpu, trainer_state(on_gpu, 1e9), 1.0) is None
    emulated = make(trainer__device="cpu", emulation={"model": "32b"})
    assert host_problem(emulated, trainer_state(emulated, 1e9), 1.0) is None


def test_a_model_that_is_here_counts_by_its_own_sizes_and_not_by_its_name() -> None:
    named = make(model={"path": "/models/Qwen3-8B"})
    assert parameters_of(named, TINY) == num_parameters(TINY)
    assert parameters_of(named, None) == pytest.approx(8.19e9, rel=0.03)
    made = make(model={"init": {"model_type": "llama", **TINY}, "tokenizer": "bytes"})
    assert parameters_of(made, None) == num_parameters(TINY)
