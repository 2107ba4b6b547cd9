"""The engine's thread turn by turn, over a core that the test plays: what it obeys, swaps, counts and hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.errors import EngineError, WeightError
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings
from rollout.engine import embedded
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationRequest

STEP_S, SWAP_S, BRING_S = 0.25, 0.5, 2.0


class Core:
    """Answers run until the test ends them; every call takes its time by the test's clock."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.done: list[Any] = []
        self.ended: list[Any] = []
        self.version, self.vocab_size, self.paused_s, self.is_admitting = 3, 100, 0.0, True
        self.slots = SimpleNamespace(max_context=16, num_running=0, count=0)
        self.counts = {"tokens": 5.0}
        self.sessions = SimpleNamespace(num_evicted=2)
        self.device = SimpleNamespace(type="cpu")

    def refill(self) -> None:
        self.done.append(f"refill {'admitting' if self.is_admitting else 'closed'}")

    def step(self) -> None:
        self.bench.now_s += STEP_S
        self.done.append("step")

    def swap(self, version: int, interruption: str) -> None:
        self.bench.now_s += SWAP_S
        self.done.append(("swap", version, interruption))

    def take_ended(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended

    def submit(self, answer: Any) -> None:
        self.done.append(("submit", answer.ticket, answer.stop_ids.tolist()))

    def cancel(self, ticket: int) -> None:
        self.done.append(("cancel", ticket))

    def end_session(self, key: int) -> None:
        self.done.append(("end session", key))

    def release(self) -> int:
        return 77

    def progress(self) -> dict[int, Segment]:
        return {9: Segment.empty()}


class Bench:
    """An engine whose thread is the test: `turn` is one of its rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tracer: Any = None) -> None:
        self.now_s = 100.0
        self.rests: list[float] = []
        monkeypatch.setattr(embedded.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(embedded, "finish", lambda device: None)
        self.engine = EmbeddedEngine(
            Path("model"),
            EngineSettings(device="cpu", num_slots=2, max_context=64),
            dtype="float32",
            num_threads=1,
            tracer=tracer,
        )
        self.core = Core(self)
        self.engine._wake = SimpleNamespace(wait=self.rest, set=lambda: None, clear=lambda: None)  # type: ignore[assignment]

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now_s += seconds

    def turn(self) -> list[Any]:
        """One round; what the core did in it."""
        self.core.done.clear()
        self.engine._turn(self.core)  # type: ignore[arg-type]
        return self.core.done

    def spent(self) -> tuple[float, float, float]:
        counters = self.engine.counters()
        return counters["busy_s"], counters["idle_s"], counters["paused_s"]

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def started() -> None:
            self.engine._loop = asyncio.get_running_loop()
            self.engine._core = self.core  # type: ignore[assignment]
            await body()

        asyncio.run(started())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


# ---------------------------------------------------------------- time


def test_a_step_is_busy_time_and_an_engine_with_nothing_to_do_rests(bench: Bench) -> None:
    async def body() -> None:
        bench.core.slots.count = 1
        assert bench.turn() == ["refill admitting", "step"]
        assert (bench.spent(), bench.rests) == ((STEP_S, 0.0, 0.0), [])
        bench.core.slots.count = 0
        assert bench.turn() == ["refill admitting"]
        assert (bench.spent(), bench.rests) == ((STEP_S, embedded.REST_S, 0.0), [embedded.REST_S])

    bench.run(body)


def test_a_paused_engine_admits_and_samples_nothing_and_its_time_is_a_pause(bench: Bench) -> None:
    async def body() -> None:
        bench.core.slots.count = 1
        pausing = asyncio.ensure_future(bench.engine.pause())
        await settle()
        assert bench.turn() == []
        await pausing
        assert bench.spent() == (0.0, 0.0, embedded.REST_S)
        resuming = asyncio.ensure_future(bench.engine.resume())
        await settle()
        assert bench.turn() == ["refill admitting", "step"]
        await resuming
        assert bench.spent() == (STEP_S, 0.0, embedded.REST_S)

    bench.run(body)


# ---------------------------------------------------------------- versions


def test_a_staged_version_is_swapped_in_between_two_steps_and_its_pause_is_no_busy_time(bench: Bench) -> None:
    async def body() -> None:
        bench.core.slots.count = bench.core.slots.num_running = 1
        loading = asyncio.ensure_future(bench.engine._at_boundary(4, "recompute", 1.5))
        await settle()
        assert bench.turn() == [("swap", 4, "recompute"), "refill admitting", "step"]
        report = await loading
        assert (report.version, report.stage_s, report.pause_s, report.transfer_s) == (4, 1.5, SWAP_S, 0.0)
        assert bench.spent() == (STEP_S, 0.0, SWAP_S)
        assert bench.turn() == ["refill admitting", "step"], "once"

    bench.run(body)


def test_a_version_that_drains_waits_until_nothing_runs_and_lets_nothing_start_before(bench: Bench) -> None:
    async def body() -> None:
        bench.core.slots.count = bench.core.slots.num_running = 1
        loading = asyncio.ensure_future(bench.engine._at_boundary(4, "drain", 0.0))
        await settle()
        assert bench.turn() == ["refill closed", "step"]
        bench.core.slots.num_running = 0
        assert bench.turn() == [("swap", 4, "drain"), "refill admitting", "step"]
        assert (await loading).version == 4

    bench.run(body)


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_payload_travels_inside_the_pause_and_one_that_fails_leaves_the_old_version(
    bench: Bench, has_failed: bool
) -> None:
    def bring() -> float:
        bench.now_s += BRING_S
        if has_failed:
            raise WeightError("broken off")
        return BRING_S / 2

    async def body() -> None:
        loading = asyncio.ensure_future(bench.engine._at_boundary(4, "drain", 0.0, bring))
        await settle()
        bench.core.is_admitting = False
        done = bench.turn()
        if has_failed:
            assert done == ["refill admitting"]
            with pytest.raises(WeightError, match="broken off"):
                await loading
        else:
            assert done == [("swap", 4, "drain"), "refill admitting"]
            report = await loading
            assert (report.pause_s, report.transfer_s) == (BRING_S + SWAP_S, BRING_S / 2)
        assert bench.spent() == (0.0, embedded.REST_S, BRING_S + SWAP_S * (not has_failed))

    bench.run(body)


def test_the_timeline_has_each_swap_with_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[Any] = []
    tracer = SimpleNamespace(
        now_s=lambda: bench.now_s, complete=lambda *where, **facts: slices.append((*where, facts))
    )  # fmt: skip
    bench = Bench(monkeypatch, tracer)

    async def body() -> None:
        bench.core.slots.num_running = 3
        loading = asyncio.ensure_future(bench.engine._at_boundary(4, "keep_kv", 0.0, lambda: 0.12345678))
        await settle()
        bench.turn()
        await loading

    bench.run(body)
    facts = {"version": 4, "interruption": "keep_kv", "running": 3, "transfer_s": 0.123457}
    assert slices == [("swap", 100.0, 100.0 + SWAP_S, "engine", facts)]


def test_memory_is_released_by_the_engines_thread(bench: Bench) -> None:
    async def body() -> None:
        releasing = asyncio.ensure_future(bench.engine.release_memory())
        await settle()
        assert not releasing.done()
        bench.turn()
        assert await releasing == 77

    bench.run(body)


# ---------------------------------------------------------------- requests


def request(**fields: Any) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(9, 7, 9))
    return GenerationRequest(
        request_id=1, prompt_P=np.array([1, 2], np.int32), prefix=Segment.empty(), seed=0, sampling=sampling, **fields
    )


def test_each_request_ends_with_the_result_of_its_own_ticket(bench: Bench) -> None:
    async def body() -> None:
        first, second, third = (asyncio.ensure_future(bench.engine.generate(request())) for _ in range(3))
        await settle()
        assert bench.turn()[:3] == [("submit", 1, [7, 9]), ("submit", 2, [7, 9]), ("submit", 3, [7, 9])]
        third.cancel()
        await settle()
        bench.core.ended = [(99, "of nobody"), (2, "second"), (1, EngineError("not finite")), (3, "cancelled")]
        assert bench.turn() == [("cancel", 3), "refill admitting"]
        assert await second == "second"
        with pytest.raises(EngineError, match="not finite"):
            await first
        assert third.cancelled()
        assert bench.engine._futures == {}

    bench.run(body)


def test_a_conversation_ends_at_the_next_boundary(bench: Bench) -> None:
    bench.engine.end_session(5)

    async def body() -> None:
        assert bench.turn() == ["refill admitting"], "before the start there is none"
        bench.engine.end_session(6)
        assert bench.turn() == [("end session", 6), "refill admitting"]

    bench.run(body)


# ---------------------------------------------------------------- life


def test_before_its_start_an_engine_knows_its_settings_and_refuses_work(bench: Bench) -> None:
    engine = bench.engine
    assert (engine.version, engine.progress(), bench.spent()) == (-1, {}, (0.0, 0.0, 0.0))
    can = engine.capabilities
    assert (can.num_slots, can.max_context, can.group_ranks, can.device) == (2, 64, 1, "cpu")
    assert (can.interruptions, can.per_request_seed) == (("recompute", "keep_kv", "drain"), True)
    with pytest.raises(EngineError, match="the engine was not started"):
        asyncio.run(engine.generate(request()))

    async def body() -> None:
        assert (engine.version, list(engine.progress()), engine.capabilities.max_context) == (3, [9], 16)
        assert {"tokens": 5.0, "session_evictions": 2}.items() <= engine.counters().items()
        engine._is_closing = True
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate(request())

    bench.run(body)


@pytest.mark.parametrize(("device", "kind"), [("cuda:1", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_the_kind_of_device_is_that_of_the_setting(device: str, kind: str) -> None:
    settings = EngineSettings(num_slots=1, max_context=8, device=device)
    engine = EmbeddedEngine(Path("model"), settings, dtype="bfloat16", num_threads=1)
    assert engine.capabilities.device == kind


def test_a_crash_fails_all_that_waits_and_all_that_comes(bench: Bench) -> None:
    async def body() -> None:
        waiting = asyncio.ensure_future(bench.engine.generate(request()))
        loading = asyncio.ensure_future(bench.engine._at_boundary(4, "drain", 0.0))
        await settle()
        bench.core.slots.num_running = 1
        bench.core.refill = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        bench.engine._serve()
        for task in (waiting, loading):
            with pytest.raises(EngineError, match="the engine thread died: ZeroDivisionError"):
                await task
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await bench.engine.generate(request())

    bench.run(body)


def test_an_engine_that_closes_obeys_hands_over_what_it_cancels_and_fails_the_rest(bench: Bench) -> None:
    async def body() -> None:
        first, second = (asyncio.ensure_future(bench.engine.generate(request())) for _ in range(2))
        await settle()
        bench.core.cancel_all = lambda: bench.core.ended.append((1, "cut"))  # type: ignore[attr-defined]
        bench.engine._is_closing = True
        bench.engine._serve()
        assert bench.core.done == [("submit", 1, [7, 9]), ("submit", 2, [7, 9])]
        await bench.engine.close()
        assert await first == "cut"
        with pytest.raises(EngineError, match="the engine was closed"):
            await second

    bench.run(body)
