"""Requests: limits, stops, sharing, cancelling, pausing, closing, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import EngineError, PolicyDiverged, UserError
from areal_like.trajectory import Segment
from rollout.config import EngineSettings
from rollout.engine import core
from rollout.engine.decoder import plan_passes
from rollout.engine.embedded import EmbeddedEngine
from rollout.stop_strings import StopStrings


def test_answer_ends_with_its_stop_token(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine() as engine:
            free = (await engine.generate(kit.ask(0, max_new_tokens=30))).segment.tokens_R.tolist()
            stop = free[7]
            first = free.index(stop)
            for ids in ((stop,), (stop, 99), (99, 98, stop)):
                outcome = await engine.generate(kit.ask(0, max_new_tokens=30, stop_token_ids=ids))
                assert outcome.end_reason == "stop"
                assert outcome.segment.tokens_R.tolist() == free[: first + 1]
            at_limit = await engine.generate(kit.ask(0, max_new_tokens=first + 1, stop_token_ids=(stop,)))
            assert at_limit.end_reason == "stop"

    kit.run(body())


def test_answer_ends_with_the_token_that_completes_a_stop_string(kit: Any) -> None:
    bench = kit.bench()

    def words(tokens_R: np.ndarray) -> str:
        return "".join(f"<{one}>" for one in tokens_R)

    async def body() -> None:
        async with bench.engine(num_slots=3) as engine:
            free = [(await engine.generate(kit.ask(i, max_new_tokens=30))).segment for i in range(4)]
            strings = [f"{one.tokens_R[9]}><{one.tokens_R[10]}>" for one in free]
            looks = [StopStrings([string], words) for string in strings]
            asked = [kit.ask(i, max_new_tokens=30, stops=looks[i]) for i in range(3)] + [kit.ask(3, max_new_tokens=30)]
            outcomes = await kit.generate_all(engine, asked)
            for outcome, segment, look in zip(outcomes[:3], free, looks, strict=False):
                length = look.end(segment.tokens_R, 0)
                assert (outcome.end_reason, outcome.segment.tokens_R.tolist()) == (
                    "stop", segment.tokens_R[:length].tolist(),
                )  # fmt: skip
            assert len(outcomes[3].segment) == 30
            head = free[0].head(10)  # the string begins in what an earlier worker sampled
            rest = await engine.generate(kit.ask(0, max_new_tokens=30, prefix=head, stops=looks[0]))
            assert (rest.end_reason, len(rest.segment)) == ("stop", looks[0].end(free[0].tokens_R, 0) - 10)

    kit.run(body())


def test_rows_with_different_stops_and_limits_do_not_disturb_each_other(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=3) as engine:
            free = [(await engine.generate(kit.ask(i, max_new_tokens=40))).segment.tokens_R for i in range(8)]
            stops = [tuple(int(token) for token in tokens[10 + i : 11 + 2 * i]) for i, tokens in enumerate(free)]
            asked = [kit.ask(i, max_new_tokens=40, stop_token_ids=stops[i]) for i in range(8)]
            for outcome, tokens, stop in zip(await kit.generate_all(engine, asked), free, stops, strict=True):
                length = int(np.flatnonzero(np.isin(tokens, stop))[0]) + 1
                assert outcome.segment.tokens_R.tolist() == tokens[:length].tolist()
                assert outcome.end_reason == "stop"

    kit.run(body())


def test_answer_ends_where_the_context_does(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(max_context=32) as engine:
            outcome = await engine.generate(kit.ask(0, prompt_length=20, max_new_tokens=1000))
            assert (outcome.end_reason, len(outcome.segment)) == ("length", 12)
            last = await engine.generate(kit.ask(1, prompt_length=31))
            assert (last.end_reason, len(last.segment)) == ("length", 1)
            part = await engine.generate(kit.ask(2, prompt_length=20, max_new_tokens=1000, segment_tokens=12))
            assert part.end_reason == "length"

    kit.run(body())


def test_finished_prefix_is_answered_without_a_token(kit: Any) -> None:
    bench = kit.bench()
    prefix = Segment(np.array([4, 5], np.int32), np.full(2, -1.0, np.float32), np.zeros(2, np.int32))

    async def body() -> None:
        async with bench.engine() as engine:
            stopped = await engine.generate(kit.ask(0, prefix=prefix, stop_token_ids=(5,)))
            assert (stopped.end_reason, len(stopped.segment)) == ("stop", 0)
            full = await engine.generate(kit.ask(0, prefix=prefix, max_new_tokens=2))
            assert (full.end_reason, len(full.segment)) == ("length", 0)

    kit.run(body())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_length": 32}, "leaves no room in a context of 32"),
        ({"prompt_length": 0}, "the prompt is empty"),
        ({"prompt_P": np.array([3, 24], np.int32)}, "token 24 is not in the vocabulary of 24 tokens"),
        ({"prompt_P": np.array([-1], np.int32)}, "token -1 is not"),
        ({"temperature": -1.0}, "temperature -1"),
    ],
)
def test_impossible_request_is_a_user_error(kit: Any, fields: dict[str, Any], words: str) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(max_context=32) as engine:
            with pytest.raises(UserError, match=words):
                await engine.generate(kit.ask(0, **fields))
            await engine.generate(kit.ask(1))

    kit.run(body())


def test_prompt_of_a_group_is_prefilled_once(kit: Any) -> None:
    bench = kit.bench()
    prompt = np.arange(1, 12, dtype=np.int32)
    requests = [kit.ask(i, prompt_P=prompt, share_key=3, max_new_tokens=6 + i) for i in range(8)]

    async def body() -> None:
        async with bench.engine(num_slots=3) as engine:
            outcomes = await kit.generate_all(engine, requests)
            counters = engine.counters()
        assert counters["prefill_tokens"] == 10
        assert counters["shared_prefill_tokens"] == 70
        for request, outcome in zip(requests, outcomes, strict=True):
            assert bench.worst_error(request, outcome.segment) < 1e-4

    kit.run(body())


@pytest.mark.parametrize(
    ("longest", "num_prompt", "num_answer", "is_borrowed"),
    [(1024, 6, 10, True), (1024, 6, 11, False), (8, 12, 8, True), (8, 12, 9, False)],
)
def test_prompt_is_borrowed_only_by_an_answer_with_little_behind_it(
    kit: Any, monkeypatch: pytest.MonkeyPatch, longest: int, num_prompt: int, num_answer: int, is_borrowed: bool
) -> None:
    """At most twice the prompt, and at most LONGEST_REST: the mask of what is behind it grows with its square."""
    monkeypatch.setattr(core, "LONGEST_REST", longest)
    bench = kit.bench()
    prompt = np.arange(1, num_prompt + 1, dtype=np.int32)
    requests = []
    for number, length in enumerate((num_answer + 1, num_answer)):  # the longer one lends
        prefix = Segment(np.full(length, 5, np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32))
        requests.append(kit.ask(number, prompt_P=prompt, share_key=3, prefix=prefix, max_new_tokens=length + 2))

    async def body() -> None:
        async with bench.engine(num_slots=3) as engine:
            await kit.generate_all(engine, requests)
            assert (engine.counters()["shared_prefill_tokens"] > 0) == is_borrowed

    kit.run(body())


def test_equal_share_keys_with_different_prompts_share_nothing(kit: Any) -> None:
    bench = kit.bench()
    requests = [kit.ask(i, prompt_length=5, share_key=3) for i in range(4)]

    async def body() -> None:
        async with bench.engine() as engine:
            outcomes = await kit.generate_all(engine, requests)
            assert engine.counters()["shared_prefill_tokens"] == 0
        for request, outcome in zip(requests, outcomes, strict=True):
            assert bench.worst_error(request, outcome.segment) < 1e-4

    kit.run(body())


def test_a_row_that_was_given_to_another_lends_its_prompt_no_more(kit: Any) -> None:
    bench = kit.bench()
    prompts = [np.arange(1, 9, dtype=np.int32), np.arange(9, 19, dtype=np.int32)]
    requests = [kit.ask(i, prompt_P=prompts[i % 2], share_key=i % 2) for i in range(4)]

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            outcomes = await kit.generate_all(engine, requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert bench.worst_error(request, outcome.segment) < 1e-4

    kit.run(body())


def test_queue_is_first_in_first_out(kit: Any) -> None:
    bench = kit.bench()
    ended: list[int] = []

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:

            async def one(i: int) -> None:
                await engine.generate(kit.ask(i, max_new_tokens=3))
                ended.append(i)

            await asyncio.gather(*(one(i) for i in range(6)))

    kit.run(body())
    assert ended == list(range(6))


def test_cancelled_request_frees_its_slot(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            running, queued = await kit.start(engine, [kit.ask(i, max_new_tokens=120) for i in range(2)], 3)
            running.cancel()
            queued.cancel()
            await asyncio.wait([running, queued])
            assert running.cancelled()
            assert queued.cancelled()
            after = asyncio.ensure_future(engine.generate(kit.ask(2, max_new_tokens=5)))
            await engine.resume()
            assert len((await after).segment) == 5
            assert engine.progress() == {}

    kit.run(body())


def test_cancelling_a_queued_request_leaves_the_others_in_the_queue(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            requests = [kit.ask(i, max_new_tokens=20) for i in range(4)]
            running, first, second, third = await kit.start(engine, requests, 3)
            second.cancel()
            await asyncio.wait([second])
            await engine.resume()
            async with asyncio.timeout(300.0):
                outcomes = await asyncio.gather(running, first, third)
            assert second.cancelled()
            assert [outcome.request_id for outcome in outcomes] == [0, 1, 3]
            assert all(outcome.end_reason != "cancelled" for outcome in outcomes)

    kit.run(body())


def test_progress_is_always_a_prefix_of_the_outcome(kit: Any) -> None:
    bench = kit.bench()
    bench.add_other(1)
    requests = [kit.ask(i, prompt_length=1 + i % 5, max_new_tokens=20 + 5 * (i % 13)) for i in range(40)]
    seen: list[tuple[int, Segment]] = []

    async def body() -> Any:
        async with bench.engine(num_slots=5) as engine:
            tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            load = asyncio.ensure_future(engine.load_version(bench.manifests[1], "recompute"))
            while not all(task.done() for task in tasks):
                progress = engine.progress()
                assert len(progress) <= 5
                seen.extend(progress.items())
                await asyncio.sleep(0.001)  # spinning would starve the engine thread of the GIL
            await load
            return [task.result() for task in tasks]

    outcomes = kit.run(body())
    assert any(len(segment) for _, segment in seen)
    for request_id, part in seen:
        whole = outcomes[request_id].segment
        assert np.array_equal(part.tokens_R, whole.tokens_R[: len(part)])
        assert np.array_equal(part.logprobs_R, whole.logprobs_R[: len(part)])
        assert np.array_equal(part.versions_R, whole.versions_R[: len(part)])


def test_paused_engine_samples_nothing_and_goes_on_where_it_was(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine() as engine:
            (task,) = await kit.start(engine, [kit.ask(0, max_new_tokens=100)], 7)
            await asyncio.sleep(0.05)
            assert engine.counters()["steps"] == 7
            assert len(engine.progress()[0]) == 7
            await engine.resume()
            outcome = await task
            assert outcome.paused_s >= 0.05
            assert engine.counters()["paused_s"] >= 0.05
            assert bench.worst_error(kit.ask(0), outcome.segment) < 1e-4

    kit.run(body())


def test_times_of_an_answer_fit_into_the_time_it_took(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            started_s = time.monotonic()
            outcomes = await kit.generate_all(engine, [kit.ask(i, max_new_tokens=3) for i in range(3)])
            elapsed_s = time.monotonic() - started_s
        for outcome in outcomes:
            assert min(outcome.queue_s, outcome.generate_s, outcome.paused_s) >= 0
            assert outcome.queue_s + outcome.generate_s + outcome.paused_s <= elapsed_s
        assert sum(outcome.generate_s for outcome in outcomes) <= elapsed_s, "one slot: one after another"

    kit.run(body())


def test_counters_count_every_token_and_never_fall(kit: Any) -> None:
    bench = kit.bench()
    requests = [kit.ask(i, prompt_length=4, max_new_tokens=3 + i) for i in range(6)]

    async def body() -> None:
        async with bench.engine(num_slots=2) as engine:
            before = engine.counters()
            outcomes = await kit.generate_all(engine, requests)
            await asyncio.sleep(0.01)
            after = engine.counters()
        assert all(after[key] >= before[key] for key in before)
        assert after["tokens"] == sum(len(outcome.segment) for outcome in outcomes)
        assert after["prefill_tokens"] == 6 * 3
        assert after["busy_s"] > 0
        assert {"tokens", "prefill_tokens", "busy_s", "idle_s", "paused_s", "steps"} <= set(after)

    kit.run(body())


def test_the_engine_thread_computes_with_as_many_threads_as_it_was_given(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = kit.bench()
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda num: asked.append((threading.current_thread().name, num)))

    async def body() -> None:
        async with bench.engine() as engine:
            await kit.generate_all(engine, [kit.ask(0, max_new_tokens=1)])

    kit.run(body())
    assert ("engine", 1) in asked
    monkeypatch.undo()


def test_closing_hands_back_what_was_sampled(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> Any:
        async with bench.engine(num_slots=2) as engine:
            tasks = await kit.start(engine, [kit.ask(i, max_new_tokens=120) for i in range(4)], 3)
        outcomes = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(kit.ask(9))
        await engine.close()
        return outcomes

    outcomes = kit.run(body())
    assert [outcome.end_reason for outcome in outcomes] == ["cancelled"] * 4
    assert [len(outcome.segment) for outcome in outcomes] == [3, 3, 0, 0]


def test_requests_before_the_first_version_wait_for_it(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(load=None) as engine:
            assert engine.version == -1
            task = asyncio.ensure_future(engine.generate(kit.ask(0)))
            await asyncio.sleep(0.01)
            assert not task.done()
            await engine.load_version(bench.manifests[0], "recompute")
            assert set((await task).segment.versions_R.tolist()) == {0}

    kit.run(body())


def test_prefix_of_a_newer_version_is_refused(kit: Any) -> None:
    bench = kit.bench()
    prefix = Segment(np.array([4], np.int32), np.full(1, -1.0, np.float32), np.full(1, 3, np.int32))

    async def body() -> None:
        async with bench.engine() as engine:
            with pytest.raises(EngineError, match="sampled by version 3, which is newer than version 0 of the engine"):
                await engine.generate(kit.ask(0, prefix=prefix))
            await engine.generate(kit.ask(1))

    kit.run(body())


def test_crash_of_the_engine_thread_fails_every_request_and_is_logged(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = kit.bench()
    bench.add_other(1)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of cheese")

    async def body() -> None:
        async with bench.engine(num_slots=2) as engine:
            await engine.pause()
            tasks = [asyncio.ensure_future(engine.generate(kit.ask(i, max_new_tokens=120))) for i in range(4)]
            engine._core.decoder.step = broken
            await engine.resume()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "out of cheese" in str(result)
            for later in (
                engine.generate(kit.ask(9)),
                engine.pause(),
                engine.load_version(bench.manifests[1], "drain"),
            ):
                with pytest.raises(EngineError, match="out of cheese"):
                    await later

    kit.run(body())
    assert "the engine thread died" in caplog.text


@pytest.mark.parametrize("end", ["closed", "died"])
def test_load_that_is_staging_when_the_engine_ends_fails_instead_of_waiting(kit: Any, end: str) -> None:
    bench = kit.bench()
    bench.add_other(1)
    entered, gate = threading.Event(), threading.Event()

    async def body() -> None:
        async with bench.engine() as engine:
            honest = engine._core.decoder.stage

            def slow(*arguments: Any) -> None:
                entered.set()
                assert gate.wait(300.0)
                honest(*arguments)

            engine._core.decoder.stage = slow
            loads = [asyncio.ensure_future(engine.load_version(bench.manifests[1], "recompute")) for _ in range(2)]
            await kit.until(entered.is_set)
            if end == "closed":
                await engine.close()
            else:
                engine._core.decoder.step = None
                with pytest.raises(EngineError):
                    await engine.generate(kit.ask(0))
            gate.set()
            for load in loads:
                with pytest.raises(EngineError, match=end):
                    await load

    kit.run(body())


def test_logits_that_are_not_finite_fail_their_request_and_no_other(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=4) as engine:
            await engine.pause()
            tasks = [asyncio.ensure_future(engine.generate(kit.ask(i, max_new_tokens=20))) for i in range(3)]
            honest, calls = engine._core.decoder.step, []

            def poisoned(*args: Any) -> Any:
                logits = honest(*args)
                if len(calls) == 5:
                    logits[1] = float("nan")
                calls.append(0)
                return logits

            engine._core.decoder.step = poisoned
            await engine.resume()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results[1], PolicyDiverged)
            for i in (0, 2):
                assert bench.worst_error(kit.ask(i), results[i].segment) < 1e-4
            again = await engine.generate(kit.ask(5))
            assert bench.worst_error(kit.ask(5), again.segment) < 1e-4

    kit.run(body())


@pytest.mark.parametrize(
    ("settings", "files", "words"),
    [
        ({}, {}, "no config.json"),
        ({}, {"config.json": "{"}, "config.json cannot be read"),
        ({}, {"config.json": '{"model_type": "no_such_model"}'}, "config.json cannot be read"),
        ({}, {"config.json": '{"model_type": "vit"}'}, "not a causal language model"),
        ({"device": "toaster"}, {"config.json": '{"model_type": "qwen3"}'}, "there is no device toaster"),
    ],
)
def test_model_or_device_that_cannot_be_used_is_a_user_error(
    kit: Any, settings: dict[str, Any], files: dict[str, str], words: str
) -> None:
    for name, text in files.items():
        (kit.root / name).write_text(text)
    engine = EmbeddedEngine(kit.root, EngineSettings(**{"device": "cpu", **settings}), dtype="float32", num_threads=1)
    with pytest.raises(UserError, match=words):
        kit.run(engine.start())


def test_context_is_bounded_by_the_model(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench = kit.bench()

    async def body() -> None:
        with caplog.at_level(logging.INFO):
            async with bench.engine(max_context=4096) as engine:
                assert engine.capabilities.max_context == 128
                assert engine.capabilities.per_request_seed

    kit.run(body())
    assert "to 128, the number of positions of the model" in caplog.text


def test_prefill_passes_hold_every_prompt_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 900, 200).tolist()
    passes = plan_passes(lengths, max_tokens=1000)
    assert sorted(index for chosen in passes for index in chosen) == list(range(200))
    for chosen in passes:
        longest = max(lengths[index] for index in chosen)
        assert len(chosen) == 1 or len(chosen) * longest <= 1000
