"""Recorded log-probs are those of a transformers forward pass, for every family, batch and way of getting there."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

TOLERANCE = 1e-4
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GPT2 = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with attention bias": ("qwen3", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouped queries": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "llama, llama3 rotary": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3, yarn rotary": ("qwen3", {"rope_parameters": YARN}),
    "llama, linear rotary": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, dynamic rotary within its context": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}
GENERIC: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "mistral, sliding window": ("mistral", {"sliding_window": 8}),
    "gemma": ("gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2, sliding window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("case", [*LEAN, *GENERIC])
def test_recorded_logprobs_equal_a_transformers_forward_pass(
    kit: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, config = {**LEAN, **GENERIC}[case]
    bench = kit.bench(model_type, **config)
    lengths = (1, 2, 5, 17, 3, 9)
    requests = [
        kit.ask(i, prompt_length=length, max_new_tokens=4 + 7 * (i % 3), temperature=(1.0, 0.7, 0.0)[i % 3])
        for i, length in enumerate(lengths)
    ]

    async def body() -> None:
        async with bench.engine(num_slots=3) as engine:
            outcomes = await kit.generate_all(engine, requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert len(outcome.segment) == request.sampling.max_new_tokens
            assert outcome.end_reason == "length"
            assert bench.worst_error(request, outcome.segment) < TOLERANCE

    with caplog.at_level(logging.WARNING):
        kit.run(body())
    assert ("one sequence at a time" in caplog.text) == (case in GENERIC)


def test_greedy_answers_equal_transformers_generate(kit: Any) -> None:
    bench = kit.bench("qwen3")
    requests = [kit.ask(i, prompt_length=6, max_new_tokens=30, temperature=0.0) for i in range(4)]

    async def body() -> None:
        async with bench.engine() as engine:
            outcomes = await kit.generate_all(engine, requests)
        ids = torch.from_numpy(np.stack([request.prompt_P for request in requests]).astype(np.int64))
        mask = torch.ones_like(ids)
        generated = bench.models[0].generate(
            ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        expected = generated[:, 6:].numpy()
        assert np.array_equal(np.stack([outcome.segment.tokens_R for outcome in outcomes]), expected)

    kit.run(body())


def test_continuation_of_a_prefix_samples_what_the_whole_answer_would(kit: Any) -> None:
    bench = kit.bench("qwen3")

    async def body() -> None:
        async with bench.engine() as engine:
            whole = (await kit.generate_all(engine, [kit.ask(1, max_new_tokens=24)]))[0].segment
            prefix = type(whole)(whole.tokens_R[:10], whole.logprobs_R[:10], whole.versions_R[:10])
            request = kit.ask(1, max_new_tokens=24, prefix=prefix)
            rest = (await kit.generate_all(engine, [request]))[0].segment
        assert np.array_equal(rest.tokens_R, whole.tokens_R[10:])
        assert bench.worst_error(request, rest) < TOLERANCE

    kit.run(body())


def test_bfloat16_stays_near_the_forward_pass(kit: Any) -> None:
    bench = kit.bench("qwen3", dtype=torch.bfloat16)
    requests = [kit.ask(i, prompt_length=8) for i in range(4)]

    async def body() -> None:
        async with bench.engine() as engine:
            outcomes = await kit.generate_all(engine, requests)
        errors = [
            bench.worst_error(request, outcome.segment) for request, outcome in zip(requests, outcomes, strict=True)
        ]
        assert max(errors) < 0.6
        assert float(np.median(errors)) < 0.3

    kit.run(body())


def test_float32_payload_runs_in_bfloat16_when_the_setting_says_so(kit: Any) -> None:
    bench = kit.bench("qwen3")

    async def body() -> None:
        async with bench.engine(dtype="bfloat16") as engine:
            outcome = (await kit.generate_all(engine, [kit.ask(0)]))[0]
        assert bench.worst_error(kit.ask(0), outcome.segment) < 0.6

    kit.run(body())
