"""Several adapters on one base in one engine: rows of different adapters in one batch, and what they share."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError
from areal_like.weights.adapter_folder import read_adapter
from rollout.config import EngineSettings
from rollout.engine.adapter_layout import fused_parameters, product_widths
from rollout.engine.frozen import FrozenEngine

TOLERANCE = 1e-4
MIXED = ["one", "", "two", "one", "two", ""]
FAMILIES = [
    ("qwen3", {}),
    ("qwen2", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 8}),  # not a lean one
]


def with_adapters(kit: Any, family: str = "qwen3", **config: Any) -> Any:
    """A tiny model with two adapters of different ranks, on different modules."""
    bench = kit.bench(family, **config)
    bench.models[0].save_pretrained(bench.root / "model")
    bench.add_adapter("one", 1)
    bench.add_adapter("two", 2, r=3, use_rslora=True, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    return bench


def worst_error(bench: Any, request: Any, segment: Any) -> float:
    """Largest difference between the recorded log-probs and those of peft."""
    said = bench.logprobs(request.adapter or 0, request.prompt_P, segment.tokens_R, request.sampling.temperature)
    return float(np.abs(said - segment.logprobs_R).max())


def asks(kit: Any, adapters: list[str], **fields: Any) -> list[Any]:
    """Requests with these adapters, greedy and sampled in turn, of different lengths."""
    return [
        kit.ask(i, prompt_length=3 + 2 * i, max_new_tokens=12 + i, temperature=float(i % 2), adapter=adapter, **fields)
        for i, adapter in enumerate(adapters)
    ]


@pytest.mark.parametrize(("family", "config"), FAMILIES)
def test_a_batch_of_two_adapters_and_the_base_has_the_log_probs_of_peft(
    kit: Any, family: str, config: dict[str, Any]
) -> None:
    bench = with_adapters(kit, family, **config)

    async def body() -> None:
        async with bench.engine(num_slots=6) as engine:
            requests = asks(kit, MIXED)
            outcomes = await kit.generate_all(engine, requests)
            for request, outcome in zip(requests, outcomes, strict=True):
                assert worst_error(bench, request, outcome.segment) < TOLERANCE, request.adapter
            answers = [outcome.segment.tokens_R for outcome in outcomes]
            for name, other in itertools.combinations(("", "one", "two"), 2):
                wrong = bench.logprobs(
                    other or 0, requests[MIXED.index(name)].prompt_P, answers[MIXED.index(name)], 1.0
                )
                assert np.abs(wrong - outcomes[MIXED.index(name)].segment.logprobs_R).max() > 100 * TOLERANCE

    kit.run(body())


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_answers_do_not_depend_on_the_adapters_of_their_neighbours(kit: Any, family: str) -> None:
    bench = with_adapters(kit, family)

    async def body() -> None:
        async with bench.engine(num_slots=6) as engine:
            together = await kit.generate_all(engine, asks(kit, MIXED))
            for request, mixed in zip(asks(kit, MIXED), together, strict=True):
                (alone,) = await kit.generate_all(engine, [request])
                assert alone.segment.tokens_R.tolist() == mixed.segment.tokens_R.tolist()
                np.testing.assert_allclose(alone.segment.logprobs_R, mixed.segment.logprobs_R, atol=1e-5)

    kit.run(body())


def test_rows_keep_their_adapters_when_more_requests_than_slots_end_and_move(kit: Any) -> None:
    bench = with_adapters(kit)
    adapters = [("", "one", "two")[number % 3] for number in range(24)]

    async def body() -> None:
        async with bench.engine(num_slots=5) as engine:
            requests = [
                kit.ask(i, prompt_length=2 + (7 * i) % 30, max_new_tokens=1 + (11 * i) % 40, adapter=adapter)
                for i, adapter in enumerate(adapters)
            ]
            for request, outcome in zip(requests, await kit.generate_all(engine, requests), strict=True):
                assert worst_error(bench, request, outcome.segment) < TOLERANCE
            assert engine.counters()["moved_rows"] > 0

    kit.run(body())


def test_a_prompt_is_copied_between_rows_of_one_adapter_only(kit: Any) -> None:
    bench = with_adapters(kit)
    prompt = np.arange(20, dtype=np.int32)

    async def body() -> None:
        async with bench.engine(num_slots=6) as engine:
            requests = asks(kit, MIXED, prompt_P=prompt, share_key=3)
            tasks = await kit.start(engine, requests, 1)
            await engine.resume()
            for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
                assert worst_error(bench, request, outcome.segment) < TOLERANCE
            counts = engine.counters()
            copies = sum(number - 1 for number in Counter(MIXED).values())
            assert counts["shared_prefill_tokens"] == copies * (len(prompt) - 1)
            assert counts["prefill_tokens"] == len(set(MIXED)) * (len(prompt) - 1)

    kit.run(body())


def test_a_conversation_continues_the_keys_and_values_of_its_own_adapter_only(kit: Any) -> None:
    bench = with_adapters(kit)

    async def body() -> None:
        async with bench.engine(num_slots=2) as engine:
            known, kept = np.arange(9, dtype=np.int32), []
            for turn, adapter in enumerate(("one", "two", "", "one", "two", "")):
                request = kit.ask(turn, prompt_P=known, max_new_tokens=5, session_key=7, adapter=adapter)
                (outcome,) = await kit.generate_all(engine, [request])
                assert worst_error(bench, request, outcome.segment) < TOLERANCE
                kept.append(engine.counters()["kept_prefill_tokens"])
                known = np.concatenate((known, outcome.segment.tokens_R))
            assert kept[:3] == [0, 0, 0], "other adapters have other keys and values"
            assert np.diff(kept[2:]).tolist() == [13, 18, 23], "what each of them had after its last turn"
            engine.end_session(7)
            await kit.until(lambda: not len(engine._core.sessions))

    kit.run(body())


@pytest.mark.parametrize(("family", "config"), [FAMILIES[0], FAMILIES[3]])
def test_log_probs_of_given_tokens_are_those_of_the_named_adapter(
    kit: Any, family: str, config: dict[str, Any]
) -> None:
    bench = with_adapters(kit, family, **config)
    tokens = np.random.default_rng(1).integers(0, 24, 40).astype(np.int32)

    async def body() -> None:
        settings = EngineSettings(device="cpu", num_slots=4, max_context=128)
        engine = FrozenEngine(
            bench.root / "model", settings, dtype="float32", num_threads=1, adapters=bench.adapters
        )  # fmt: skip
        await engine.start()
        try:
            await engine.load_folder(0)
            for adapter in ("", "one", "two"):
                found, _ = await engine.logprobs(tokens[:7], tokens[7:], 0.5, adapter=adapter)
                expected = bench.logprobs(adapter or 0, tokens[:7], tokens[7:], 0.5)
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)
            with pytest.raises(UserError, match="the engine has no adapter three -> use one of one, two"):
                await engine.logprobs(tokens[:7], tokens[7:], adapter="three")
            with pytest.raises(UserError, match="the engine has no adapter three"):
                await engine.generate(kit.ask(1, adapter="three"))
        finally:
            await engine.close()

    kit.run(body())


def test_an_engine_without_adapters_refuses_a_request_that_names_one(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine() as engine:
            with pytest.raises(
                UserError, match="the engine has no adapter one -> configure this adapter; the engine has none"
            ):
                await engine.generate(kit.ask(1, adapter="one"))

    kit.run(body())


def test_adapters_take_their_own_memory_and_no_second_base(kit: Any) -> None:
    bench = with_adapters(kit)
    shape = bench.config
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    widths = product_widths(shape.hidden_size, queries, keys, shape.intermediate_size)

    async def num_bytes() -> int:
        async with bench.engine() as engine:
            return int(engine._core.decoder.num_bytes)

    with_both = kit.run(num_bytes())
    expected = 4 * fused_parameters([read_adapter(folder) for folder in bench.adapters.values()], widths)
    bench.adapters.clear()
    assert with_both - kit.run(num_bytes()) == expected


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_new_version_of_the_base_keeps_the_adapters(kit: Any, family: str) -> None:
    bench = with_adapters(kit, family)
    bench.add_other(1)

    async def body() -> None:
        async with bench.engine() as engine:
            await engine.load_version(bench.manifests[1], "recompute")
            request = kit.ask(1, adapter="one")
            (outcome,) = await kit.generate_all(engine, [request])
            moved = bench.models["one"].get_base_model()
            with torch.no_grad():
                weights = dict(bench.models[1].named_parameters())
                for name, parameter in moved.named_parameters():
                    if "lora" not in name:
                        parameter.copy_(weights[name.replace(".base_layer", "")])
            assert worst_error(bench, request, outcome.segment) < TOLERANCE

    kit.run(body())


def rewritten(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace one tensor of an adapter, or remove it."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {f"{Q}.lora_B.weight": torch.full((32, 4), torch.nan)},
            "self_attn.q_proj contains a value that is not finite",
        ),
        ({f"{Q}.lora_B.weight": torch.zeros(40, 4)}, "q_proj has 40 x 32 weights, but here it has 32 x 32"),
        ({f"{Q}.lora_A.weight": torch.zeros(5, 32)}, r"shapes \[5, 32\] and \[32, 4\], which do not fit rank 4"),
        (
            {f"{Q[:-7]}.z.lora_A.weight": torch.zeros(4, 32), f"{Q[:-7]}.z.lora_B.weight": torch.zeros(32, 4)},
            "the base model has no linear module model.layers.0.self_attn.z",
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_an_adapter_that_does_not_fit_the_base_is_a_mistake_of_the_user(
    kit: Any, family: str, tensors: dict[str, torch.Tensor], words: str
) -> None:
    bench = kit.bench(family)
    folder = bench.add_adapter("one", 1)
    for name, tensor in tensors.items():
        rewritten(folder, name, tensor)

    async def body() -> None:
        with pytest.raises(UserError, match=words):
            async with bench.engine():
                pass

    kit.run(body())


def test_a_module_that_is_not_a_linear_one_is_refused(kit: Any) -> None:
    bench = kit.bench("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=24, n_positions=128)
    folder = bench.add_adapter("one", 1, target_modules=["attn.c_proj"], fan_in_fan_out=True)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "fan_in_fan_out": False}))

    async def body() -> None:
        with pytest.raises(UserError, match=r"transformer.h.0.attn.c_proj of the base model is not a linear module"):
            async with bench.engine():
                pass

    kit.run(body())
