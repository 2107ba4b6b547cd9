"""What the Engine port promises, of every engine that can run on a CPU: embedded, SGLang and vLLM.

The oracle is transformers: a plain forward pass of the version stamped on each token, and for `keep_kv` a pass with the
new weights over keys and values of the old ones, which fits only if each boundary is exact to the token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from engine_world import CONTEXT, ENGINES, LONG, NUM_VERSIONS, PROMPT, SLOTS, EngineWorld
from sglang_world import APART_NATS, TOLERANCE_NATS, VOCAB, ask, assert_whole, routes_for_strangers, start_all, until

from areal_like.errors import UserError, WeightError
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.engine.vllm.arguments import CPU_BLOCK
from rollout.stop_strings import StopStrings
from rollout.weights.merging import MergingReceiver

pytestmark = pytest.mark.e2e


def next_turn(
    request: GenerationRequest, outcome: GenerationOutcome, more: int, *, max_new_tokens: int | None = None
) -> GenerationRequest:
    """The next turn of a conversation: its prompt is everything so far and two given tokens; `more` is added to its
    id."""
    seen = np.concatenate((request.prompt_P, outcome.segment.tokens_R, np.array([3, 4], np.int32)))
    sampling = request.sampling
    if max_new_tokens is not None:
        sampling = msgspec.structs.replace(sampling, max_new_tokens=max_new_tokens)
    number = request.request_id + more
    return msgspec.structs.replace(request, request_id=number, prompt_P=seen, sampling=sampling, seed=number)


THOROUGH = pytest.mark.thorough("world")


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[THOROUGH] if kind == "vllm" else []) for kind in ENGINES]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWorld]:
    kind: str = request.param
    if kind != "embedded":
        request.getfixturevalue(f"{kind}_python")
    yield from EngineWorld(tmp_path_factory.mktemp(kind), kind).started()


def test_log_probs_are_those_of_transformers_before_top_k_and_top_p(world: EngineWorld) -> None:
    async def body() -> None:
        samplings = [{"temperature": t} for t in (1.0, 0.7, 1.3)]
        samplings += [{"temperature": 0.8, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6}]
        requests = [ask(n, sampling=sampling) for n, sampling in enumerate(samplings)]
        outcomes = await asyncio.gather(*map(world.engine.generate, requests))
        for request, outcome in zip(requests, outcomes, strict=True):
            assert_whole(request, outcome)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS, request.sampling
        greedy = ask(9, sampling={"temperature": 0.0, "top_p": 0.5})
        segment = (await world.engine.generate(greedy)).segment
        said = world.logprobs(0, np.concatenate((greedy.prompt_P, segment.tokens_R)), 12, 1.0)
        assert np.abs(said - segment.logprobs_R).max() <= TOLERANCE_NATS

    world.run(body)


def test_top_k_draws_only_the_most_likely_tokens(world: EngineWorld) -> None:
    async def body() -> None:
        request = ask(15, max_new_tokens=200, sampling={"temperature": 1.0, "top_k": 3})
        segment = (await world.engine.generate(request)).segment
        ids = torch.from_numpy(np.concatenate((request.prompt_P, segment.tokens_R)).astype(np.int64))
        with torch.inference_mode():
            logits = world.models[0](input_ids=ids[None], use_cache=False).logits[0, 11:-1]
        ranks = (logits > logits.gather(1, ids[12:, None])).sum(1)
        assert int(ranks.max()) <= 2
        assert len(set(ranks.tolist())) == 3

    world.run(body)


def test_an_answer_ends_at_stop_ids_texts_segments_limits_and_the_context(world: EngineWorld) -> None:
    async def body() -> None:
        greedy = {"temperature": 0.0}
        whole = (await world.engine.generate(ask(20, sampling=greedy))).segment
        stop_id = int(whole.tokens_R[30])
        first = whole.tokens_R.tolist().index(stop_id) + 1
        ended = await world.engine.generate(ask(20, sampling={**greedy, "stop_token_ids": (stop_id,)}))
        assert (ended.end_reason, ended.segment.tokens_R.tolist()) == ("stop", whole.tokens_R[:first].tolist())
        text = f"{whole.tokens_R[18]} {whole.tokens_R[19]} "
        look = StopStrings([text], lambda tokens_R: "".join(f"{one} " for one in tokens_R))
        length = look.end(whole.tokens_R, 0)
        by_text = await world.engine.generate(ask(20, sampling=greedy, stops=look))
        assert (by_text.end_reason, by_text.segment.tokens_R.tolist()) == ("stop", whole.tokens_R[:length].tolist())
        cut = await world.engine.generate(ask(20, sampling=greedy, segment_tokens=7))
        assert (cut.end_reason, cut.segment.tokens_R.tolist()) == ("segment", whole.tokens_R[:7].tolist())
        rest = await world.engine.generate(ask(20, sampling=greedy, prefix=cut.segment))
        assert rest.segment.tokens_R.tolist() == whole.tokens_R[7:].tolist()
        full = await world.engine.generate(ask(21, max_new_tokens=10_000))
        assert (full.end_reason, len(full.segment)) == ("length", CONTEXT - 12)
        with pytest.raises(UserError, match="leaves no room"):
            await world.engine.generate(ask(22, prompt_length=CONTEXT))
        with pytest.raises(UserError, match="the engine has no adapter french"):
            await world.engine.generate(ask(23, adapter="french"))

    world.run(body)


def test_a_seeds_stream_goes_on_over_segments_and_ignores_neighbours(world: EngineWorld) -> None:
    if not world.engine.capabilities.per_request_seed:
        pytest.skip("this engine's samples do not depend on their seeds alone")

    async def body() -> None:
        together = await asyncio.gather(*(world.engine.generate(ask(n, max_new_tokens=80)) for n in range(24, 30)))
        whole = together[0].segment
        alone = await world.engine.generate(ask(24, max_new_tokens=80))
        assert alone.segment.tokens_R.tolist() == whole.tokens_R.tolist()
        rest = await world.engine.generate(ask(24, max_new_tokens=80, prefix=whole.head(33)))
        assert rest.segment.tokens_R.tolist() == whole.tokens_R[33:].tolist()

    world.run(body)


def test_swaps_inside_answers_are_exact_with_recompute(world: EngineWorld) -> None:
    async def body() -> None:
        answers = await world.interrupted(1000, "recompute")
        for request, outcome in answers:
            assert_whole(request, outcome, LONG)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        assert sum(world.is_far(request, outcome.segment) for request, outcome in answers) >= SLOTS / 2

    world.run(body)


def test_kept_keys_and_values_have_an_exact_boundary_and_serve_nobody_else(world: EngineWorld) -> None:
    async def body() -> None:
        answers = await world.interrupted(2000, "keep_kv")
        for request, outcome in answers:
            assert_whole(request, outcome, LONG)
            assert world.kept_error_nats(request, outcome.segment) <= TOLERANCE_NATS
        last = world.engine.version
        later = [
            ask(n, prompt_length=PROMPT, prompt_seed=answers[-1 - n % SLOTS][0].request_id) for n in range(100, 116)
        ]
        late = await asyncio.gather(*map(world.engine.generate, later))  # the same prompts again
        for request, outcome in zip(later, late, strict=True):
            world.assert_exact(request, outcome.segment, {last})

    world.run(body)


def test_drain_lets_answers_finish_under_the_version_they_began_with(world: EngineWorld) -> None:
    async def body() -> None:
        version = world.engine.version
        requests = [ask(n, max_new_tokens=200) for n in range(130, 134)]
        tasks = await start_all(world, requests)
        loading = asyncio.ensure_future(world.load_next("drain"))
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            world.assert_exact(request, outcome.segment, {version})
        await loading
        outcome = await world.engine.generate(request := ask(140))
        world.assert_exact(request, outcome.segment, {version + 1})

    world.run(body)


def test_every_turn_is_exact_over_swaps_inside_answers_and_between_turns(world: EngineWorld) -> None:
    """Conversations of three turns. A version comes while the answers of the first two turns are sampled, and another
    one between two turns; every token has the log-prob of a forward pass of its own version over the conversation."""

    async def body() -> None:
        num_spanning = num_far = 0
        first = 3000
        while num_spanning < SLOTS / 2:  # how many answers a swap finds depends on how fast the machine is
            turns = [ask(first + n, max_new_tokens=170, prompt_length=PROMPT, session_key=first + n) for n in range(8)]
            for number in range(3):
                tasks = await start_all(world, turns)
                if number < 2:
                    await world.load_next("recompute")
                answers = list(zip(turns, await asyncio.gather(*tasks), strict=True))
                if number < 2:
                    await world.load_next("recompute")
                for request, outcome in answers:
                    assert_whole(request, outcome, 170)
                    assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS, number
                    assert outcome.segment.versions_R[0] >= world.engine.version - 2, "not of an earlier turn"
                num_spanning += sum(one.segment.versions_R[0] < one.segment.last_version for _, one in answers)
                num_far += sum(world.is_far(request, one.segment) for request, one in answers)
                turns = [next_turn(request, outcome, 100 * (number + 1)) for request, outcome in answers]
            for request, _ in answers:
                world.engine.end_session(request.session_key)
            first += 1000
        assert num_far >= SLOTS / 4

    world.run(body)


def test_a_later_turn_computes_only_what_is_new_and_nothing_of_an_older_version_is_used(world: EngineWorld) -> None:
    """By the engine's own counts; those of a server are the cached tokens that it reports."""
    kept_in = {"embedded": 1, "sglang": 1, "vllm": CPU_BLOCK}[world.kind]  # tokens that are kept together
    num_decoded = 1 if world.kind == "embedded" else 0  # the last token of a prompt is not counted as prefilled

    async def body() -> None:
        request = ask(7000, max_new_tokens=200, prompt_length=PROMPT, session_key=7000)
        outcome = await world.engine.generate(request)
        for number, is_swapped in enumerate((False, True, False)):
            if is_swapped:
                await world.load_next("recompute")
            before = world.engine.counters()
            # The newest token was sampled and never computed.
            num_known = len(request.prompt_P) + len(outcome.segment) - 1
            request = next_turn(request, outcome, 100 * (number + 1), max_new_tokens=60)
            outcome = await world.engine.generate(request)
            world.assert_exact(request, outcome.segment, {world.engine.version})
            now = world.engine.counters()
            reused = 0 if is_swapped else num_known // kept_in * kept_in
            computed = now["prefill_tokens"] - before["prefill_tokens"]
            assert computed == len(request.prompt_P) - reused - num_decoded, (world.kind, number)
            if world.kind != "embedded":
                assert now["cached_tokens"] - before["cached_tokens"] == reused
        world.engine.end_session(7000)

    world.run(body)


