"""Versions come in at token boundaries, in three modes; nothing is lost, repeated or stamped wrongly
(`stamped-versions`, `exact-interruption`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import WeightError
from areal_like.trajectory import Segment

TOLERANCE = 1e-4


async def generate_with_loads(
    kit: Any, bench: Any, engine: Any, requests: list[Any], versions: list[int], mode: str
) -> list[Any]:
    """Outcomes of `requests`; a version is loaded after every five steps, at a token boundary of a paused engine."""
    tasks = await kit.start(engine, requests, 5)
    for version in versions:
        load = asyncio.ensure_future(engine.load_version(bench.manifests[version], mode))
        if mode == "drain":
            await kit.until(lambda: engine._swap is not None)  # it is staged, and waits for the running answers
            await engine.resume()
        report = await load
        assert report.version == engine.version == version
        assert report.stage_s > 0
        assert report.pause_s >= 0
        if version != versions[-1]:
            await kit.run_steps(engine, 5)
    await engine.resume()
    return await asyncio.gather(*tasks)


def difference(bench: Any, request: Any, segment: Any) -> float:
    """Mean |difference| in log-prob of an answer's tokens between the oldest and the newest version that sampled it."""
    oldest, newest = (
        bench.logprobs(version, request.prompt_P, segment.tokens_R)
        for version in (segment.first_version, segment.last_version)
    )
    return float(np.abs(oldest - newest).mean())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gpt2"])
