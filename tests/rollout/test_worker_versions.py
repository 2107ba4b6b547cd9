"""The rollout worker and policy versions: waiting, swapping, failing, rolling back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_like.clock import SystemClock
from areal_like.errors import DeadlineExceeded, EngineError, UserError
from areal_like.trace import Tracer
from areal_like.wire import messages as m
from rollout.answering import PolicyCall
from rollout.sample import SampleRun
from rollout.sample_context import SampleContext
from rollout.weights.versions import VersionGate


def test_no_token_is_sampled_below_min_version(rig, fake):
    async def scenario(r):
        await r.ready(version=0)
        r.lease(fake.task(1), fake.task(2, index=1, min_version=2))
        await r.until(lambda: r.got(m.SampleFinished), "the one that may start")
        await r.until(lambda: r.beat().state == "wait:version", "wait:version")
        assert len(r.engine.requests) == 1
        await r.load(1)
        await r.until(lambda: r.beat().counters.get("versions_loaded") == 2.0, "heartbeat")
        assert len(r.engine.requests) == 1
        await r.load(2)
        await r.until(lambda: len(r.got(m.SampleFinished)) == 2, "the other one")
        assert set(r.got(m.SampleFinished)[1].trajectory.versions_T[2:].tolist()) == {2}
        assert r.beat().counters["version_waits"] == 1.0

    rig(scenario)


def test_leases_before_the_first_version_wait_for_it(rig, fake):
    async def scenario(r):
        await r.ready(version=None)
        r.lease(fake.task(1))
        await r.until(lambda: r.beat().state == "wait:version", "wait:version")
        await r.load(0)
        await r.until(lambda: r.got(m.SampleFinished), "finished")

    rig(scenario)


def test_swap_in_mid_answer_goes_on_with_the_new_version(rig, fake):
    async def scenario(r):
        await r.ready(version=0)
        r.engine.allow(4)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 4, "tokens")
        await r.load(1)
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert r.got(m.SampleFinished)[0].trajectory.versions_T[2:].tolist() == [0, 0, 0, 0, 1, 1]
        loaded = r.got(m.VersionLoaded)[-1]
        assert (loaded.version, loaded.lineage, loaded.stage_s, loaded.pause_s) == (1, "l0", 0.25, 0.125)
        assert r.engine.interruptions == ["keep_kv", "keep_kv"]

    rig(scenario, interruption="keep_kv")


def test_one_step_off_always_drains(rig):
    async def scenario(r):
        await r.ready(version=0)
        assert r.engine.interruptions == ["drain"]

    rig(scenario, mode="one_step_off", interruption="recompute")


def test_interruption_the_engine_cannot_do_is_the_users_mistake(rig, fake):
    def engine():
        made = fake.Engine()
        made.capabilities = type(made.capabilities)(
            num_slots=4, max_context=100, interruptions=("drain",), per_request_seed=False
        )
        return made

    async def scenario(r):
        r.worker._peer = _Closed()
        with pytest.raises(UserError, match="drain"):
            await r.task

    rig(scenario, engine=engine)


class _Closed:
    async def close(self):
        pass


def test_versions_load_one_at_a_time_and_the_newest_wins(rig):
    async def scenario(r):
        await r.ready(version=0)
        r.engine.load_gate.clear()
        r.announce(1)
        await r.until(lambda: r.engine.loads == ["v0", "v1"], "loading 1")
        for version in (2, 3, 4):
            r.announce(version)
        await r.until(lambda: r.beat().counters.get("versions_superseded") == 2.0, "superseded")
        r.engine.load_gate.set()
        await r.until(lambda: r.engine.version == 4, "newest")
        assert r.engine.loads == ["v0", "v1", "v4"]

    rig(scenario)


def test_version_that_cannot_be_loaded_is_reported_and_work_goes_on_with_the_old_one(rig, fake):
    async def scenario(r):
        await r.ready(version=0)
        r.engine.allow(3)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 3, "tokens")
        r.announce(1, name="bad1")
        await r.until(lambda: r.got(m.VersionFailed), "VersionFailed")
        assert (r.got(m.VersionFailed)[0].version, r.got(m.VersionFailed)[0].reason) == (1, "checksum")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert set(r.got(m.SampleFinished)[0].trajectory.versions_T[2:].tolist()) == {0}
        await r.load(2)

    rig(scenario)


def test_failure_of_a_version_that_is_no_longer_wanted_is_not_reported(rig):
    async def scenario(r):
        await r.ready(version=0)
        r.engine.load_gate.clear()
        r.announce(1, name="bad1")
        await r.until(lambda: r.engine.loads == ["v0", "bad1"], "loading")
        r.announce(2)
        await r.until(lambda: r.worker._loader._target is not None, "announcement")
        r.engine.load_gate.set()
        await r.until(lambda: r.engine.version == 2, "newest")
        assert not r.got(m.VersionFailed)

    rig(scenario)


def test_version_announced_twice_is_loaded_once_and_confirmed_twice(rig):
    async def scenario(r):
        await r.ready(version=3)
        r.announce(3)
        await r.until(lambda: len(r.got(m.VersionLoaded)) == 2, "confirmation")
        assert r.engine.loads == ["v3"]

    rig(scenario)


def test_rollback_parks_answers_of_abandoned_versions_until_these_exist_again(rig, fake):
    async def scenario(r):
        await r.ready(version=3)
        r.engine.allow(4)
        task = fake.task(1)
        r.lease(task)
        await r.until(lambda: len(r.reports.get(1, (0, ()))[1]) == 4, "tokens of version 3 reported")
        await r.load(1, lineage="l1")
        r.engine.allow(100)
        r.lease(fake.task(2, index=1))
        await r.until(lambda: r.got(m.SampleFinished), "a new sample of version 1")
        assert r.got(m.SampleFinished)[0].lease_id == 2
        assert set(r.got(m.SampleFinished)[0].trajectory.versions_T[2:].tolist()) == {1}
        await r.load(2, lineage="l1")
        await r.load(3, lineage="l1")
        await r.until(lambda: len(r.got(m.SampleFinished)) == 2, "the parked one")
        parked = r.got(m.SampleFinished)[1].trajectory
        assert parked.tokens_T[2:].tolist() == fake.answer_of(task)
        assert parked.versions_T[2:].tolist() == [3] * 6
        assert len(r.reports[1][1]) <= 6

    rig(scenario)


async def turns_until(condition):
    """Give the loop turns, not time."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never came")