def test_a_version_that_does_not_fit_leaves_the_old_one_in_use(world: EngineWorld) -> None:
    async def body() -> None:
        version, wide = world.engine.version, torch.zeros(VOCAB + 1, 32)
        with pytest.raises(WeightError, match=r"lm_head.weight has shape \(49, 32\)"):
            await world.engine.load_version(world.publish(NUM_VERSIONS - 1, **{"lm_head.weight": wide}), "recompute")
        outcome = await world.engine.generate(request := ask(160))
        world.assert_exact(request, outcome.segment, {version})

    world.run(body)


def test_a_cancelled_answer_does_not_disturb_the_others(world: EngineWorld) -> None:
    async def body() -> None:
        requests = [ask(n, max_new_tokens=300) for n in range(170, 174)]
        tasks = await start_all(world, requests)
        tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        await until(lambda: 170 not in world.engine.progress())  # its slot is free at the next token
        for request, outcome in zip(requests[1:], await asyncio.gather(*tasks[1:]), strict=True):
            assert_whole(request, outcome, 300)
            world.assert_exact(request, outcome.segment, {world.engine.version})

    world.run(body)


def test_a_server_answers_nobody_without_its_key(world: EngineWorld) -> None:
    if world.kind == "embedded":
        pytest.skip("it has no server")

    async def body() -> None:
        found = await routes_for_strangers(await world.client())
        assert len(found) > 20
        assert {status for statuses in found.values() for status in statuses} == {401}

    world.run(body)


