"""Claims about new versions under running answers, and about servers that die or hang, against a fake launcher."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from areal_like.errors import EngineError, UserError, WeightError
from rollout.engine.vllm.probe import Probe

pytestmark = pytest.mark.processes

HELD = '{"0": 5}'
"""Answers under version 0 wait after five tokens, so that none ends before what a test does, however slow it is."""


class FakeProbes:
    """Makes probes with the log-probs that the fake server reports."""

    def make(self, version, folder):
        return Probe(version, (1, 2, 3), (-0.5, -0.5))


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
def test_a_swap_pauses_loads_and_continues_and_no_prefix_of_old_weights_is_found(fake_vllm, monkeypatch, mode):
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(interruption=mode) as engine:
            tasks = await fake_vllm.begin(engine)
            salts = {call[1] for call in (await fake_vllm.state(engine))["calls"] if call[0] == "generate"}
            report = await engine.load_version(fake_vllm.publish(1), mode)
            assert (report.version, engine.version) == (1, 1)
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert (outcome.end_reason, len(outcome.segment)) == ("length", 60)
                assert set(outcome.segment.versions_R.tolist()) == {0, 1}
            await engine.generate(fake_vllm.ask(50))
            calls = (await fake_vllm.state(engine))["calls"]
            swap = [call for call in calls if call[0] in ("pause", "load", "resume")][-3:]
            clears = "true" if mode == "recompute" else "false"
            assert swap == [["pause", "keep", clears], ["load", ["weight"]], ["resume"]]
            assert (["abort", "all"] in calls) == (mode == "recompute")
            assert [call for call in calls if call[0] == "generate"][-1][1] not in salts
            assert engine.counters()["cached_tokens"] == 1.0 * sum(call[0] == "generate" for call in calls)

    fake_vllm.run(body())


def test_tokens_after_a_kept_swap_are_shown_at_the_end_and_sampled_again_if_the_server_dies(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_HOLD", '{"0": 5, "1": 20}')

    async def body():
        async with fake_vllm.engine(interruption="keep_kv") as engine:
            (task,) = await fake_vllm.begin(engine, count=1, length=100)
            await engine.load_version(fake_vllm.publish(1), "keep_kv")
            shown, sampled = len(engine.progress()[0]), engine.counters()["tokens"]
            await fake_vllm.until(lambda: engine.counters()["tokens"] > sampled + 5)
            assert len(engine.progress()[0]) == shown, "their version is not confirmed yet"
            live = await engine._started().keeper.ready()
            os.kill(live.process.pid, signal.SIGKILL)
            outcome = await task
            fake_vllm.check(outcome.segment)
            assert len(outcome.segment) == 100
            assert engine.counters()["dropped_tokens"] >= 6
            assert engine.version == 1
            assert "the server ended with signal SIGKILL; starting a new server with version 1" in fake_vllm.reports[0]

    fake_vllm.run(body())


def test_a_server_stopped_in_generation_is_replaced_and_nothing_is_lost(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(control_timeout_s=60.0, stall_timeout_s=2.0, max_restarts=9) as engine:
            tasks = await fake_vllm.begin(engine)
            os.kill((await engine._started().keeper.ready()).process.pid, signal.SIGSTOP)
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert len(outcome.segment) == 60
            assert "vLLM server: the server reported no token for" in fake_vllm.reports[0]

    fake_vllm.run(body())


@pytest.mark.parametrize(
    ("fault", "limit_s", "words"),
    [
        ("HANG", 4.0, "the server hangs in the swap to version 1"),
        ("DIE", 60.0, "the server ended"),
        ("CRASH", 60.0, "the server ended"),
    ],
)
def test_a_server_that_hangs_or_dies_in_a_load_is_replaced_by_one_that_loads_it(
    fake_vllm, monkeypatch, fault, limit_s, words
):
    monkeypatch.setenv(f"FAKE_{fault}_LOADING", "1")
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(load_timeout_s=limit_s, max_restarts=9) as engine:
            tasks = await fake_vllm.begin(engine)
            await engine.load_version(fake_vllm.publish(1), "recompute")
            assert engine.version == 1
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
            assert any(words in report for report in fake_vllm.reports)

    fake_vllm.run(body())


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
def test_a_connection_that_breaks_in_a_load_does_not_make_a_good_version_a_refused_one(fake_vllm, monkeypatch, mode):
    monkeypatch.setenv("FAKE_BREAK_LOADING", "1")
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(interruption=mode) as engine:
            tasks = await fake_vllm.begin(engine)
            await engine.load_version(fake_vllm.publish(1), mode)
            assert engine.version == 1
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert len(outcome.segment) == 60
            assert "the connection failed while loading version 1" in fake_vllm.reports[0]

    fake_vllm.run(body())


def test_answers_that_end_before_a_load_is_verified_use_no_token_of_it(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_BREAK_PROBE", "1")
    monkeypatch.setenv("FAKE_WRONG_PROBE", "1")
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(interruption="keep_kv") as engine:
            engine._probes = FakeProbes()
            tasks = await fake_vllm.begin(engine)
            with pytest.raises(WeightError, match=r"probe prompt differ by 0\.4 nats from those of version 1"):
                await engine.load_version(fake_vllm.publish(1), "keep_kv")
            assert engine.version == 0
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert set(outcome.segment.versions_R.tolist()) == {0}

    fake_vllm.run(body())


def test_a_probe_with_an_answer_of_another_form_leaves_the_old_version_on_a_new_server(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_ODD_PROBE", "1")
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine(interruption="keep_kv") as engine:
            engine._probes = FakeProbes()
            tasks = await fake_vllm.begin(engine)
            with pytest.raises(WeightError, match="log-probs of 2 positions for a prompt of 3"):
                await engine.load_version(fake_vllm.publish(1), "keep_kv")
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert set(outcome.segment.versions_R.tolist()) == {0}

    fake_vllm.run(body())


def test_a_new_server_whose_weights_are_wrong_is_replaced_by_another(fake_vllm, monkeypatch):
    async def body():
        async with fake_vllm.engine() as engine:
            engine._probes = FakeProbes()
            await engine.load_version(fake_vllm.publish(1), "recompute")
            os.kill((await engine._started().keeper.ready()).process.pid, signal.SIGKILL)
            outcome = await engine.generate(fake_vllm.ask())
            fake_vllm.check(outcome.segment)
            assert "probe prompt differ by 0.4 nats from those of version 1" in fake_vllm.reports[1]

    monkeypatch.setenv("FAKE_WRONG_AT_START", "1")
    fake_vllm.run(body())


def test_a_refused_version_leaves_the_old_one_in_use_on_a_new_server(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_REFUSE_VERSION", "1")
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine() as engine:
            tasks = await fake_vllm.begin(engine)
            with pytest.raises(
                WeightError, match=r"vLLM cannot load version 1: .*differ from those in the update request"
            ):
                await engine.load_version(fake_vllm.publish(1), "recompute")
            assert engine.version == 0
            for outcome in await asyncio.gather(*tasks):
                fake_vllm.check(outcome.segment)
                assert set(outcome.segment.versions_R.tolist()) == {0}
            await engine.load_version(fake_vllm.publish(2), "recompute")
            assert engine.version == 2
            assert "the server rejected version 1; starting a new server with version 0" in fake_vllm.reports[0]

    fake_vllm.run(body())


def test_an_error_inside_a_stream_is_another_attempt_and_five_without_a_token_fail(fake_vllm, monkeypatch):
    async def body():
        monkeypatch.setenv("FAKE_ERROR_AT", "7")
        async with fake_vllm.engine() as engine:
            outcome = await engine.generate(fake_vllm.ask())  # each attempt brings six tokens
            fake_vllm.check(outcome.segment)
            assert len(outcome.segment) == 60
        monkeypatch.setenv("FAKE_ERROR_AT", "1")
        async with fake_vllm.engine() as engine:
            with pytest.raises(EngineError, match=r"5 attempts produced no token .*Internal server error"):
                await engine.generate(fake_vllm.ask())

    fake_vllm.run(body())


def test_stop_ids_seed_and_lengths_are_asked_for(fake_vllm):
    async def body():
        async with fake_vllm.engine() as engine:
            outcome = await engine.generate(fake_vllm.ask(stop_token_ids=(12,)))
            assert (outcome.end_reason, outcome.segment.tokens_R.tolist()) == ("stop", [8, 9, 10, 11, 12])
            asked = [call for call in (await fake_vllm.state(engine))["calls"] if call[0] == "generate"][-1][3]
            assert (asked["max_tokens"], asked["seed"], asked["stop_token_ids"]) == (60, 1, [12])
            assert (asked["ignore_eos"], asked["detokenize"]) == (True, False)

    fake_vllm.run(body())


def test_a_cancelled_answer_is_aborted_by_its_id_inside_the_server(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_HOLD", HELD)

    async def body():
        async with fake_vllm.engine() as engine:
            (task,) = await fake_vllm.begin(engine, count=1, length=100)
            task.cancel()
            await asyncio.wait([task])
            while not any(call[0] == "abort" for call in (await fake_vllm.state(engine))["calls"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (abort,) = [call for call in (await fake_vllm.state(engine))["calls"] if call[0] == "abort"]
            assert abort[1][0].startswith("generate-tokens-w-")

    fake_vllm.run(body())


def test_a_server_with_another_sampler_is_not_used(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_OTHER_RUNNER", "1")

    async def body():
        engine = fake_vllm.make()
        try:
            with pytest.raises(EngineError, match="uses an unsupported sampler"):
                await engine.start()
        finally:
            await engine.close()

    fake_vllm.run(body())


def test_a_mistake_at_the_start_is_the_users_and_leaves_no_process(fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_DIE_AT_START", "ValueError: Model architectures ['X'] are not supported for now.")

    async def body():
        engine = fake_vllm.make()
        before = psutil.Process().children()
        with pytest.raises(UserError, match=r"vLLM cannot load this model on this machine: Model architectures"):
            await engine.start()
        await engine.close()
        assert psutil.Process().children() == before

    fake_vllm.run(body())


def test_the_server_imports_one_file_of_ours_and_its_key_is_on_no_command_line(fake_vllm):
    async def body():
        async with fake_vllm.engine() as engine:
            state = await fake_vllm.state(engine)
            assert any(part.endswith("rollout/engine/vllm/inside") for part in state["path"])
            live = await engine._started().keeper.ready()
            key = live.client._session.headers["Authorization"].removeprefix("Bearer ")
            assert len(key) == 64
            assert not any(key in word for word in state["words"])

    fake_vllm.run(body())
