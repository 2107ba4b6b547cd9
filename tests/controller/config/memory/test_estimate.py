"""Claims about the estimate of a whole run: what each process holds, and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from valid_config import make

from areal_like.decoder_shape import PUBLIC_SHAPES, shape_of
from controller.config.memory.estimate import (
    cache_token_bytes,
    estimate,
    host_memory,
    pass_of,
    rollout_memory,
    shape_of_run,
    trainer_memory,
)
from controller.config.memory.passes import layer_activation_bytes

SHAPE = PUBLIC_SHAPES["Qwen/Qwen3-8B"]
N = SHAPE.parameters
GPU = {"device": "cuda", "precision": "bfloat16", "gradient_checkpointing": True}


def test_one_rank_holds_all_of_the_state_and_the_cast_weights() -> None:
    (rank,) = trainer_memory(make(model__path="Qwen/Qwen3-8B", model__init=None, trainer=GPU), SHAPE)
    assert rank.parts["weights, gradients, AdamW"] == 16 * N
    assert rank.parts["gathered or cast"] == 2 * SHAPE.layers * SHAPE.layer_matrix_parameters
    assert rank.needed_bytes == rank.total_bytes > 16 * N
    assert "reference model" not in rank.parts


def test_an_adapters_base_has_no_gradients_no_moments_and_is_its_own_reference() -> None:
    lora = {"rank": 8, "targets": ["q_proj", "model.layers.0.mlp.down_proj"]}
    config = make(trainer={**GPU, "lora": lora, "loss": {"kl_coef": 0.1}, "checkpoint": {"every_steps": 5}})
    adapter = 8 * SHAPE.layers * (2 * SHAPE.hidden + SHAPE.inner + SHAPE.query_width)
    (rank,) = trainer_memory(config, SHAPE)
    assert rank.parts["weights, gradients, AdamW"] == 4 * N + 16 * adapter
    assert "reference model" not in rank.parts
    host = host_memory(config, SHAPE)
    assert (host["copy to publish"], host["checkpoint"]) == (4 * N, 12 * adapter)


def test_an_adapter_that_travels_alone_is_merged_in_the_memory_of_each_worker() -> None:
    config = make(trainer={"lora": {"rank": 8, "publish": "adapter"}}, rollout={"num_workers": 2})
    host = host_memory(config, SHAPE)
    widths = 2 * (SHAPE.hidden + SHAPE.query_width) + 2 * (SHAPE.hidden + SHAPE.key_width)
    widths += 3 * (SHAPE.hidden + SHAPE.inner)
    assert host["copy to publish"] == 4 * 8 * SHAPE.layers * widths
    assert host["merged by workers"] == 3 * 2 * 4 * N


@pytest.mark.parametrize(("backend", "share"), [("fsdp", 0.25), ("auto", 0.25), ("deepspeed", 1.0)])
def test_a_reference_model_is_sharded_if_the_backend_can(backend: str, share: float) -> None:
    config = make(trainer={**GPU, "backend": backend, "ranks": 4, "loss": {"kl_coef": 0.1}})
    assert trainer_memory(config, SHAPE)[0].parts["reference model"] == 4 * N * share


def test_an_offloaded_reference_model_is_in_host_memory() -> None:
    fsdp = {"backend": "fsdp", "ranks": 4, "fsdp": {"cpu_offload": True}}
    config = make(trainer={**GPU, **fsdp, "loss": {"kl_coef": 0.1}})
    assert "reference model" not in trainer_memory(config, SHAPE)[0].parts
    assert host_memory(config, SHAPE)["fixed models"] == 4 * N


def test_online_dpo_holds_a_reference_model_and_distillation_its_teacher(tmp_path: Path) -> None:
    loss = {"weight": {"mode": "off"}, "aggregation": "constant"}
    (rank,) = trainer_memory(make(trainer={**GPU, "advantage": {"kind": "online_dpo"}, "loss": loss}), SHAPE)
    assert rank.parts["reference model"] == 4 * N
    teacher = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(teacher))
    settings = {**GPU, "advantage": {"kind": "distillation"}, "teacher": {"path": str(tmp_path)}}
    (rank,) = trainer_memory(make(trainer=settings), SHAPE)
    expected = shape_of(teacher)
    assert expected is not None
    assert rank.parts["teacher"] == 4 * expected.parameters
    assert "reference model" not in rank.parts


def test_fsdp_ranks_share_the_state_and_gather_two_layers_and_the_embeddings() -> None:
    config = make(trainer={**GPU, "backend": "fsdp", "ranks": 8, "micro_batch_tokens": 65536}, group_size=128)
    (ranks,) = trainer_memory(config, SHAPE)
    assert (ranks.name, ranks.count) == ("trainer ranks 0 to 7", 8)
    assert ranks.parts["weights, gradients, AdamW"] == 2 * N
    head = SHAPE.vocabulary * SHAPE.hidden
    assert ranks.parts["gathered or cast"] == 2 * (2 * SHAPE.layer_parameters + SHAPE.outer_parameters + head)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 6), ("bfloat16", 4)])
def test_with_few_tokens_most_is_needed_while_a_layers_gradient_is_summed(dtype: str, num_bytes: int) -> None:
    trainer = {**GPU, "gradient_checkpointing": False, "backend": "fsdp", "micro_batch_tokens": 512}
    config = make(trainer={**trainer, "ranks": 8, "fsdp": {"reduce_dtype": dtype}}, rollout__engine__max_context=512)
    (ranks,) = trainer_memory(config, replace(SHAPE, vocabulary=1000))
    layer = layer_activation_bytes(SHAPE, pass_of(config))
    assert ranks.parts["gradients being summed"] == num_bytes * SHAPE.layer_parameters
    assert ranks.parts["activations"] == pytest.approx((SHAPE.layers - 2) * layer + 16 * 512 * SHAPE.hidden)


def test_replicas_do_not_divide_state_or_reference_and_a_checkpoint_has_one_of_them() -> None:
    trainer = {**GPU, "backend": "fsdp", "ranks": 8, "loss": {"kl_coef": 0.1}}
    one, four = (make(trainer={**trainer, "fsdp": {"replicas": replicas}}) for replicas in (1, 4))
    (ranks,), (replicated,) = trainer_memory(one, SHAPE), trainer_memory(four, SHAPE)
    for part in ("weights, gradients, AdamW", "reference model"):
        assert replicated.parts[part] == 4 * ranks.parts[part]
    assert replicated.parts["gathered or cast"] == ranks.parts["gathered or cast"]
    assert host_memory(four, SHAPE)["checkpoint"] == host_memory(one, SHAPE)["checkpoint"]


def test_ranks_that_split_matrices_divide_these_and_keep_the_rest_in_full() -> None:
    trainer = {**GPU, "backend": "fsdp", "ranks": 8, "loss": {"kl_coef": 0.1}, "micro_batch_tokens": 65536}
    plain, split = (make(trainer={**trainer, "tensor_parallel": tensor}, group_size=128) for tensor in (1, 4))
    (ranks,), (splitting,) = trainer_memory(plain, SHAPE), trainer_memory(split, SHAPE)
    matrices = SHAPE.layers * SHAPE.layer_matrix_parameters
    own = matrices / 8 + (N - matrices) / 2
    assert splitting.parts["weights, gradients, AdamW"] == pytest.approx(16 * own)
    assert splitting.parts["reference model"] == pytest.approx(4 * own)
    assert splitting.parts["gathered or cast"] < ranks.parts["gathered or cast"]
    assert pass_of(split).tokens == pass_of(plain).tokens / 4
    assert pass_of(split).gathered_tokens == pass_of(plain).tokens * 3 / 4


def test_rank_0_of_fsdp_collects_full_weights_only_to_merge_an_adapter() -> None:
    fsdp = {**GPU, "backend": "fsdp", "ranks": 8, "micro_batch_tokens": 2048}
    (ranks,) = trainer_memory(make(trainer=fsdp), SHAPE)
    assert (ranks.name, ranks.count) == ("trainer ranks 0 to 7", 8)
    leader, others = trainer_memory(make(trainer={**fsdp, "lora": {"publish": "merged"}}), SHAPE)
    assert (leader.name, others.name, others.count) == ("trainer rank 0", "trainer ranks 1 to 7", 7)
    assert leader.parts["full weights"] == 4 * N
    assert others.total_bytes < leader.total_bytes


@pytest.mark.parametrize(
    ("deepspeed", "stage_bytes"),
    [({"stage": 1}, 4 + 4 + 1 + 0.5), ({"stage": 2}, 4 + 0.5 + 1 + 0.5), ({"stage": 3}, 0.5 + 0.5 + 1 + 0.5)],
)
def test_zero_keeps_a_copy_of_its_part_and_a_bucket(deepspeed: dict[str, Any], stage_bytes: float) -> None:
    config = make(trainer={**GPU, "precision": "float32", "backend": "deepspeed", "ranks": 8, "deepspeed": deepspeed,
                           "micro_batch_tokens": 65536}, group_size=512)  # fmt: skip
    (ranks,) = trainer_memory(config, SHAPE)
    buffers = 4 * 5e8 + (4 * 1e9 if deepspeed["stage"] == 3 else 0)
    state = ranks.parts["weights, gradients, AdamW"] + ranks.parts["gathered or cast"]
    assert state == pytest.approx(stage_bytes * N + buffers)


def test_a_micro_batch_holds_the_longest_sequence_and_never_more_than_a_rank_gets() -> None:
    assert pass_of(make(trainer__micro_batch_tokens=100, rollout__engine__max_context=500)).tokens == 500
    few = make(trainer__micro_batch_tokens=100_000, groups_per_step=2, group_size=2, rollout__engine__max_context=500)
    assert pass_of(few).tokens == 2000


def test_the_embedded_engine_holds_two_sets_of_weights_and_its_whole_cache() -> None:
    engine = {"device": "cuda", "num_slots": 64, "max_context": 4096}
    model = {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}
    config = make(model=model, rollout={"num_workers": 7, "engine": engine})
    workers = rollout_memory(config, SHAPE)
    assert cache_token_bytes(config, SHAPE) == 2 * 36 * 8 * 128 * 2
    assert workers.parts == {"weights": 2 * N, "next weights": 2 * N, "KV cache": 147456 * 64 * 4096}
    assert (workers.name, workers.count, workers.needed_bytes) == ("rollout workers", 7, workers.total_bytes)


def test_sglang_fills_its_share_and_needs_weights_and_one_longest_sequence() -> None:
    engine = {"kind": "sglang", "device": "cuda", "max_context": 4096, "sglang": {"tp_size": 2, "memory_fraction": 0.8}}
    config = make(model={"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}, rollout__engine=engine)
    workers = rollout_memory(config, SHAPE, 80e9)
    assert workers.parts["weights"] == N
    assert workers.total_bytes == pytest.approx(80e9)
    assert workers.needed_bytes == pytest.approx((N + 147456 * 4096 / 2) / 0.8)
    assert "a cache of" in workers.words


def test_in_host_memory_are_the_versions_kept_the_checkpoint_and_the_models_that_ranks_load() -> None:
    config = make(model={"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
                  trainer={**GPU, "backend": "fsdp", "ranks": 4, "weights": {"kind": "shm", "keep": 3}})  # fmt: skip
    host = host_memory(config, SHAPE)
    assert host == {"copy to publish": 2 * N, "versions kept": 6 * N, "checkpoint": 12 * N}
    none = make(trainer={**GPU, "backend": "fsdp", "ranks": 16, "weights": {"kind": "disk"},
                         "checkpoint": {"every_steps": 0}})  # fmt: skip
    assert host_memory(none, SHAPE) == {"copy to publish": 4 * N}, "each rank reads its part"
    whole = none.model_copy(update={"trainer": none.trainer.model_copy(update={"backend": "deepspeed"})})
    assert host_memory(whole, SHAPE)["loading"] == 60 * N


def test_earlier_versions_and_gradients_are_in_host_memory_within_the_limit_of_each_rank() -> None:
    past = {"keep": 5, "memory_mb": 1e6}
    config = make(model={"dtype": "bfloat16"}, trainer={"version_logprobs": past, "gradient_cosine": {}})
    host = host_memory(config, SHAPE)
    assert host["earlier versions"] == (2 + 4) * 2 * N
    assert host["earlier gradient"] == 4 * N
    past["memory_mb"] = 100.0
    config = make(model={"dtype": "bfloat16"}, trainer={"version_logprobs": past, "backend": "fsdp", "ranks": 2})
    assert host_memory(config, SHAPE)["earlier versions"] == 4 * N + 2 * 100e6
    two = {"backend": "fsdp", "ranks": 4, "fsdp": {"replicas": 2}}
    config = make(model={"dtype": "bfloat16"}, trainer={"version_logprobs": past, **two})
    assert host_memory(config, SHAPE)["earlier versions"] == 8 * N + 4 * 100e6
    config = make(trainer={"version_logprobs": {"keep": 3}, "lora": {"rank": 8, "targets": ["q_proj"]}})
    adapter = 8 * SHAPE.layers * (SHAPE.hidden + SHAPE.query_width)
    assert host_memory(config, SHAPE)["earlier versions"] == (2 + 2) * 4 * adapter
    assert "earlier versions" not in host_memory(make(), SHAPE)


def test_the_shape_is_that_of_the_folder_else_of_the_name_else_of_init() -> None:
    named = make(model={"path": "Qwen/Qwen3-8B"})
    assert shape_of_run(named, None) == SHAPE
    assert shape_of_run(named, {"hidden_size": 8}) is None
    assert shape_of_run(make(model={"path": "someone/something"}), None) is None
    made = shape_of_run(make(), None)
    assert made is None, "the init of these tests has no inner width"
    init = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96}  # fmt: skip
    with_sizes = shape_of_run(make(model={"init": init, "tokenizer": "characters:running_sum"}), None)
    assert with_sizes is not None
    assert with_sizes.vocabulary == 259
    assert estimate(make(model={"init": init, "tokenizer": "bytes"}), with_sizes).host_bytes > 0


def test_ranks_that_share_sequences_each_hold_a_part_of_the_activations() -> None:
    trainer = {"backend": "fsdp", "ranks": 4, "micro_batch_tokens": 8192}
    alone, shared = (
        pass_of(make(group_size=64, trainer={**trainer, "sequence_parallel": size})).tokens for size in (1, 4)
    )
    assert alone == 4 * shared
