"""The engine adapter against the real SGLang server, with a tiny Qwen3 on a CPU: also when the server's front halts, a
stranger calls it, or it is killed.

The oracle is transformers: a plain forward pass of the version stamped on each token (`recompute`, `drain`), and for
`keep_kv` a pass with the new weights over keys and values made with the old ones, which fits only if the boundary is
exact to the token. One server serves all tests of this file, since a start is what costs most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gradient_oracle import Drawn, judge, rounded_to_five_levels
from safetensors.torch import load_file
from sglang_races import MAX_RACES, MIN_RACES, Names, race
from sglang_world import (
    BUCKET_BYTES,
    CONFIG,
    CONTEXT,
    SLOTS,
    SLOW_S,
    TOLERANCE_NATS,
    VOCAB,
    World,
    all_grow,
    ask,
    assert_whole,
    group_call,
    routes_for_strangers,
    start_all,
    until,
)  # fmt: skip
from transformers import AutoConfig

from areal_like.errors import UserError, WeightError
from areal_like.guard import RECORD, SHM
from rollout.engine.sglang.attach import check_attached
from rollout.engine.sglang.layout import compare, server_checksums
from rollout.engine.sglang.sleep import Sleeper
from rollout.stop_strings import StopStrings
from trainer.weights.group_root import GroupRoot

pytestmark = [pytest.mark.e2e, pytest.mark.thorough("world")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("sglang"), num_versions=16)
    yield from made.started()


def test_log_probs_are_those_of_transformers_at_any_temperature(world: World) -> None:
    async def body() -> None:
        requests = [ask(n, sampling={"temperature": t}) for n, t in enumerate((1.0, 0.7, 1.3))]
        for request, outcome in zip(requests, await asyncio.gather(*map(world.engine.generate, requests)), strict=True):
            assert_whole(request, outcome)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        greedy = ask(9, sampling={"temperature": 0.0, "top_p": 0.5})
        segment = (await world.engine.generate(greedy)).segment
        said = world.logprobs(0, np.concatenate((greedy.prompt_P, segment.tokens_R)), 12, 1.0)
        assert np.abs(said - segment.logprobs_R).max() <= TOLERANCE_NATS

    world.run(body)


def test_an_answer_ends_at_stop_ids_segments_limits_and_the_context_and_nowhere_else(world: World) -> None:
    async def body() -> None:
        stop = (await world.engine.generate(ask(20, sampling={"temperature": 0.0}))).segment
        stop_id = int(stop.tokens_R[30])
        first = stop.tokens_R.tolist().index(stop_id) + 1
        ended = await world.engine.generate(ask(20, sampling={"temperature": 0.0, "stop_token_ids": (stop_id,)}))
        assert (ended.end_reason, ended.segment.tokens_R.tolist()) == ("stop", stop.tokens_R[:first].tolist())
        text = f"{stop.tokens_R[18]} {stop.tokens_R[19]} "
        look = StopStrings([text], lambda tokens_R: "".join(f"{one} " for one in tokens_R))
        length = look.end(stop.tokens_R, 0)
        by_text = await world.engine.generate(ask(20, sampling={"temperature": 0.0}, stops=look))
        assert (by_text.end_reason, by_text.segment.tokens_R.tolist()) == ("stop", stop.tokens_R[:length].tolist())
        rest = await world.engine.generate(
            ask(20, sampling={"temperature": 0.0}, stops=look, prefix=stop.head(length - 1))
        )
        assert (rest.end_reason, len(rest.segment)) == ("stop", 1)
        cut = await world.engine.generate(ask(20, sampling={"temperature": 0.0}, segment_tokens=7))
        assert (cut.end_reason, cut.segment.tokens_R.tolist()) == ("segment", stop.tokens_R[:7].tolist())
        goes_on = await world.engine.generate(ask(20, sampling={"temperature": 0.0}, prefix=cut.segment))
        assert goes_on.segment.tokens_R.tolist() == stop.tokens_R[7:].tolist()
        full = await world.engine.generate(ask(21, max_new_tokens=1000))
        assert (full.end_reason, len(full.segment)) == ("length", CONTEXT - 12)
        with pytest.raises(UserError, match="leaves no room"):
            await world.engine.generate(ask(22, prompt_length=CONTEXT))

    world.run(body)


def test_swaps_inside_answers_are_exact_with_recompute(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        requests = [ask(n, max_new_tokens=80) for n in range(30, 30 + SLOTS)]
        tasks = await start_all(world, requests)
        for version in (1, 2, 3):
            report = await world.load(version)
            assert report.version == world.engine.version == version
            assert world.engine.counters()["proven_swaps"] == version + 1, "SGLang's own checksums were not compared"
            await all_grow(world, 8)
        await world.slow(None)
        outcomes = await asyncio.gather(*tasks)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert_whole(request, outcome, 80)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        pairs = zip(requests, outcomes, strict=True)
        assert sum(world.is_far(request, outcome.segment) for request, outcome in pairs) >= len(requests) / 2

    world.run(body)


def test_kept_keys_and_values_have_an_exact_boundary_and_serve_nobody_else(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        requests = [ask(n, prompt_length=40) for n in range(50, 50 + SLOTS)]
        tasks = await start_all(world, requests)
        for version in (4, 5):
            await world.load(version, "keep_kv")
            seen = world.engine.counters()["tokens"]  # what follows a swap is shown at the end
            await until(lambda seen=seen: world.engine.counters()["tokens"] > seen + 8 * SLOTS)
        later = [ask(n, prompt_length=40, prompt_seed=n - 50) for n in range(100, 100 + SLOTS)]
        late_tasks = [asyncio.ensure_future(world.engine.generate(request)) for request in later]
        await world.slow(None)
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_whole(request, outcome)
            versions, counts = np.unique(outcome.segment.versions_R, return_counts=True)
            assert versions.tolist() == [3, 4, 5]
            tokens = np.concatenate((request.prompt_P, outcome.segment.tokens_R))
            spans = list(zip(versions.tolist(), counts.tolist(), strict=True))
            said = world.kept_logprobs(spans, tokens, 40, 0.9)
            assert np.abs(said - outcome.segment.logprobs_R).max() <= TOLERANCE_NATS
        for request, outcome in zip(later, await asyncio.gather(*late_tasks), strict=True):  # the same prompts again
            world.assert_exact(request, outcome.segment, {5})

    world.run(body)


def test_drain_lets_answers_finish_under_the_version_they_began_with(world: World) -> None:
    async def body() -> None:
        requests = [ask(n) for n in range(130, 134)]
        tasks = await start_all(world, requests)
        loading = asyncio.ensure_future(world.load(6, "drain"))
        await until(lambda: not world.engine._attempts.gate.is_set())
        late = asyncio.ensure_future(world.engine.generate(ask(140)))
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            world.assert_exact(request, outcome.segment, {5})
        await loading
        assert set((await late).segment.versions_R.tolist()) == {6}

    world.run(body)


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_use(world: World) -> None:
    async def body() -> None:
        wide = torch.zeros(VOCAB + 1, CONFIG["hidden_size"])
        with pytest.raises(WeightError, match=r"lm_head.weight has shape \(49, 32\)"):
            await world.engine.load_version(world.publish(10, **{"lm_head.weight": wide}), "recompute")
        outcome = await world.engine.generate(request := ask(150))
        world.assert_exact(request, outcome.segment, {6})

    world.run(body)


def test_a_cancelled_answer_frees_its_slot_on_the_server(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        (task,) = await start_all(world, [ask(160, max_new_tokens=140)])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert 160 not in world.engine.progress()
        live = await world.engine._keeper.ready()

        async def is_running() -> bool:
            loads = (await live.client._get("/v1/loads"))["loads"]
            return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads) > 0

        while await is_running():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)
        await world.slow(None)

    world.run(body)


def test_attaching_needs_the_same_model_and_then_works_as_well(world: World, tmp_path: Path) -> None:
    async def body() -> None:
        live = await world.engine._keeper.ready()
        settings = world.settings()
        key = live.client._session.headers["Authorization"].removeprefix("Bearer ")
        other = AutoConfig.for_model("qwen3", **{**CONFIG, "hidden_size": 64})
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(UserError, match=r"has a different model .* hidden_size is 32, expected 64"):
            await check_attached(live.client.url, settings, "recompute", tmp_path / "other", CONTEXT, key)
        with pytest.raises(UserError, match=r"the SGLang server at .* cannot be used"):
            await check_attached("http://127.0.0.1:9", settings, "recompute", world.model_dir, CONTEXT)
        key_file = tmp_path / "key"
        key_file.write_text(key)
        guest = world.make(world.settings(attach_key_file=str(key_file)), attach=live.client.url)
        await guest.start()
        await guest.load_version(world.manifests[7], "recompute")
        outcome = await guest.generate(request := ask(170))
        world.assert_exact(request, outcome.segment, {7})
        await guest.close()
        await world.load(7)

    world.run(body)


def test_a_server_that_holds_other_weights_is_found_out_by_its_checksums(world: World) -> None:
    """One bit of one part of a fused tensor."""

    async def body() -> None:
        live = await world.engine._keeper.ready()
        staged = world.engine._current
        assert staged is not None
        compare(await live.client.checksums(), staged.checksums)
        tensors = {name: tensor.clone() for name, tensor in world.models[7].named_parameters()}
        tensors["model.layers.1.self_attn.v_proj.weight"].view(torch.int32)[3, 5] ^= 1
        changed = server_checksums(tensors, torch.float32, is_head_tied=False)
        with pytest.raises(WeightError, match=r"1 of \d+ tensors .* model.layers.1.self_attn.qkv_proj.weight"):
            compare(await live.client.checksums(), changed)

    world.run(body)


def test_an_idle_server_gives_memory_back_and_goes_on_where_it_was(world: World) -> None:
    """SGLang frees nothing on a CPU; that it takes the calls in this order, and answers rightly after them, shows."""

    async def body() -> None:
        live = await world.engine._keeper.ready()
        sleeper = Sleeper(
            world.engine._keeper, world.engine._attempts, world.engine._load_lock, idle_s=0.05, tags=("kv_cache",)
        )
        world.engine._attempts.on_request = sleeper.wanted
        task = asyncio.create_task(sleeper.run())
        await until(lambda: sleeper.num_sleeps == 1)
        outcome = await world.engine.generate(request := ask(180))
        assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        task.cancel()
        assert (await world.engine._keeper.ready()) is live

    world.run(body)


def test_memory_is_given_up_in_the_middle_of_answers_and_the_next_version_brings_all_back(world: World) -> None:
    """What `placement: colocated` asks at each step, here with stragglers: the server asserts that there are none."""

    async def body() -> None:
        live = await world.engine._keeper.ready()
        await world.slow(SLOW_S)
        requests = [ask(n, max_new_tokens=140) for n in range(190, 190 + SLOTS + 4)]  # more than it takes at once
        tasks = [asyncio.ensure_future(world.engine.generate(request)) for request in requests]
        await until(lambda: sum(len(segment) > 4 for segment in world.engine.progress().values()) >= SLOTS)
        await world.engine.release_memory()
        assert world.engine.version == -1
        outcomes = await asyncio.gather(*tasks)
        assert {outcome.end_reason for outcome in outcomes} == {"cancelled"}
        assert sum(len(outcome.segment) > 4 for outcome in outcomes) >= SLOTS
        for request, outcome in zip(requests, outcomes, strict=True):
            assert not len(outcome.segment) or world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        await world.slow(None)
        for version in (8, 9):
            early = asyncio.ensure_future(world.engine.generate(request := ask(210 + version)))
            (state,) = (await live.client.server_info())["internal_states"]
            assert state["memory_usage"].keys() >= {"weight", "kvcache"}, "what a release frees is read from there"
            await world.load(version)
            segment = (await early).segment
            world.assert_exact(request, segment, {version})
            await world.engine.release_memory()
        assert (await world.engine._keeper.ready()) is live

    world.run(body)


def test_versions_by_a_process_group_come_into_running_answers_and_the_server_proves_them(world: World) -> None:
    async def body() -> None:
        await world.load(9)
        root = GroupRoot("run.l0.weights.1", 3, host="127.0.0.1", backend="gloo", device="cpu", deadline_s=120.0)
        await world.slow(SLOW_S)
        requests = [ask(n, max_new_tokens=100) for n in range(240, 240 + SLOTS)]
        tasks = await start_all(world, requests)
        for version in (13, 15):
            manifest, payload = world.published(version)
            call = group_call(root, manifest, is_new=version == 13)
            proven = world.engine.counters()["proven_swaps"]
            sending = asyncio.create_task(asyncio.to_thread(root.bring, manifest, payload, BUCKET_BYTES))
            report = await world.engine.load_from_group(call, "recompute")
            await sending
            assert report.version == world.engine.version == version
            assert world.engine.counters()["proven_swaps"] == proven + 1
            await all_grow(world, 8)
        await world.slow(None)
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_whole(request, outcome, 100)
            world.assert_exact(request, outcome.segment, {9, 13, 15})
        home = world.engine._keeper.home  # what a successor would start with
        held = load_file(home.folder / "model.safetensors")
        assert home.version == 15
        assert all(torch.equal(held[name], tensor) for name, tensor in world.models[15].named_parameters())
        root.leave()

    world.run(body)


ROUNDED_VERSION, NUM_PROMPTS, NUM_ANSWERS = 11, 8, 1280


@pytest.mark.parametrize("kind", ["sglang", "embedded"])
def test_the_correction_weight_corrects_the_gradient_of_an_engine_with_rounded_weights(world: World, kind: str) -> None:
    """The engine computes with a copy of five levels of the trainer's weights, and says so in its log-probs."""
    trainer = world.models[7]
    world.models[ROUNDED_VERSION] = engine_model = rounded_to_five_levels(trainer)
    manifest = world.publish(ROUNDED_VERSION)
    requests = [
        ask(1000 + n, 1, sampling={"temperature": 1.0}, prompt_seed=n % NUM_PROMPTS) for n in range(NUM_ANSWERS)
    ]

    async def body() -> list[Drawn]:
        async with world.embedded() if kind == "embedded" else contextlib.nullcontext(world.engine) as engine:
            await engine.load_version(manifest, "recompute")
            outcomes = await asyncio.gather(*map(engine.generate, requests))
        return [
            Drawn(n % NUM_PROMPTS, int(one.segment.tokens_R[0]), float(one.segment.logprobs_R[0]))
            for n, one in enumerate(outcomes)
        ]

    drawn = world.run(body)
    prompts = [request.prompt_P for request in requests[:NUM_PROMPTS]]
    for one in drawn[:NUM_PROMPTS]:  # the log-probs are those of the rounded weights, honestly
        tokens = np.append(prompts[one.prompt], one.token)
        said = world.logprobs(ROUNDED_VERSION, tokens, len(tokens) - 1, 1.0)
        assert abs(said[0] - one.recorded) <= TOLERANCE_NATS
    verdict = judge(trainer, engine_model, prompts, drawn)
    assert verdict.gap_nats > 0.1, "this engine is the trainer's policy: there is nothing to fix"
    assert abs(verdict.z_unweighted) > 8.0, "without the weight the estimate should be far off"
    assert abs(verdict.z_weighted) < 4.0
    assert verdict.loss_error < 1e-3, "the trainer's loss has another gradient than its formula"


