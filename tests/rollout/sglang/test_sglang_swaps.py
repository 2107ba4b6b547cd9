"""Claims about new versions under running answers, and about servers that die, against a fake launcher."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import pytest

from areal_like.errors import EngineError, WeightError
from rollout.engine.server.http import ServerGone

pytestmark = pytest.mark.processes

SLOW = "0.01"


async def begin(fake_world, engine, count=3, length=60):
    """Requests that generate, each with tokens."""
    tasks = [asyncio.ensure_future(engine.generate(fake_world.ask(n, length))) for n in range(count)]
    await fake_world.until(lambda: all(len(engine.progress().get(n, ())) for n in range(count)))
    return tasks


def calls_of(info):
    return [call for call in info["calls"] if call[0] in ("pause", "load", "resume")]


@pytest.mark.parametrize(("mode", "pause", "flush"), [("recompute", "retract", True), ("keep_kv", "in_place", False)])
def test_a_swap_pauses_loads_and_continues(fake_world, mode, pause, flush):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        async with fake_world.engine(interruption=mode) as engine:
            tasks = await begin(fake_world, engine)
            info = await fake_world.server_info(engine)
            keys = [call[1] for call in info["calls"] if call[0] == "generate"]
            report = await engine.load_version(fake_world.publish(1), mode)
            assert (report.version, engine.version) == (1, 1)
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert set(outcome.segment.versions_R.tolist()) == {0, 1}
            info = await fake_world.server_info(engine)
            assert calls_of(info)[-3:] == [["pause", pause], ["load", "1", flush], ["resume"]]
            # Attempts are ended first where nothing is kept of the old weights: each lies within one version.
            assert (["abort", "all"] in info["calls"]) == (mode == "recompute")
            await engine.generate(fake_world.ask(50))
            after = [call for call in (await fake_world.server_info(engine))["calls"] if call[0] == "generate"][-1]
            assert after[1] not in keys, "a prefix of the old weights could be found again"
            assert 0 < engine.counters()["paused_s"] < 5

    fake_world.run(body())


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
@pytest.mark.parametrize("seed", range(4))
def test_no_late_output_of_the_front_is_stamped_with_the_version_after_it(fake_world, mode, seed):
    """Outputs that wait in a halted front are passed on after the update's answer, under the new version's name."""

    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        fake_world.monkeypatch.setenv("FAKE_FRONT_LAG_S", "0.3")
        fake_world.monkeypatch.setenv("FAKE_FRONT_SEED", str(seed))
        async with fake_world.engine(interruption=mode, max_restarts=9) as engine:
            cut = asyncio.ensure_future(engine.generate(fake_world.ask(99, 100)))
            tasks = await begin(fake_world, engine, length=100)
            moves = asyncio.ensure_future(swap_and_kill(fake_world, engine, mode, cut))
            while not moves.done():
                for segment in engine.progress().values():
                    fake_world.check(segment)
                await asyncio.sleep(0.002)
            await moves
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert (outcome.end_reason, len(outcome.segment)) == ("length", 100)

    fake_world.run(body())


async def swap_and_kill(fake_world, engine, mode, cut):
    """Three versions, an answer cut off behind the second, the server killed behind the third."""
    for version in (1, 2, 3):
        await engine.load_version(fake_world.publish(version), mode)
        if version == 2:
            cut.cancel()
            await asyncio.wait([cut])
    live = await engine._keeper.ready()
    os.kill(live.process.pid, signal.SIGKILL)
    await fake_world.until(lambda: engine._keeper.live is not live)
    await engine._keeper.ready()


def test_tokens_of_a_kept_cache_are_dropped_and_counted_when_their_server_dies(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        async with fake_world.engine(interruption="keep_kv", max_restarts=9) as engine:
            (task,) = await begin(fake_world, engine, count=1, length=100)
            await engine.load_version(fake_world.publish(1), "keep_kv")
            shown, sampled = len(engine.progress()[0]), engine.counters()["tokens"]
            await fake_world.until(lambda: engine.counters()["tokens"] > sampled + 5)
            assert len(engine.progress()[0]) == shown, "what follows a swap is not certain before the end"
            os.kill((await engine._keeper.ready()).process.pid, signal.SIGKILL)
            outcome = await task
            fake_world.check(outcome.segment)
            assert len(outcome.segment) == 100
            assert engine.counters()["dropped_tokens"] >= 6
            assert engine.counters()["tokens"] == 100 + engine.counters()["dropped_tokens"]

    fake_world.run(body())


def test_drain_lets_running_answers_finish_and_holds_new_ones(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        async with fake_world.engine(interruption="drain") as engine:
            tasks = await begin(fake_world, engine)
            loading = asyncio.ensure_future(engine.load_version(fake_world.publish(1), "drain"))
            await fake_world.until(lambda: not engine._attempts.gate.is_set())
            late = asyncio.ensure_future(engine.generate(fake_world.ask(9)))
            assert {v for task in tasks for v in (await task).segment.versions_R.tolist()} == {0}
            await loading
            assert set((await late).segment.versions_R.tolist()) == {1}

    fake_world.run(body())


def test_a_rollback_ends_answers_that_have_newer_tokens(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        async with fake_world.engine(load=3) as engine:
            tasks = await begin(fake_world, engine)
            await engine.load_version(fake_world.publish(2), "recompute")
            for outcome in await asyncio.gather(*tasks):
                assert outcome.end_reason == "cancelled"
                assert set(outcome.segment.versions_R.tolist()) == {3}
            assert set((await engine.generate(fake_world.ask(9))).segment.versions_R.tolist()) == {2}

    fake_world.run(body())


def test_a_refused_version_costs_a_server_and_no_answer(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        fake_world.monkeypatch.setenv("FAKE_REFUSE_VERSION", "1")
        async with fake_world.engine(max_restarts=0) as engine:
            tasks = await begin(fake_world, engine)
            with pytest.raises(WeightError, match=r"cannot load version 1: .*does not fit"):
                await engine.load_version(fake_world.publish(1), "recompute")
            assert engine.version == 0
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert set(outcome.segment.versions_R.tolist()) == {0}

    fake_world.run(body())


def test_versions_that_are_not_finite_or_of_another_shape_never_reach_the_server(fake_world):
    async def body():
        async with fake_world.engine() as engine:
            with pytest.raises(WeightError, match="not finite"):
                await engine.load_version(fake_world.publish(1, float("nan")), "recompute")
            manifest = fake_world.publish(2)
            payload = manifest.with_name(manifest.name.replace(".manifest.json", ".weights"))
            payload.write_bytes(bytes(reversed(payload.read_bytes())))
            with pytest.raises(WeightError, match="checksum"):
                await engine.load_version(manifest, "recompute")
            assert [call[1] for call in calls_of(await fake_world.server_info(engine)) if call[0] == "load"] == ["0"]

    fake_world.run(body())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_answers_go_on_after_their_server_died_or_froze(fake_world, number):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        control_timeout_s = 2.0 if number == signal.SIGSTOP else 60.0
        async with fake_world.engine(control_timeout_s=control_timeout_s, max_restarts=9) as engine:
            await engine.load_version(fake_world.publish(4), "recompute")
            tasks = await begin(fake_world, engine)
            process = (await engine._keeper.ready()).process
            if number == signal.SIGSTOP:
                engine._keeper._probed_s = 0.0  # the next look need not wait for its turn
            os.kill(process.pid, number)
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert (outcome.end_reason, len(outcome.segment)) == ("length", 60)
            info = await fake_world.server_info(engine)
            assert info["weight_version"] == "4", "the successor did not start with the version in use"
            assert engine.counters()["server_restarts"] == len(fake_world.reports) >= 1
            reason = "ended with signal SIGKILL" if number == signal.SIGKILL else r"did not respond for \d+ s"
            words = rf"SGLang server: .*{reason}; starting a new server with version 4 \(restart 1 of 9 allowed\)"
            assert re.fullmatch(words, fake_world.reports[0])

    fake_world.run(body())


def test_a_halt_of_this_machine_costs_no_server(fake_world):
    """After one, the deadline of a probe under way has passed whatever the server does."""

    async def body():
        async with fake_world.engine(control_timeout_s=2.0) as engine:
            live = await engine._keeper.ready()
            probe, probes = live.client.probe, []

            async def halted():
                probes.append("halted")
                live.client.probe = answered
                time.sleep(2.1)  # noqa: ASYNC251 - nothing of this process runs meanwhile
                raise ServerGone("no reply within 1 s")

            async def answered():
                probes.append("answered")
                await probe()

            live.client.probe = halted
            await fake_world.until(lambda: len(probes) >= 3)
            assert probes[:3] == ["halted", "answered", "answered"]
            assert await engine._keeper.ready() is live
            assert engine.counters()["server_restarts"] == len(fake_world.reports) == 0

    fake_world.run(body())


def test_a_server_that_dies_while_it_loads_is_replaced_and_loads_again(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        fake_world.monkeypatch.setenv("FAKE_DIE_LOADING", "1")
        async with fake_world.engine() as engine:
            tasks = await begin(fake_world, engine)
            await engine.load_version(fake_world.publish(1), "recompute")
            assert engine.version == 1
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert len(outcome.segment) == 60

    fake_world.run(body())


def test_a_server_that_hangs_while_it_loads_is_replaced_and_its_successor_loads(fake_world):
    """Its front answers every probe."""

    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        fake_world.monkeypatch.setenv("FAKE_HANG_LOADING", "1")
        async with fake_world.engine(load_timeout_s=3.0) as engine:
            tasks = await begin(fake_world, engine, length=100)
            await engine.load_version(fake_world.publish(1), "recompute")
            assert engine.version == 1
            for outcome in await asyncio.gather(*tasks):
                fake_world.check(outcome.segment)
                assert (len(outcome.segment), outcome.segment.last_version) == (100, 1)
            assert engine.counters()["server_restarts"] == len(fake_world.reports) == 1
            words = (
                r"SGLang server: the server hangs in the swap to version 1 \(.*\); starting a new server with version "
                r"0 "
            )
            assert re.match(words + r"\(restart 1 of 3 allowed\)", fake_world.reports[0])

    fake_world.run(body())


def test_servers_that_all_hang_while_they_load_spend_the_budget_of_restarts(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_HANG_LOADING", "1")
        fake_world.monkeypatch.setenv("FAKE_HANG_AGAIN", "1")
        async with fake_world.engine(load_timeout_s=3.0, max_restarts=1) as engine:
            with pytest.raises(
                EngineError, match=r"died more than 1 times .* the server hangs in the swap to version 1"
            ):
                await engine.load_version(fake_world.publish(1), "recompute")

    fake_world.run(body())


def test_a_spent_budget_of_restarts_ends_the_engine_with_the_reason(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", SLOW)
        async with fake_world.engine(max_restarts=1) as engine:
            tasks = await begin(fake_world, engine)
            for _ in range(2):
                live = await engine._keeper.ready()
                os.kill(live.process.pid, signal.SIGKILL)
                await fake_world.until(lambda live=live: engine._keeper.live is not live)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert "died more than 1 times" in str(result)
                assert "SIGKILL" in str(result)
            with pytest.raises(EngineError, match="died more than 1 times"):
                await engine.load_version(fake_world.publish(1), "recompute")

    fake_world.run(body())
