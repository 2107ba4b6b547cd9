"""Claims about workers that come and go in mid-run, over real sockets with peers that play their part."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_run import Trainer, Worker, assert_whole, bounded, concurrently, small_run, until

from areal_like.trajectory import Segment
from areal_like.wire import messages as m
from controller.coordinator.effects import AddWorker, RetireWorker
from controller.runtime.control_requests import Requests, Wish, answer_to, ask
from controller.runtime.worker_admin import MAX_SAVERS, WorkerAdmin


class Slow(Worker):
    """Keeps its leases. On notice it does what a rollout worker does: announces, hands back, says Goodbye."""

    async def on_lease(self, task: m.SampleTask) -> None:
        pass

    async def until_notice(self) -> None:
        task = asyncio.create_task(self.work())
        await until(lambda: bool(self.leased))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self.peer.send(m.Draining(reason="SIGTERM"))
        for lease in self.leased:
            back = m.SampleReturned(lease_id=lease.lease_id, start=0, segment=Segment.empty(), reason="drain")
            await self.peer.send(back)
        await self.peer.close("SIGTERM")


async def asked(folder: Path, wish: Wish, worker: str = "") -> tuple[bool, str]:
    """The answer of the run in `folder`."""
    key = ask(folder / "requests", wish, worker)
    found: list[tuple[bool, str]] = []

    def is_answered() -> bool:
        found.extend(answer for answer in [answer_to(folder / "requests", key)] if answer is not None)
        return bool(found)

    await until(is_answered)
    return found[0]


def test_worker_that_leaves_on_notice_is_released_and_the_run_goes_on(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            leaver, stayer = Slow(run, "rollout-1", capacity=2), Worker(run, "rollout-0", capacity=2)
            async with concurrently(leaver.until_notice(), stayer.work(), Trainer(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert run.supervisor.left == ["rollout-1"]
            assert "rollout-1" in run.supervisor.released
            kinds = [row["note"] for row in run.rows("note")]
            assert {"draining", "worker_left"} <= set(kinds)
            assert "worker_lost" not in kinds

    bounded(test())
    assert_whole(tmp_path, 3)


def test_drain_on_request_tells_the_worker_to_leave(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow, stayer = Slow(run, "rollout-1", capacity=2), Worker(run, "rollout-0", capacity=2)

            async def operator() -> None:
                await until(lambda: bool(slow.leased))
                assert await asked(tmp_path, "drain", "rollout-1") == (True, "rollout-1")

            async with concurrently(stayer.work(), slow.work(), Trainer(run).work(), operator()):
                outcome = await run.go()
                assert slow.was_shut_down
            assert outcome.status == "completed"

    bounded(test())
    assert_whole(tmp_path, 3)


def test_the_only_worker_is_not_drained_and_strangers_are_refused_in_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow = Slow(run, "rollout-0", capacity=2)
            answers: list[tuple[bool, str]] = []

            async def operator() -> None:
                await until(lambda: bool(slow.leased))
                answers.extend([await asked(tmp_path, "drain", name) for name in ("rollout-0", "rollout-7", "trainer")])
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(slow.work(), Trainer(run).work(), operator()):
                await run.go()
            assert [is_granted for is_granted, _ in answers] == [False] * 3
            assert "only rollout worker" in answers[0][1]
            assert "connected workers: rollout-0" in answers[1][1]
            assert run.supervisor.left == []

    bounded(test())


def test_added_worker_is_named_to_its_requester(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow = Slow(run)

            async def operator() -> None:
                await until(lambda: bool(slow.leased))
                assert await asked(tmp_path, "add") == (True, "rollout-9")
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(slow.work(), Trainer(run).work(), operator()):
                await run.go()
            assert run.supervisor.added == ["rollout-9"]

    bounded(test())


def test_last_worker_that_leaves_all_the_same_is_left_to_the_supervisor(tmp_path):
    """Its exit counts as an accident then, and it is started again."""

    async def test():
        async with small_run(tmp_path) as run:

            async def lonely() -> None:
                await Slow(run, "rollout-0", capacity=2).until_notice()
                await until(lambda: "rollout-0" not in run.hub.peers)
                await Worker(run, "rollout-0").work()

            async with concurrently(lonely(), Trainer(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert run.supervisor.left == []
            assert "rollout-0" not in run.supervisor.released

    bounded(test())
    assert_whole(tmp_path, 3)


def test_speed_of_a_worker_comes_from_its_heartbeats(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow = Slow(run)
            crew = run.parts.worker_admin

            async def operator() -> None:
                await until(lambda: bool(slow.leased))
                info = run.hub.peers["rollout-0"]
                for tokens, steps, busy_s in ((0.0, 0.0, 0.0), (500.0, 50.0, 2.0)):
                    counters = {"tokens": tokens, "steps": steps, "busy_s": busy_s}
                    info.heartbeat = m.Heartbeat(state="generate", counters=counters)
                    events = crew.tick(0.0)
                (event,) = (one.event for one in events)
                assert (event.tokens_per_s, event.steps_per_s) == (250.0, 25.0)
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(slow.work(), Trainer(run).work(), operator()):
                await run.go()

    bounded(test())


class Saver(Trainer):
    """Saves when asked to, or says that the disk refuses."""

    refusal = ""

    async def work(self) -> None:
        self.peer = await self.run.connect("trainer", "trainer", set(self.ACCEPT))
        await self.publish({})
        while True:
            match await self.peer.receive(1.0):
                case m.SaveCheckpoint():
                    await self.peer.send(m.CheckpointSaved(version=-1, path="an earlier one, under way"))
                    if self.refusal:
                        await self.peer.send(m.CheckpointFailed(version=0, reason=self.refusal))
                    else:
                        saved = m.CheckpointSaved(version=0, path="c0", stall_s=0.1, write_s=0.2, num_bytes=3)
                        await self.peer.send(saved)
                case m.Shutdown():
                    return


@pytest.mark.parametrize("refusal", ["", "the disk is full"])
def test_checkpoint_on_request_is_answered_when_the_trainer_has_it(tmp_path, refusal):
    async def test():
        async with small_run(tmp_path) as run:
            saver = Saver(run)
            saver.refusal = refusal

            async def operator() -> None:
                await until(lambda: run.coordinator.version == 0)
                answers = [await asked(tmp_path, "checkpoint"), await asked(tmp_path, "checkpoint")]
                assert answers == [(False, refusal) if refusal else (True, "c0")] * 2
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(saver.work(), operator()):
                await run.go()
            if refusal:
                assert (
                    "the checkpoint of version 0 could not be written: the disk is full; the run continues without it"
                    in run.shown.getvalue()
                )
                assert [row["reason"] for row in run.rows("checkpoint_failed")] == [refusal] * 2
            else:
                rows = run.rows("checkpoint")
                assert [(row["version"], row["stall_s"], row["num_bytes"]) for row in rows] == [(0, 0.1, 3)] * 2

    bounded(test())


def test_checkpoint_without_a_trainer_is_refused_in_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow = Slow(run)

            async def operator() -> None:
                is_granted, text = await asked(tmp_path, "checkpoint")
                assert not is_granted
                assert text.startswith("no trainer is running at the moment")
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(slow.work(), operator()):
                await run.go()

    bounded(test())


def test_checkpoint_of_a_trainer_that_replays_answers_a_request_made_meanwhile(tmp_path):
    hub = SimpleNamespace(peers={}, send=lambda name, message: True)
    coordinator = SimpleNamespace(version=10, trained=6)  # it died at 10, and has come from its checkpoint to 6 again
    requests = Requests(tmp_path)
    crew = WorkerAdmin(coordinator, SimpleNamespace(), hub, requests, add_worker=lambda: "", say=lambda text: None)
    key = ask(tmp_path, "checkpoint")
    crew.tick(0.0)
    crew.checkpoint_saved(5, "one that was under way")
    assert answer_to(tmp_path, key) is None
    crew.checkpoint_saved(7, "c7")
    assert answer_to(tmp_path, key) == (True, "c7")


def test_checkpoint_is_refused_while_as_many_requests_as_allowed_are_pending(tmp_path):
    requests = Requests(tmp_path)
    sent: list[str] = []
    hub = SimpleNamespace(peers={}, send=lambda name, message: not sent.append(name))
    coordinator = SimpleNamespace(trained=0)
    crew = WorkerAdmin(coordinator, SimpleNamespace(), hub, requests, add_worker=lambda: "", say=lambda text: None)
    keys = []
    for _ in range(MAX_SAVERS + 1):
        keys.append(ask(tmp_path, "checkpoint"))
        crew.tick(0.0)
    assert answer_to(tmp_path, keys[-1]) == (False, "too many requests are pending")
    assert sent == ["trainer"] * MAX_SAVERS
    crew.checkpoint_saved(0, "c0")
    assert {answer_to(tmp_path, key) for key in keys[:-1]} == {(True, "c0")}


def test_decisions_of_autoscaling_are_carried_out_like_requests(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            slow, stayer = Slow(run, "rollout-1", capacity=2), Slow(run, "rollout-0", capacity=2)
            crew = run.parts.worker_admin

            async def decide() -> None:
                await until(lambda: bool(slow.leased) and bool(stayer.leased))
                incarnation = run.hub.peers["rollout-1"].incarnation
                crew.scale(RetireWorker(worker="rollout-1", incarnation="of a predecessor"))
                crew.scale(RetireWorker(worker="rollout-7", incarnation="unknown"))
                crew.scale(AddWorker(max_workers=3))
                await until(lambda: run.supervisor.added == ["rollout-9"])
                assert run.supervisor.left == []
                crew.scale(RetireWorker(worker="rollout-1", incarnation=incarnation))
                await until(lambda: slow.was_shut_down)
                assert run.supervisor.left == ["rollout-1"]
                crew.scale(RetireWorker(worker="rollout-0", incarnation=run.hub.peers["rollout-0"].incarnation))
                crew.scale(AddWorker(max_workers=3))
                await until(lambda: len(run.supervisor.added) == 2)
                assert run.supervisor.left == ["rollout-1"], "the last worker stays"
                run.server.request_stop("enough")
                run.server.request_stop("enough")

            async with concurrently(slow.work(), stayer.work(), Trainer(run).work(), decide()):
                await run.go()

    bounded(test())


@pytest.mark.parametrize(("max_workers", "num_added"), [(2, 0), (3, 1)])
def test_a_worker_that_still_starts_counts_for_the_limit_of_autoscaling(tmp_path, max_workers, num_added):
    added = []
    supervisor = SimpleNamespace(
        names_of=lambda role: ["rollout-0", "starting", "leaving", "external"],
        is_external=lambda name: name == "external", is_leaving=lambda name: name == "leaving",
    )  # fmt: skip
    crew = WorkerAdmin(
        SimpleNamespace(is_over=False), supervisor, SimpleNamespace(peers={}), Requests(tmp_path),
        add_worker=lambda: added.append(1) or "rollout-9", say=lambda text: None,
    )  # fmt: skip
    crew.scale(AddWorker(max_workers=max_workers))
    assert crew.tick(0.0) == []
    assert len(added) == num_added


def test_nothing_is_added_to_a_run_that_is_over(tmp_path):
    added = []
    coordinator = SimpleNamespace(is_over=True)
    crew = WorkerAdmin(
        coordinator, SimpleNamespace(), SimpleNamespace(peers={}), Requests(tmp_path),
        add_worker=lambda: added.append(1), say=lambda text: None,
    )  # fmt: skip
    crew.scale(AddWorker(max_workers=9))
    assert crew.tick(0.0) == []
    assert added == []