def test_outputs_that_wait_in_a_halted_front_are_never_stamped_with_the_next_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)

    async def body() -> None:
        num_tokens = 0
        for number in range(MAX_RACES):
            if number >= MIN_RACES and names.num_wrong:
                break
            for request, segment in await race(world, number, "recompute" if number % 2 else "keep_kv"):
                num_tokens += len(segment)
                assert not len(segment) or world.error_nats(request, segment) <= TOLERANCE_NATS
        assert num_tokens > 20 * MIN_RACES
        assert names.num_wrong > 0, "no output was overtaken by the answer to an update"

    world.run(body)


def test_a_stranger_reaches_no_route_of_the_server(world: World) -> None:
    async def body() -> None:
        live = await world.engine._keeper.ready()
        key = live.client._session.headers["Authorization"]
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended has no command line
                assert key.removeprefix("Bearer ") not in " ".join(process.cmdline())
        routes = await routes_for_strangers(live.client)
        assert {"/generate", "/update_weights_from_disk", "/abort_request", "/server_info"} <= routes.keys()
        assert {status for statuses in routes.values() for status in statuses} == {401}, routes
        await live.client.probe()
        assert (await world.engine._keeper.ready()) is live

    world.run(body)


def test_a_killed_server_leaves_nothing_in_shared_memory_and_no_wrong_stamp(world: World) -> None:
    async def body() -> None:
        await world.load(2)
        await world.slow(SLOW_S)
        requests = [ask(n, max_new_tokens=140) for n in range(8)]
        tasks = await start_all(world, requests)
        keeper = world.engine._keeper
        live = await keeper.ready()
        assert live.process is not None
        record = keeper.scratch / RECORD
        await until(record.exists)
        left = [Path(SHM, line.split(" ")[0]) for line in record.read_text().splitlines()]
        assert any(path.name.startswith("sglang_loads_") for path in left)
        await world.load(3, "keep_kv")
        os.kill(live.process.pid, signal.SIGKILL)
        await until(lambda: keeper.live is not live)
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_whole(request, outcome, 140)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        assert world.engine.counters()["server_restarts"] == 1
        assert [path for path in left if path.exists()] == []

    world.run(body)