class Files:
    """A receiver of versions whose location is their manifest."""

    async def receive(self, place: str, deadline_s: float) -> Path:
        return Path(place)

    async def run(self) -> None: ...

    def forget(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


@pytest.mark.parametrize(("publish", "version"), [("merged", NUM_VERSIONS), ("adapter", NUM_VERSIONS + 1)])
def test_log_probs_with_an_adapter_are_those_of_transformers_with_peft(
    world: EngineWorld, tmp_path: Path, publish: Literal["merged", "adapter"], version: int
) -> None:
    """From the trainer's publication to the answers, as a worker receives it: merged on its host or before."""
    pytest.importorskip("peft")
    base = 6
    place = world.publish_adapter(version, base, publish, tmp_path)
    files: Any = Files()

    async def body() -> None:
        receiver = MergingReceiver(files, tmp_path / "base", [tmp_path / "local"])
        proven = world.engine.counters().get("proven_swaps", 0.0)
        await world.engine.load_version(await receiver.receive(str(place), 60.0), "recompute")
        if world.kind == "sglang":
            assert world.engine.counters()["proven_swaps"] == proven + 1, "SGLang's own checksums were not compared"
        assert receiver.counters()["weights_merged"] == (publish == "adapter")
        requests = [ask(n, sampling={"temperature": 1.0}) for n in range(300, 304)]
        for request, outcome in zip(requests, await asyncio.gather(*map(world.engine.generate, requests)), strict=True):
            assert_whole(request, outcome)
            world.assert_exact(request, outcome.segment, {version})
            tokens = np.concatenate((request.prompt_P, outcome.segment.tokens_R))
            without = world.logprobs(base, tokens, len(request.prompt_P), 1.0)
            assert np.abs(without - outcome.segment.logprobs_R).mean() > APART_NATS, "the adapter matters"
        await receiver.close()

    world.run(body)
