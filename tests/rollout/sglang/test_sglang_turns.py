"""Claims about a server whose device is the trainer's in turns, against a fake launcher."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from areal_like.errors import UserError
from rollout.engine.sglang.turns import held_bytes

pytestmark = pytest.mark.processes

TAGS = ["kv_cache", "weights"]


async def turn_calls(fake_world, engine):
    kinds = ("pause", "release", "take back", "load", "resume")
    return [call for call in (await fake_world.server_info(engine))["calls"] if call[0] in kinds]


async def generates(fake_world, engine, version):
    segment = (await engine.generate(fake_world.ask(99))).segment
    fake_world.check(segment)
    assert set(segment.versions_R.tolist()) == {version}


def test_the_server_comes_up_with_the_first_version_and_not_with_the_worker(fake_world):
    async def body():
        async with fake_world.engine(load=None, starts_empty=True) as engine:
            assert fake_world.living_servers() == []
            assert (engine.version, engine.capabilities.max_context) == (-1, 128)
            early = asyncio.ensure_future(engine.generate(fake_world.ask(1)))
            assert await engine.release_memory() == 0
            await engine.load_version(fake_world.publish(0), "recompute")
            fake_world.check((await early).segment)

    fake_world.run(body())


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "drain"])
def test_memory_goes_before_the_trainers_turn_and_comes_back_before_the_next_version(fake_world, mode):
    async def body():
        async with fake_world.engine(starts_empty=True, interruption=mode) as engine:
            server = await engine._keeper.ready()
            for version in (1, 2):
                await generates(fake_world, engine, version - 1)
                await engine.release_memory()
                assert engine.version == -1
                asked = len((await fake_world.server_info(engine))["calls"])
                assert await engine.release_memory() == 0
                early = asyncio.ensure_future(engine.generate(fake_world.ask(1)))
                await engine.load_version(fake_world.publish(version), mode)
                fake_world.check((await early).segment)
                mine = await turn_calls(fake_world, engine)
                pause = "in_place" if mode == "keep_kv" else "retract"
                assert mine[-6:] == [
                    ["pause", "abort"], ["release", TAGS], ["take back", TAGS],
                    ["pause", pause], ["load", str(version), mode != "keep_kv"], ["resume"],
                ]  # fmt: skip
                calls = (await fake_world.server_info(engine))["calls"]
                assert calls[asked] == ["take back", TAGS], "something was asked of a server without memory"
            assert await engine._keeper.ready() is server
            staged = list(fake_world.root.glob("weights/**/staged-w/*"))
            assert len(staged) == 1, "versions of earlier turns still lie there"

    fake_world.run(body())


def test_what_runs_or_waits_at_a_release_ends_as_cancelled_with_its_tokens(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", "0.01")
        async with fake_world.engine() as engine:
            tasks = [asyncio.ensure_future(engine.generate(fake_world.ask(n, 100))) for n in range(9)]  # four slots
            await fake_world.until(lambda: sum(map(len, engine.progress().values())) > 12)
            await engine.release_memory()
            outcomes = await asyncio.gather(*tasks)
            assert {outcome.end_reason for outcome in outcomes} == {"cancelled"}
            assert sum(len(outcome.segment) for outcome in outcomes) > 12
            for outcome in outcomes:
                fake_world.check(outcome.segment)
            await engine.load_version(fake_world.publish(1), "recompute")
            await generates(fake_world, engine, 1)

    fake_world.run(body())


def test_a_server_that_dies_in_the_trainers_turn_has_no_successor_before_the_next_version(fake_world):
    async def body():
        async with fake_world.engine(starts_empty=True, max_restarts=1) as engine:
            server = await engine._keeper.ready()
            await engine.release_memory()
            os.kill(server.process.pid, signal.SIGKILL)
            await fake_world.until(lambda: engine._keeper.live is None)
            await asyncio.sleep(0.6)  # more than two looks of the watch
            assert fake_world.living_servers() == []
            assert fake_world.reports == []
            assert await engine.release_memory() == 0
            await engine.load_version(fake_world.publish(1), "recompute")
            await generates(fake_world, engine, 1)
            assert engine.counters()["server_restarts"] == 1
            words = "SGLang server: the server ended with signal SIGKILL; starting another (restart 1 of 1 allowed)"
            assert fake_world.reports == [words]

    fake_world.run(body())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("FAKE_KEEP_MEMORY", "the server did not release its memory"),
        ("FAKE_STAY_BUSY", "the server did not release its memory"),
        ("FAKE_KEEP_SLEEPING", "the server did not allocate its memory again"),
    ],
)
def test_a_server_that_will_not_hand_over_is_ended_and_the_next_version_has_another(fake_world, fault, said):
    async def body():
        fake_world.monkeypatch.setenv(fault, "1")
        async with fake_world.engine(starts_empty=True) as engine:
            server = await engine._keeper.ready()
            await engine.release_memory()
            if "not give" in said:
                assert not psutil.pid_exists(server.process.pid), "it still holds the memory that the trainer takes now"
            await engine.load_version(fake_world.publish(1), "recompute")
            await generates(fake_world, engine, 1)
            assert said in fake_world.reports[0]
            assert engine.counters()["server_restarts"] == len(fake_world.reports) == 1

    fake_world.run(body())


def test_a_mistake_that_keeps_the_first_server_from_starting_is_the_users_to_fix(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_DIE_AT_START", "launch_server.py: error: argument --dtype: no")
        async with fake_world.engine(load=None, starts_empty=True) as engine:
            with pytest.raises(UserError, match="rejects its command line: argument --dtype: no"):
                await engine.load_version(fake_world.publish(0), "recompute")

    fake_world.run(body())


def test_what_a_server_holds_is_counted_as_it_says_itself():
    usage = {"weight": 1.5, "kvcache": 2.0, "graph": {"decode": 0.1}}
    assert held_bytes({"internal_states": [{"memory_usage": usage}]}) == int(3.5 * 2**30)
    assert held_bytes({}) == held_bytes({"internal_states": [{}]}) == 0
