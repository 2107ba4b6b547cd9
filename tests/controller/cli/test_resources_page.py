"""Claims about what `validate` says of memory, hours and cost."""

from __future__ import annotations

from typing import Any

from valid_config import make

from controller.cli.resources_page import resource_lines
from controller.preflight.found import Preflight


def page(price: float | None = None, lengths: str = "", **changes: Any) -> str:
    found = Preflight(device_bytes=80e9)
    return "\n".join(resource_lines(make(**changes), found, price=price, lengths=lengths))


GPUS: dict[str, Any] = {
    "model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"}, "hardware__gpu": "h100", "num_steps": 100,
    "rollout": {"num_workers": 4, "engine": {"kind": "sglang", "device": "cuda", "max_context": 1024}},
    "trainer": {"device": "cuda:4", "backend": "fsdp", "ranks": 4, "micro_batch_tokens": 2048,
                "gradient_checkpointing": True},
    "groups_per_step": 16, "sampling__max_new_tokens": 512,
}  # fmt: skip


def test_every_kind_of_process_is_a_line_with_its_parts_and_hours_have_a_cost_where_a_price_is_given() -> None:
    words = page(price=2.5, **GPUS)
    for expected in ("trainer ranks 0 to 3", "4 rollout workers", "host, all processes", "of 80 GB",
                     "weights, gradients, AdamW 32.8 GB", "8 h100", "h to the end", "at 2.5 per GPU-hour"):  # fmt: skip
        assert expected in words, words
    assert "GPU-hour;" not in page(**GPUS)
    assert "answers log-normal 300" in page(lengths="300", **GPUS)


def test_on_a_cpu_memory_is_estimated_and_hours_are_not() -> None:
    init = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96}  # fmt: skip
    words = page(model={"init": init, "tokenizer": "bytes"})
    assert "1 trainer" not in words
    assert "trainer rank  " in words
    assert (
        "not estimated: rollout.engine.device, trainer.device: the engine and the trainer must both run on GPUs"
        in words
    )
    assert "CUDA" not in words


def test_a_model_of_unknown_sizes_is_said_to_be_unknown() -> None:
    assert page(model={"path": "someone/something"}) == (
        "# Memory is not estimated: the sizes of the model are not known here"
    )
    assert page(**{**GPUS, "emulation": {"model": "32b"}}) == ""
