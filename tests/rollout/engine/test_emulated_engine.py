"""Claims about the emulated engine: times are the roofline's however late the machine is, and no invariant is
broken.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

from areal_like.emulation.settings import EmulationSettings
from areal_like.errors import EngineError, WeightError
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings
from rollout.engine.emulated import EmulatedEngine
from rollout.engine.port import GenerationRequest

FLOOR_S, SCALE, SPEEDUP = 0.01, 16, 2000.0
EMULATION = EmulationSettings(decode_floor_s=FLOOR_S, token_scale=SCALE, speedup=SPEEDUP, prompt_tokens=1)
STOP = 9


@pytest.fixture
def versions(tmp_path):
    """manifest(version): the path of a published version."""
    store = WeightStore(tmp_path / "weights", "disk", keep=10)

    def manifest(version):
        return store.publish(version, "l0", {"w": TensorBytes("float32", (2,), memoryview(bytes(8)))})

    return manifest


@asynccontextmanager
async def engine(versions, *, slots=8, emulation=EMULATION, load=0):
    made = EmulatedEngine(emulation, EngineSettings(num_slots=slots, max_context=4096), max_new_tokens=2000, seed=1)
    await made.start()
    if load is not None:
        await made.load_version(versions(load), "recompute")
    try:
        yield made
    finally:
        await made.close()


def ask(number=1, *, prefix=None, share_key=7, **sampling):
    return GenerationRequest(
        request_id=number, prompt_P=np.array([3, 4, 5], np.int32), prefix=prefix or Segment.empty(),
        sampling=Sampling(max_new_tokens=2000, stop_token_ids=(STOP,), **sampling), seed=number, share_key=share_key,
    )  # fmt: skip


def test_answer_takes_the_time_of_its_decode_steps_even_when_the_machine_is_late(versions):
    async def go():
        async with engine(versions) as made:
            task = asyncio.ensure_future(made.generate(ask()))
            await asyncio.sleep(0)
            time.sleep(0.02)  # noqa: ASYNC251 - 40 emulated seconds in which no timer can fire
            return await task, made.counters()

    outcome, counters = asyncio.run(go())
    emulated_s = outcome.generate_s * SPEEDUP
    steps = emulated_s / FLOOR_S
    assert (len(outcome.segment) - 1) * SCALE < steps <= len(outcome.segment) * SCALE + 1
    assert counters["emulation_wakes"] > 0


def test_next_answer_starts_when_the_slot_was_due_to_be_free(versions):
    async def go():
        async with engine(versions, slots=1) as made:
            tasks = [asyncio.ensure_future(made.generate(ask(n))) for n in (1, 2)]
            await asyncio.sleep(0)
            time.sleep(0.05)  # noqa: ASYNC251
            return await asyncio.gather(*tasks)

    first, second = asyncio.run(go())
    assert second.queue_s <= first.queue_s + first.generate_s + 1e-6, "it was submitted no earlier"
    assert second.generate_s > 0


def test_answers_are_the_same_whatever_runs_concurrently(versions):
    async def lengths(numbers, slots):
        async with engine(versions, slots=slots) as made:
            outcomes = await asyncio.gather(*(made.generate(ask(n)) for n in numbers))
            return {outcome.request_id: len(outcome.segment) for outcome in outcomes}

    alone, together = asyncio.run(lengths([3], 1)), asyncio.run(lengths([1, 2, 3, 4], 2))
    assert together[3] == alone[3]
    assert len(set(together.values())) > 1


def test_answer_ends_with_the_stop_token_unless_it_was_cut(versions):
    async def go():
        async with engine(versions) as made:
            whole = await made.generate(ask())
            cut = await made.generate(msg_with(ask(2), max_new_tokens=4))
            return whole, cut

    whole, cut = asyncio.run(go())
    assert (whole.end_reason, int(whole.segment.tokens_R[-1])) == ("stop", STOP)
    assert not (whole.segment.tokens_R[:-1] == STOP).any()
    assert (cut.end_reason, len(cut.segment)) == ("length", 4)
    assert not (cut.segment.tokens_R == STOP).any()


def msg_with(request, *, max_new_tokens):
    import msgspec

    sampling = msgspec.structs.replace(request.sampling, max_new_tokens=max_new_tokens)
    return msgspec.structs.replace(request, sampling=sampling)


async def interrupted(versions, interruption):
    """An answer that a new version comes into the middle of; and what it was before."""
    async with engine(versions) as made:
        task = asyncio.ensure_future(made.generate(ask()))
        while not made.progress().get(1):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        before = made.progress()[1]
        report = await made.load_version(versions(1), interruption)
        return await task, before, report, made.version


@pytest.mark.parametrize("interruption", ["recompute", "keep_kv"])
def test_swap_keeps_every_token_and_later_ones_are_of_the_new_version(versions, interruption):
    slow = asyncio.run(interrupted(versions, interruption))
    outcome, before, report, version = slow
    segment = outcome.segment
    assert (segment.tokens_R[: len(before)] == before.tokens_R).all()
    assert version == report.version == 1
    assert set(segment.versions_R) == {0, 1}
    assert report.pause_s > 0


def test_drain_finishes_under_the_old_version(versions):
    outcome, _, _, version = asyncio.run(interrupted(versions, "drain"))
    assert set(outcome.segment.versions_R) == {0}
    assert version == 1


def test_cancelled_answer_goes_on_from_its_tokens_to_the_same_length(versions):
    async def go():
        async with engine(versions) as made:
            whole = await made.generate(ask())
            task = asyncio.ensure_future(made.generate(ask()))
            while len(made.progress().get(1, ())) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            part = made.progress()[1]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not made.progress()
            rest = await made.generate(ask(prefix=part))
            return whole, part, rest

    whole, part, rest = asyncio.run(go())
    assert len(part) + len(rest.segment) == len(whole.segment)
    assert (part.joined(rest.segment).tokens_R == whole.segment.tokens_R).all()


def test_prefix_newer_than_the_weights_is_refused(versions):
    newer = Segment(np.array([3], np.int32), np.array([-1.0], np.float32), np.array([5], np.int32))

    async def go():
        async with engine(versions) as made:
            await made.generate(ask(prefix=newer))

    with pytest.raises(EngineError, match="version 5"):
        asyncio.run(go())


def test_nothing_is_sampled_before_the_first_version(versions):
    async def go():
        async with engine(versions, load=None) as made:
            task = asyncio.ensure_future(made.generate(ask()))
            await asyncio.sleep(0.02)
            assert not made.progress()
            await made.load_version(versions(2), "recompute")
            return await task

    assert set(asyncio.run(go()).segment.versions_R) == {2}


def test_slots_are_what_the_emulated_memory_holds(versions):
    small = EMULATION.model_copy(update={"gpu": "l40s", "model": "7b"})
    made = EmulatedEngine(small, EngineSettings(num_slots=512), max_new_tokens=2000, seed=1)
    assert 16 < made.capabilities.num_slots < 128


def test_damaged_version_is_refused_and_the_old_one_stays(versions):
    async def go():
        async with engine(versions) as made:
            manifest = versions(1)
            payload = next(manifest.parent.glob("v*1*.safetensors"))
            data = bytearray(payload.read_bytes())
            data[-1] ^= 1
            payload.write_bytes(data)
            with pytest.raises(WeightError):
                await made.load_version(manifest, "recompute")
            return made.version, await made.generate(ask())

    version, outcome = asyncio.run(go())
    assert version == 0
    assert outcome.end_reason == "stop"


def test_closing_ends_what_runs_as_cancelled(versions):
    async def go():
        async with engine(versions) as made:
            task = asyncio.ensure_future(made.generate(ask()))
            await asyncio.sleep(0.001)
            await made.close()
            return await task

    assert asyncio.run(go()).end_reason == "cancelled"


def test_drain_goes_on_when_the_last_running_answer_is_cancelled(versions):
    async def go():
        async with engine(versions, emulation=EMULATION.model_copy(update={"speedup": 1.0})) as made:
            task = asyncio.ensure_future(made.generate(ask()))
            await asyncio.sleep(0.05)
            load = asyncio.ensure_future(made.load_version(versions(1), "drain"))
            await asyncio.sleep(0.3)
            assert not load.done()
            task.cancel()
            return await asyncio.wait_for(load, 300.0)

    assert asyncio.run(go()).version == 1


def test_answer_cancelled_while_it_waits_never_starts(versions):
    async def go():
        async with engine(versions, slots=1) as made:
            first = asyncio.ensure_future(made.generate(ask(1)))
            second = asyncio.ensure_future(made.generate(ask(2)))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            return await first, made.progress()

    outcome, left = asyncio.run(go())
    assert outcome.end_reason == "stop"
    assert not left
