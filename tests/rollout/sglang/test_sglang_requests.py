"""Claims about answers that come through the adapter, against a fake launcher (the real one: tests/e2e)."""

from __future__ import annotations

import asyncio

import pytest

from areal_like.errors import EngineError, UserError
from areal_like.trajectory import Segment

pytestmark = pytest.mark.processes


def test_an_answer_has_every_token_once_with_its_version(fake_world):
    async def body():
        async with fake_world.engine() as engine:
            outcomes = await asyncio.gather(*(engine.generate(fake_world.ask(n, 60)) for n in range(9)))
            for outcome in outcomes:
                assert (outcome.end_reason, len(outcome.segment)) == ("length", 60)
                fake_world.check(outcome.segment)
            counters = engine.counters()
            assert counters["tokens"] == 9 * 60
            assert counters["prefill_tokens"] == 9 * 3
            assert counters["busy_s"] > 0
            assert engine.progress() == {}

    fake_world.run(body())


def test_ends_are_distinguished(fake_world):
    async def body():
        async with fake_world.engine() as engine:
            stop = await engine.generate(fake_world.ask(stop_token_ids=(12,)))
            assert (stop.end_reason, stop.segment.tokens_R.tolist()) == ("stop", [8, 9, 10, 11, 12])
            again = await engine.generate(fake_world.ask(prefix=stop.segment, stop_token_ids=(12,)))
            assert (again.end_reason, len(again.segment)) == ("stop", 0)
            cut = await engine.generate(fake_world.ask(segment_tokens=3))
            assert (cut.end_reason, len(cut.segment)) == ("segment", 3)
            rest = await engine.generate(fake_world.ask(prefix=cut.segment))
            assert (rest.end_reason, len(rest.segment)) == ("length", 17)
            fake_world.check(rest.segment, start=3)
            full = await engine.generate(fake_world.ask(max_new_tokens=1000))
            assert (full.end_reason, len(full.segment)) == ("length", 125)
            with pytest.raises(UserError, match="not in the vocabulary of 50"):
                await engine.generate(fake_world.ask(prefix=_prefix_of(77)))

    fake_world.run(body())


@pytest.mark.parametrize("stream_tokens", [1, 4])
def test_an_answer_ends_at_a_stop_string_wherever_events_and_attempts_end(fake_world, stream_tokens):
    async def body():
        async with fake_world.engine(stream_tokens=stream_tokens) as engine:
            stop = await engine.generate(fake_world.ask(stop=["GHI", "zz"]))
            assert (stop.end_reason, stop.segment.tokens_R.tolist()) == ("stop", [8, 9, 10, 11, 12, 13])
            fake_world.check(stop.segment)
            again = await engine.generate(fake_world.ask(prefix=stop.segment, stop=["GHI"]))
            assert (again.end_reason, len(again.segment)) == ("stop", 0)
            rest = await engine.generate(fake_world.ask(prefix=stop.segment.head(4), stop=["GHI"]))
            assert (rest.end_reason, rest.segment.tokens_R.tolist()) == ("stop", [12, 13])
            free = await engine.generate(fake_world.ask(stop=["zz"]))
            assert (free.end_reason, len(free.segment)) == ("length", 20)
            assert engine.progress() == {}

    fake_world.run(body())


def test_an_answer_of_forced_length_does_not_end_at_the_models_own_end(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_EOS", "12")
        async with fake_world.engine() as engine:
            stop = await engine.generate(fake_world.ask(stop_token_ids=(12,)))
            forced = await engine.generate(fake_world.ask(ignore_eos=True))
            assert (len(stop.segment), forced.end_reason, len(forced.segment)) == (5, "length", 20)
            calls = (await fake_world.server_info(engine))["calls"]
            assert [name for name, *_ in calls].count("generate") == 2  # the server was not asked to go on

    fake_world.run(body())


def _prefix_of(token: int) -> Segment:
    import numpy as np

    return Segment(np.array([token], np.int32), np.array([-0.1], np.float32), np.array([0], np.int32))


def test_progress_grows_while_the_answer_does_and_cancelling_tells_the_server(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", "0.01")
        async with fake_world.engine() as engine:
            task = asyncio.ensure_future(engine.generate(fake_world.ask(7, 100)))
            await fake_world.until(lambda: len(engine.progress().get(7, ())) >= 4)
            seen = engine.progress()[7]
            await fake_world.until(lambda: len(engine.progress()[7]) > len(seen))
            fake_world.check(engine.progress()[7])
            assert seen.tokens_R.tolist() == fake_world.expected(0, len(seen))

            async def calls():
                return (await fake_world.server_info(engine))["calls"]

            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while ["abort", "w-1"] not in await calls():  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(0.005)

    fake_world.run(body())


def test_what_the_server_gives_up_comes_back_with_its_tokens(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_ABORT_AT", "5")
        async with fake_world.engine() as engine:
            outcome = await engine.generate(fake_world.ask())
            assert (outcome.end_reason, len(outcome.segment)) == ("cancelled", 5)
            fake_world.check(outcome.segment)

    fake_world.run(body())


def test_a_request_the_server_refuses_ends_the_engine_and_not_the_lease(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_REFUSE_GENERATE", "1")
        async with fake_world.engine() as engine:
            with pytest.raises(EngineError, match="rejected a valid request"):
                await engine.generate(fake_world.ask())

    fake_world.run(body())


def test_nothing_of_ours_can_be_imported_by_the_server(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("PYTHONPATH", "/somewhere/of/ours")
        async with fake_world.engine() as engine:
            path = (await fake_world.server_info(engine))["path"]
            assert "/somewhere/of/ours" not in path
            repository = str(fake_world.root)
            assert [part for part in path if part.startswith(repository)] == [
                str(fake_world.python.parents[1] / "packages")
            ]

    fake_world.run(body())
