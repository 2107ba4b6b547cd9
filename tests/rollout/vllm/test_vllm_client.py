"""Claims about vLLM's events and about the probe prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.errors import EngineError, WeightError
from rollout.engine.server.answer import StreamEvent
from rollout.engine.server.http import ServerGone, ServerRefused
from rollout.engine.vllm.client import EventMaker
from rollout.engine.vllm.probe import Probe, ProbeMaker


def line(tokens: list[int], finish: str | None = None, **more: Any) -> bytes:
    content = [{"token_id": one, "logprob": -one / 10, "rank": 1, "top_logprobs": []} for one in tokens]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": finish, **more}
    return json.dumps({"request_id": "x", "choices": [choice]}).encode()


USAGE = json.dumps(
    {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
).encode()


def test_events_carry_new_tokens_and_the_last_one_spans_and_counts() -> None:
    maker = EventMaker()
    first = maker.take(line([3, 4]), "7")
    assert isinstance(first, StreamEvent)
    assert (first.output_ids, first.meta_info.completion_tokens, first.meta_info.weight_version) == ((3, 4), 2, "7")
    assert first.meta_info.output_token_logprobs == ((-0.3, 3, None), (-0.4, 4, None))
    assert first.meta_info.finish_reason is None
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    assert maker.take(line([5], "stop", weight_versions=spans), "8") is None
    assert not maker.is_complete
    last = maker.take(USAGE, "8")
    assert last is not None
    assert maker.is_complete
    meta = last.meta_info
    assert (meta.completion_tokens, meta.prompt_tokens, meta.cached_tokens) == (3, 9, 4)
    assert [(span.version, span.start, span.end) for span in meta.weight_versions] == [("7", 0, 2), ("8", 2, 3)]
    assert meta.finish_reason is not None
    assert meta.finish_reason.type == "stop"


def test_kinds_of_errors_are_distinguished() -> None:
    with pytest.raises(ServerRefused):
        EventMaker().take(b'{"error": {"message": "too long", "code": 400}}', "1")
    with pytest.raises(ServerGone, match="Internal server error"):
        EventMaker().take(b'{"error": {"message": "Internal server error", "code": 500}}', "1")
    with pytest.raises(EngineError, match="invalid event"):
        EventMaker().take(b"<html>", "1")


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_probe_has_the_log_probs_of_the_published_tensors(tmp_path: Path, is_tied: bool) -> None:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=16, tie_word_embeddings=is_tied,
    )  # fmt: skip
    made = ProbeMaker(config)
    probes = []
    for version in (0, 1):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data.mul_(30.0 if parameter.ndim > 1 else 1.0)
        save_file(
            {name: one.detach().clone() for name, one in model.named_parameters()}, tmp_path / "model.safetensors"
        )
        probe = made.make(version, tmp_path)
        ids = torch.tensor([probe.tokens])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(torch.tensor(probe.logprobs), logprobs, atol=1e-5)
        probes.append(probe)
    assert (len(probes[0].tokens), len(probes[0].logprobs)) == (16, 15)
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"version 2 does not fit the model: the version has no tensor model\.embed"):
        made.make(2, tmp_path)
    more = {"model.more.weight": torch.zeros(8), **dict(model.named_parameters())}
    save_file({name: one.detach().clone() for name, one in more.items()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"version 3 does not fit the model: the model has no tensor model\.more"):
        made.make(3, tmp_path)


def test_a_probe_refuses_a_server_with_other_weights_or_no_numbers() -> None:
    class Client:
        def __init__(self, answer: list[float]) -> None:
            self.answer = answer

        async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
            return self.answer

    probe = Probe(3, (1, 2, 3), (-1.0, -2.0))
    asyncio.run(probe.check(Client([-1.0, -2.0005])))  # type: ignore[arg-type]
    for answer in ([-1.0, -2.1], [-1.0, float("nan")]):
        with pytest.raises(WeightError, match="from those of version 3"):
            asyncio.run(probe.check(Client(answer)))  # type: ignore[arg-type]
