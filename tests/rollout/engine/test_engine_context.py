"""Contexts that a model's rotary embedding covers exactly, up to the last position; others are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError

ORIGINAL = 32
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [3.0, 4.0, 5.0, 6.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generic decoder, longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL, "sliding_window": None},
    ),
    "lean decoder, longrope": ("llama", {"rope_parameters": LONGROPE}),
    "generic decoder, dynamic": ("gemma", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    "lean decoder, dynamic": ("qwen3", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_logprobs_are_exact_up_to_the_last_position_of_the_original_context(kit: Any, case: str) -> None:
    model_type, config = CASES[case]
    bench = kit.bench(model_type, **config)
    requests = [kit.ask(i, prompt_length=length, max_new_tokens=ORIGINAL) for i, length in enumerate((1, 9, 25))]

    async def body() -> None:
        async with bench.engine(num_slots=3, max_context=ORIGINAL) as engine:
            assert engine.capabilities.max_context == ORIGINAL
            outcomes = await kit.generate_all(engine, requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert len(request.prompt_P) + len(outcome.segment) == ORIGINAL
            assert bench.worst_error(request, outcome.segment) < 1e-4

    kit.run(body())


@pytest.mark.parametrize("case", list(CASES))
def test_a_context_beyond_the_original_one_is_refused(kit: Any, case: str) -> None:
    model_type, config = CASES[case]
    bench = kit.bench(model_type, **config)

    async def body() -> None:
        async with bench.engine(max_context=ORIGINAL + 1):
            raise AssertionError("it started")

    with pytest.raises(UserError, match=r"rollout.engine.max_context: 33 is more than 32 positions.*log-probs"):
        kit.run(body())
