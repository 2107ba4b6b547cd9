"""A tiny mixture of experts behind the real SGLang server: what the trainer publishes arrives, and which experts each
token went to comes back, both against transformers. The server starts as it does for a user.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from sglang_world import CONFIG, TOLERANCE_NATS, World, ask, assert_whole

pytestmark = pytest.mark.e2e

EXPERTS, CHOSEN = 6, 2


@pytest.mark.thorough
def test_experts_are_loaded_from_stacked_tensors_and_their_routing_comes_back(tmp_path, sglang_python):
    world = World(
        tmp_path,
        {
            **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": 16, "norm_topk_prob": True,
        },
        model_type="qwen3_moe",
        num_versions=2,
    )  # fmt: skip
    world.engine = world.make(world.settings(checksums=False, routed_experts=True, environment={}))

    async def body() -> None:
        await world.engine.start()
        try:
            for version in (0, 1):  # shared memory, then safetensors
                await world.load(version)
                requests = [ask(10 * version + n) for n in range(4)]
                outcomes = await asyncio.gather(*map(world.engine.generate, requests))
                for request, outcome in zip(requests, outcomes, strict=True):
                    assert_whole(request, outcome)
                    assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
                    tokens = np.concatenate((request.prompt_P, outcome.segment.tokens_R))
                    assert outcome.routed_experts is not None
                    expected = routing(world.models[version], tokens[:-1])
                    assert np.array_equal(np.sort(outcome.routed_experts, axis=-1), expected)
        finally:
            await world.engine.close()

    world.run(body)
    world.runner.close()


@torch.inference_mode()
def routing(model, tokens: np.ndarray) -> np.ndarray:
    """[tokens, layers, CHOSEN], sorted."""
    out = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False, output_router_logits=True)
    chosen = [logits.topk(CHOSEN, dim=-1).indices.sort(dim=-1).values for logits in out.router_logits]
    return torch.stack(chosen, dim=1).numpy()