def test_every_logprob_is_its_stamped_versions_when_swaps_come_in_mid_generation(kit: Any, family: str) -> None:
    gpt2 = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    bench = kit.bench(family, **(gpt2 if family == "gpt2" else {}))
    for version in (1, 2, 3):
        bench.add_other(version)
    requests = [
        kit.ask(i, prompt_length=2 + 3 * (i % 4), max_new_tokens=20 + 2 * i, share_key=i // 4, seed=i)
        for i in range(12)
    ]

    async def body() -> Any:
        async with bench.engine(num_slots=8) as engine:
            return await generate_with_loads(kit, bench, engine, requests, [1, 2, 3], "recompute")

    outcomes = kit.run(body())
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.segment) == request.sampling.max_new_tokens
        assert bench.worst_error(request, outcome.segment) < TOLERANCE
    spanning = [
        difference(bench, request, outcome.segment) > 0.1
        for request, outcome in zip(requests, outcomes, strict=True)
        if outcome.segment.first_version < outcome.segment.last_version
    ]
    assert len(spanning) >= 6
    assert all(spanning)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_swap_computes_the_prompt_of_a_group_once(kit: Any, family: str) -> None:
    """Answers of a group stand at different lengths; groups have prompts of one, seven and thirty tokens."""
    bench = kit.bench(family)
    for version in (1, 2):
        bench.add_other(version)
    lengths = (1, 7, 30)
    prompts = [np.random.default_rng(length).integers(0, kit.VOCAB, length).astype(np.int32) for length in lengths]
    requests = [
        kit.ask(i, prompt_P=prompts[i // 4], share_key=i // 4, max_new_tokens=12 + 5 * (i % 4), seed=i)
        for i in range(12)
    ]

    async def body() -> Any:
        async with bench.engine(num_slots=10) as engine:  # two come later, and borrow
            outcomes = await generate_with_loads(kit, bench, engine, requests, [1, 2], "recompute")
            return outcomes, engine.counters()

    outcomes, counters = kit.run(body())
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.segment) == request.sampling.max_new_tokens
        assert bench.worst_error(request, outcome.segment) < TOLERANCE
    # At each of two swaps ten answers run, of 4, 4 and 2 with these prompts, of which one computes all but its last.
    borrowed_at_swaps = 2 * (3 * 0 + 3 * 6 + 1 * 29)
    borrowed_at_first = 3 * 0 + 3 * 6 + 3 * 29
    assert counters["shared_prefill_tokens"] == borrowed_at_first + borrowed_at_swaps
    computed_at_swaps = [10 * tokens + sum(4 * [0] + 4 * [6] + 2 * [29]) - borrowed_at_swaps // 2 for tokens in (5, 10)]
    assert counters["prefill_tokens"] == 0 + 6 + 29 + sum(computed_at_swaps)


def test_an_answer_that_goes_on_borrows_its_groups_prompt(kit: Any) -> None:
    bench = kit.bench("qwen3")
    prompt = np.arange(1, 10, dtype=np.int32)
    prefix = Segment(np.array([4, 5, 6], np.int32), np.full(3, -1.0, np.float32), np.zeros(3, np.int32))
    requests = [
        kit.ask(i, prompt_P=prompt, share_key=3, max_new_tokens=15, **({"prefix": prefix} if i else {}))
        for i in range(3)
    ]

    async def body() -> Any:
        async with bench.engine() as engine:
            return await kit.generate_all(engine, requests), engine.counters()

    outcomes, counters = kit.run(body())
    assert (counters["prefill_tokens"], counters["shared_prefill_tokens"]) == (8 + 2 * 3, 2 * 8)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert bench.worst_error(request, outcome.segment) < TOLERANCE


def test_keys_read_by_a_prefill_stay_within_a_few_times_its_tokens(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many short answers behind a long prompt would copy the keys of all rows at once."""
    monkeypatch.setattr("rollout.engine.decoder.CPU_PREFILL_TOKENS", 64)
    bench = kit.bench("qwen3")
    bench.add_other(1)
    prompt = np.random.default_rng(0).integers(0, kit.VOCAB, 60).astype(np.int32)
    requests = [kit.ask(i, prompt_P=prompt, share_key=3, max_new_tokens=20) for i in range(16)]
    read: list[int] = []

    async def body() -> Any:
        async with bench.engine(num_slots=16) as engine:
            cache = engine._core.decoder.cache  # type: ignore[union-attr]
            honest = cache.read

            def counted(layer: int, rows_N: torch.Tensor, num_tokens: int) -> Any:
                read.append(len(rows_N) * num_tokens)
                return honest(layer, rows_N, num_tokens)

            cache.read = counted  # type: ignore[method-assign]
            return await generate_with_loads(kit, bench, engine, requests, [1], "recompute")

    for request, outcome in zip(requests, kit.run(body()), strict=True):
        assert bench.worst_error(request, outcome.segment) < TOLERANCE
    assert 64 < max(read) <= 4 * 64 + 4 * 16


def test_swaps_while_generation_runs_freely_keep_every_logprob_exact(kit: Any) -> None:
    """No pause: staging races with generation, as in a run."""
    bench = kit.bench("qwen3")
    for version in range(1, 7):
        bench.add_other(version)
    requests = [kit.ask(i, prompt_length=1 + i % 9, max_new_tokens=40 + i % 50) for i in range(48)]

    async def body() -> Any:
        async with bench.engine(num_slots=8) as engine:
            tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            for version in range(1, 7):
                await engine.load_version(bench.manifests[version], "recompute")
            return await asyncio.gather(*tasks)

    outcomes = kit.run(body())
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.segment) == request.sampling.max_new_tokens
        assert bench.worst_error(request, outcome.segment) < TOLERANCE


def test_keep_kv_goes_on_with_the_old_keys_and_values(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    requests = [kit.ask(i, prompt_length=4 + i, max_new_tokens=40) for i in range(4)]

    async def body() -> Any:
        async with bench.engine(num_slots=4) as engine:
            return await generate_with_loads(kit, bench, engine, requests, [1], "keep_kv")

    for request, outcome in zip(requests, kit.run(body()), strict=True):
        segment = outcome.segment
        assert len(segment) == 40
        num_old = int((segment.versions_R == 0).sum())
        assert num_old == 5
        old = bench.logprobs(0, request.prompt_P, segment.tokens_R)
        assert np.abs(old - segment.logprobs_R)[:num_old].max() < TOLERANCE
        # The newest old token is fed under the new weights, what came before it stays as the old ones left it.
        ids = torch.from_numpy(np.concatenate((request.prompt_P, segment.tokens_R)).astype(np.int64))[None]
        num_cached = len(request.prompt_P) + num_old - 1
        past = bench.models[0](ids[:, :num_cached], use_cache=True).past_key_values
        logits = bench.models[1](ids[:, num_cached:-1], past_key_values=past, use_cache=True).logits[0]
        expected = torch.log_softmax(logits, -1).gather(-1, ids[0, num_cached + 1 :, None])[:, 0].numpy()
        assert np.abs(expected - segment.logprobs_R[num_old:]).max() < TOLERANCE


def test_a_prompt_computed_by_old_weights_is_not_shared_after_keep_kv(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    prompt = np.arange(9, dtype=np.int32)

    async def body() -> Any:
        async with bench.engine(num_slots=4) as engine:
            owner = kit.ask(0, prompt_P=prompt, max_new_tokens=110, share_key=5)
            (old,) = await kit.start(engine, [owner], 3)
            await engine.load_version(bench.manifests[1], "keep_kv")
            new = asyncio.ensure_future(engine.generate(kit.ask(1, prompt_P=prompt, max_new_tokens=10, share_key=5)))
            await asyncio.sleep(0)
            await engine.resume()
            await old
            return await new

    assert bench.worst_error(kit.ask(1, prompt_P=prompt), kit.run(body()).segment) < TOLERANCE


def test_drain_lets_running_answers_finish_and_starts_none_before_the_swap(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    requests = [kit.ask(i, max_new_tokens=30 + i) for i in range(10)]

    async def body() -> Any:
        async with bench.engine(num_slots=4) as engine:
            return await generate_with_loads(kit, bench, engine, requests, [1], "drain")

    outcomes = kit.run(body())
    for i, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        assert set(outcome.segment.versions_R.tolist()) == {0 if i < 4 else 1}
        assert len(outcome.segment) == 30 + i
        assert bench.worst_error(request, outcome.segment) < TOLERANCE


def test_loads_asked_for_at_once_are_done_in_order_and_the_last_one_stays(kit: Any) -> None:
    bench = kit.bench("qwen3")
    for version in (1, 2, 3):
        bench.add_other(version)
    requests = [kit.ask(i, max_new_tokens=60) for i in range(4)]

    async def body() -> Any:
        async with bench.engine() as engine:
            tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            modes = ("drain", "recompute", "keep_kv")
            loads = [engine.load_version(bench.manifests[v], mode) for v, mode in zip((1, 2, 3), modes, strict=True)]
            reports = await asyncio.gather(*loads)
            assert [report.version for report in reports] == [1, 2, 3]
            assert engine.version == 3
            return await asyncio.gather(*tasks)

    assert all(len(outcome.segment) == 60 for outcome in kit.run(body()))


def test_cancelling_the_caller_of_a_load_leaves_the_engine_whole(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    bench.add_other(2)

    async def body() -> None:
        async with bench.engine() as engine:
            load = asyncio.ensure_future(engine.load_version(bench.manifests[1], "recompute"))
            await asyncio.sleep(0)
            load.cancel()
            await engine.load_version(bench.manifests[2], "recompute")
            request = kit.ask(0)
            outcome = await engine.generate(request)
            assert set(outcome.segment.versions_R.tolist()) == {2}
            assert bench.worst_error(request, outcome.segment) < TOLERANCE

    kit.run(body())


def test_going_back_to_an_older_version_ends_answers_that_have_newer_tokens(kit: Any) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(7)

    async def body() -> None:
        async with bench.engine(load=7) as engine:
            (task,) = await kit.start(engine, [kit.ask(0, max_new_tokens=110)], 3)
            await engine.load_version(bench.manifests[0], "recompute")
            outcome = await task
            assert outcome.end_reason == "cancelled"
            assert set(outcome.segment.versions_R.tolist()) == {7}
            await engine.resume()
            fresh = await engine.generate(kit.ask(1))
            assert set(fresh.segment.versions_R.tolist()) == {0}

    kit.run(body())


def _without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}


def _misshapen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": torch.ones(33)}


def _foreign(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.layers.2.mlp.up_proj.weight": torch.ones(3)}


def _not_finite(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "model.norm.weight": torch.full((32,), torch.nan)}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without, "lacks 1 tensors of this model; the first is model.layers.1.mlp.up_proj.weight"),
        (_misshapen, r"model.norm.weight has shape \(33,\), expected \(32,\)"),
        (_foreign, "that this model does not have; the first is model.layers.2.mlp.up_proj.weight"),
        (_not_finite, "model.norm.weight contains a value that is not finite"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_weights_that_do_not_fit_are_refused_and_the_old_version_goes_on(
    kit: Any, family: str, spoil: Any, words: str
) -> None:
    bench = kit.bench(family)
    manifest = kit.publish(bench.store, 1, spoil(dict(bench.models[0].named_parameters())))
    bench.add_other(2)

    async def body() -> None:
        async with bench.engine() as engine:
            task = asyncio.ensure_future(engine.generate(kit.ask(0, max_new_tokens=30)))
            with pytest.raises(WeightError, match=words):
                await engine.load_version(manifest, "recompute")
            assert engine.version == 0
            outcomes = [await task, *(await kit.generate_all(engine, [kit.ask(1)]))]
            for i, outcome in enumerate(outcomes):
                assert set(outcome.segment.versions_R.tolist()) == {0}
                assert bench.worst_error(kit.ask(i), outcome.segment) < TOLERANCE
            await engine.load_version(bench.manifests[2], "recompute")
            outcome = await engine.generate(kit.ask(3))
            assert bench.worst_error(kit.ask(3), outcome.segment) < TOLERANCE

    kit.run(body())


def test_corrupt_or_absent_payload_is_refused_and_the_old_version_goes_on(kit: Any) -> None:
    bench = kit.bench("qwen3")
    manifest = bench.add_other(1)
    payload = next(path for path in manifest.parent.glob("*.safetensors") if "v00000001" in path.name)
    damaged = bytearray(payload.read_bytes())
    damaged[-5] ^= 0x40
    payload.write_bytes(damaged)

    async def body() -> None:
        async with bench.engine() as engine:
            for path in (manifest, manifest.with_name("v00000009-l0.manifest.json")):
                with pytest.raises(WeightError):
                    await engine.load_version(path, "recompute")
            outcome = await engine.generate(kit.ask(0))
            assert set(outcome.segment.versions_R.tolist()) == {0}

    kit.run(body())


def test_tied_head_in_the_payload_is_ignored(kit: Any) -> None:
    bench = kit.bench("qwen3", tie_word_embeddings=True)
    tensors = dict(bench.models[0].named_parameters())
    manifest = kit.publish(bench.store, 1, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})

    async def body() -> None:
        async with bench.engine() as engine:
            await engine.load_version(manifest, "recompute")
            assert engine.version == 1

    kit.run(body())