def test_nothing_is_sampled_while_a_rollback_is_being_loaded(rig, fake):
    async def scenario(r):
        await r.ready(version=3)
        r.engine.allow(4)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 4, "tokens")
        r.engine.load_gate.clear()
        r.announce(1, lineage="l1")
        await r.until(lambda: r.engine.loads == ["v3", "v1"], "loading")
        r.engine.allow(100)
        r.lease(fake.task(2, index=1))
        await r.until(lambda: r.beat().state == "wait:version" and r.beat().counters["version_waits"] == 2, "wait")
        assert r.engine.num_tokens == 4
        r.engine.load_gate.set()
        await r.until(lambda: r.got(m.SampleFinished), "the new one")

    rig(scenario)


def test_parked_tokens_are_counted_once_while_the_engine_still_shows_them(fake):
    async def scenario():
        engine, gate = fake.Engine(), VersionGate()
        engine.version, engine.limit = 3, 4
        gate.set(3)
        tokens = SimpleNamespace(stop_ids=(fake.EOS,))
        tracer = Tracer(Path(), "w", max_events=0)
        bench = SampleContext(
            engine=engine, gate=gate, tokens=tokens, rewards=None, version_deadline_s=5.0, clock=SystemClock(),
            tracer=tracer,
        )  # fmt: skip
        run = SampleRun(fake.task(), bench, is_resumable=True, lane="x")
        made = asyncio.create_task(run.generate(np.array([97], np.int32)))
        await turns_until(lambda: engine.num_tokens == 4)
        live = engine.progress()
        gate.set(-1)
        run.park(live)
        assert len(run.all_new(live)) == 4
        await turns_until(lambda: not engine.live)
        assert len(run.all_new(live)) == 4
        engine.allow(100)
        gate.set(3)
        assert (await made).segment.tokens_R.tolist() == fake.answer_of(fake.task())

    asyncio.run(asyncio.wait_for(scenario(), 300.0))


def sample_run(fake, engine):
    gate = VersionGate()
    engine.version = 3
    gate.set(3)
    bench = SampleContext(
        engine=engine, gate=gate, tokens=SimpleNamespace(stop_ids=(fake.EOS,)), rewards=None, version_deadline_s=5.0,
        clock=SystemClock(), tracer=Tracer(Path(), "w", max_events=0),
    )  # fmt: skip
    return SampleRun(fake.task(), bench, is_resumable=True, lane="x")


def test_tokens_of_a_generation_that_just_ended_are_handed_back(fake):
    """The engine is done and no longer shows the answer; the sample's own task had no turn yet."""
    seen = []

    class Engine(fake.Engine):
        async def generate(self, request):
            outcome = await super().generate(request)
            asyncio.get_running_loop().call_soon(look)  # before the tasks that wait for this generation are woken
            return outcome

    def look():
        assert run._calls[0].generation.done()
        seen.append(run.all_new({}).tokens_R.tolist())

    async def scenario():
        return await run.generate(np.array([97], np.int32))

    run = sample_run(fake, Engine())
    answer = asyncio.run(asyncio.wait_for(scenario(), 300.0))
    assert seen == [answer.segment.tokens_R.tolist()] == [fake.answer_of(fake.task())]


def test_a_generation_that_was_cancelled_or_failed_adds_no_tokens(fake):
    async def scenario():
        run = sample_run(fake, fake.Engine())
        loop = asyncio.get_running_loop()
        run._calls = [PolicyCall(generation=loop.create_future())]
        run._calls[0].generation.cancel()
        assert len(run.all_new({})) == 0
        run._calls = [PolicyCall(generation=loop.create_future())]
        run._calls[0].generation.set_exception(EngineError("broken"))
        assert len(run.all_new({})) == 0

    asyncio.run(scenario())


def test_engine_that_breaks_while_loading_ends_the_worker(rig):
    async def scenario(r):
        await r.ready(version=0)
        r.announce(1, name="not-a-version")
        with pytest.raises(EngineError, match="cannot load version 1"):
            await r.task

    rig(scenario)


def test_gate_names_the_version_nobody_delivered():
    async def scenario():
        gate = VersionGate()
        gate.set(2)
        await gate.wait(2, 1.0)
        with pytest.raises(DeadlineExceeded, match="policy version 3"):
            await gate.wait(3, 0.01)

    asyncio.run(scenario())
