"""Claims about the server: whole small runs over real sockets and a real ledger, with peers that misbehave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from small_run import Trainer, Worker, answer, assert_whole, bounded, concurrently, segment, small_run, until

from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.verdict import Verdict
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import SendVersion
from controller.coordinator.events import Published, RunStarted, WorkerEnded, WorkerLost
from controller.runtime.outbound import stream_seed
from controller.runtime.supervisor import Loss


def test_small_run_consumes_every_step_once_and_its_ledger_is_clean(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker, trainer = Worker(run), Trainer(run)
            async with concurrently(worker.work(), trainer.work()):
                outcome = await run.go()
                assert (outcome.status, outcome.error) == ("completed", None)
                await run.server.farewell(5.0)
            assert [batch.step for batch in trainer.batches] == [1, 2, 3]
            assert run.tally.steps == 3
            assert run.tally.samples == 12
            assert worker.was_shut_down

    bounded(test())
    assert_whole(tmp_path, 3)


def test_every_step_row_carries_what_a_run_is_judged_by(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                await run.go()
            rows = run.rows("step")
            assert [row["step"] for row in rows] == [1, 2, 3], "a metric of the trainer must not hide the step"
            wanted = {
                "reward_mean", "loss", "grad_norm", "staleness", "staleness_mean", "staleness_max", "samples_per_s",
                "rollout_tokens_per_s", "trainer_tokens_per_s", "trainer_wait_share", "wall_s", "time_s", "num_samples",
            }  # fmt: skip
            assert all(row.keys() >= wanted for row in rows)

    bounded(test())


def test_what_the_trainer_chose_is_shown_once(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                await run.go()
            assert run.shown.getvalue().count("trainer: attention sdpa (auto)") == 1

    bounded(test())


def test_sample_is_in_the_ledger_before_its_worker_is_notified(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker = Worker(run)
            seen: list[bool] = []
            send = run.hub.send

            def watch(peer: str, message: m.Message) -> bool:
                if isinstance(message, m.SampleAck):
                    stored = {
                        (row.group_id, sample.sample_index)
                        for row in run.ledger.load().live
                        for sample in row.samples
                        if sample.is_finished
                    } | {
                        (group.group_id, index)
                        for batch in run.ledger.load().batches
                        for group in batch.groups
                        for index in group.sample_indices
                    }
                    tasks = {task.lease_id: (task.group_id, task.sample_index) for task in worker.leased}
                    seen.extend(tasks[lease_id] in stored for lease_id in message.lease_ids)
                return send(peer, message)

            run.hub.send = watch  # type: ignore[method-assign]
            async with concurrently(worker.work(), Trainer(run).work()):
                await run.go()
            assert seen
            assert all(seen)

    bounded(test())


def test_finished_sample_reported_three_times_is_used_once_and_acknowledged_each_time(tmp_path):
    class Repeating(Worker):
        async def on_lease(self, task):
            for _ in range(3):
                await self.peer.send(answer(task, self.version))

    async def test():
        async with small_run(tmp_path) as run:
            worker = Repeating(run)
            async with concurrently(worker.work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
                await run.server.farewell(5.0)
            assert run.tally.samples == 12
            lease_id = worker.leased[0].lease_id
            assert worker.acked.count(lease_id) == 3

    bounded(test())
    assert_whole(tmp_path, 3)


def test_lost_acknowledgement_is_made_good_by_the_next_report(tmp_path):
    class Resending(Worker):
        async def on_lease(self, task):
            await self.peer.send(answer(task, self.version))
            await asyncio.sleep(0.02)
            if task.lease_id not in self.acked:
                await self.peer.send(answer(task, self.version))

    async def test():
        async with small_run(tmp_path) as run:
            send, lost = run.hub.send, []

            def deaf(peer: str, message: m.Message) -> bool:
                if isinstance(message, m.SampleAck) and len(lost) < 4:
                    lost.append(message)
                    return True
                return send(peer, message)

            run.hub.send = deaf  # type: ignore[method-assign]
            async with concurrently(Resending(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.tally.samples == 12
            assert len(lost) == 4

    bounded(test())
    assert_whole(tmp_path, 3)


def turn_checkpoint(group_id):
    given = np.array([group_id, 7], np.int32)
    return TurnCheckpoint(given_places_G=np.array([0, 2], np.int32), given_tokens_G=given, num_turns=1, state=b"\x01")


@pytest.mark.parametrize("has_turns", [False, True])
def test_samples_of_a_vanished_worker_go_on_elsewhere_from_their_tokens(tmp_path, has_turns):
    class Vanishing(Worker):
        async def on_lease(self, task):
            part = m.SampleProgress(
                lease_id=task.lease_id, start=0, segment=segment(2, self.version),
                checkpoint=turn_checkpoint(task.group_id) if has_turns else None,
            )  # fmt: skip
            await self.peer.send(m.Progress(items=(part,)))

    async def test():
        async with small_run(tmp_path) as run:
            first, second = Vanishing(run, "rollout-0"), Worker(run, "rollout-1")
            async with concurrently(first.work(), Trainer(run).work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: any(record.samples for record in run.ledger.load().live))
                async with concurrently(second.work()):
                    await until(lambda: "rollout-1" in run.hub.peers)
                    run.supervisor.losses.append(Loss("rollout-0", "rollout", "killed", is_permanent=True))
                    assert (await ending).status == "completed"
            continued = [task for task in second.leased if len(task.prefix)]
            assert continued
            assert all(task.prefix.tokens_R.tolist() == [0, 1] for task in continued)
            for task in continued:
                if not has_turns:
                    assert task.checkpoint is None
                    continue
                assert task.checkpoint.given_tokens_G.tolist() == [task.group_id, 7]
                assert task.checkpoint.given_places_G.tolist() == [0, 2]
                assert (task.checkpoint.num_turns, task.checkpoint.state) == (1, b"\x01")
            assert "rollout-0: killed; not restarted" in run.shown.getvalue()

    bounded(test())
    assert_whole(tmp_path, 3)


def test_an_announcement_meant_for_a_dead_process_does_not_reach_its_successor(tmp_path, monkeypatch):
    async def test():
        async with small_run(tmp_path) as run:
            out, sent = run.server._dispatcher._out, []
            monkeypatch.setattr(out, "send", lambda peer, message: sent.append(peer))
            monkeypatch.setitem(run.hub.peers, "rollout-0", SimpleNamespace(incarnation="b"))
            announcement = SendVersion(worker="rollout-0", version=1, lineage="l0", manifest_path="v1")
            out.version(msgspec.structs.replace(announcement, incarnation="a"))
            assert not sent
            out.version(msgspec.structs.replace(announcement, incarnation="b"))
            assert sent == ["rollout-0"]
            monkeypatch.undo()

    bounded(test())


def test_a_killed_worker_is_lost_at_once_and_its_end_is_reported_once_it_was_seen(tmp_path, monkeypatch):
    events = []
    handle = Coordinator.handle

    def record(coordinator, event, now_s):
        if isinstance(event, WorkerLost | WorkerEnded):
            events.append((type(event).__name__, event.worker, getattr(event, "may_live", None)))
        return handle(coordinator, event, now_s)

    monkeypatch.setattr(Coordinator, "handle", record)

    async def test():
        async with small_run(tmp_path) as run, concurrently(Worker(run, "rollout-1").work()):
            ending = asyncio.create_task(run.go())
            run.supervisor.losses.append(Loss("rollout-0", "rollout", "silent", is_permanent=True, may_live=True))
            await until(lambda: events)
            assert events == [("WorkerLost", "rollout-0", True)]
            run.supervisor.ended.append("rollout-0")
            await until(lambda: len(events) > 1)
            assert events[1:] == [("WorkerEnded", "rollout-0", None)]
            async with concurrently(Trainer(run).work()):
                assert (await ending).status == "completed"

    bounded(test())


def test_worker_that_says_goodbye_unasked_is_lost_but_stays_under_supervision(tmp_path):
    class Leaving(Worker):
        async def on_lease(self, task):
            await self.peer.close("spot machine taken away")
            raise asyncio.CancelledError

    async def test():
        async with small_run(tmp_path) as run, concurrently(Leaving(run).work(), Trainer(run).work()):
            ending = asyncio.create_task(run.go())
            await until(lambda: "spot machine taken away" in run.shown.getvalue())
            assert run.supervisor.released == []
            async with concurrently(Worker(run).work()):  # its successor
                assert (await ending).status == "completed"

    bounded(test())
    assert_whole(tmp_path, 3)


def test_worker_out_of_reach_is_removed_and_its_leases_are_given_again(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker = Worker(run)
            send, refused = run.hub.send, []

            def full(peer: str, message: m.Message) -> bool:
                if isinstance(message, m.Lease) and not refused:
                    refused.append(message)
                    return False
                return send(peer, message)

            run.hub.send = full  # type: ignore[method-assign]
            async with concurrently(worker.work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.supervisor.out_of_touch == ["rollout-0"]
            assert {task.lease_id for task in refused[0].tasks}.isdisjoint(task.lease_id for task in worker.leased)

    bounded(test())
    assert_whole(tmp_path, 3)


def test_trainer_that_missed_its_batch_gets_it_when_it_says_hello_again(tmp_path):
    class Asking(Trainer):
        async def work(self):
            self.peer = await self.run.connect("trainer", "trainer", set(self.ACCEPT))
            await self.publish({})
            await self.peer.send(m.BatchRequest(step=1))
            while self.version < 3:
                match await self.peer.receive(1.0):
                    case m.Batch() as batch:
                        self.batches.append(batch)
                        await self.on_batch(batch)
                    case m.Welcome():  # as trainer/worker.py does
                        await self.publish({})
                        await self.peer.send(m.BatchRequest(step=self.version + 1))
            await self.leave()

    async def test():
        async with small_run(tmp_path) as run:
            send, refused = run.hub.send, []

            def full(peer: str, message: m.Message) -> bool:
                if isinstance(message, m.Batch) and not refused:
                    refused.append(message)
                    return False
                return send(peer, message)

            run.hub.send = full  # type: ignore[method-assign]
            trainer = Asking(run)
            async with concurrently(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert [batch.step for batch in trainer.batches] == [1, 2, 3]

    bounded(test())
    assert_whole(tmp_path, 3)


def test_version_announced_twice_is_one_step(tmp_path):
    class Twice(Trainer):
        async def publish(self, metrics):
            await super().publish(metrics)
            await super().publish(metrics)

    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Worker(run).work(), Twice(run).work()):
                await run.go()
            assert run.tally.steps == 3
            assert [row["step"] for row in run.rows("step")] == [1, 2, 3]

    bounded(test())


def test_evaluations_count_correct_answers_of_one_version(tmp_path):
    async def test():
        settings = {"num_eval_rows": 4, "num_periodic_eval_rows": 2, "eval_every_steps": 2, "num_steps": 3}
        async with small_run(tmp_path, **settings) as run:
            worker = Worker(run)
            worker.on_lease = lambda task: worker.peer.send(  # type: ignore[method-assign]
                answer(task, worker.version, reward=-7.0 if task.purpose == "eval" else 1.0)
            )
            async with concurrently(worker.work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.tally.accuracy[0] == 1.0, "the component `correct`, not the reward"
            assert run.tally.accuracy[3] == 1.0
            assert run.tally.eval_rows[3] == 4
            assert {row["eval"] for row in run.rows("eval")} >= {"baseline", "final"}
            evals = [task for task in worker.leased if task.purpose == "eval"]
            assert all(task.sampling.temperature == 0.0 for task in evals)
            assert all(task.sampling.temperature == 1.0 for task in worker.leased if task.purpose == "train")

    bounded(test())


def test_evaluation_without_any_score_is_no_accuracy_and_no_zero(tmp_path):
    class Unscored(Worker):
        async def on_lease(self, task):
            done = answer(task, self.version)
            if task.purpose == "eval":
                verdict = Verdict(kind="timed_out", reason="slow")
                done = m.SampleFinished(
                    lease_id=task.lease_id, group_id=task.group_id, sample_index=0, trajectory=done.trajectory,
                    verdict=verdict,
                )  # fmt: skip
            await self.peer.send(done)

    async def test():
        async with small_run(tmp_path, num_eval_rows=2, num_steps=1) as run:
            async with concurrently(Unscored(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.tally.accuracy == {}
            assert "2 of 2 evaluated answers got no score" in run.shown.getvalue()

    bounded(test())


def test_evaluation_waits_for_workers_that_are_still_to_come(tmp_path):
    async def test():
        async with small_run(tmp_path, num_steps=0, num_eval_rows=2) as run:
            first = [
                RunStarted(lineage="l0", checkpoint_version=0),
                Published(version=0, lineage="l0", manifest_path="v0"),
            ]
            ending = asyncio.create_task(run.server.run(first))
            await until(lambda: run.coordinator.version == 0)
            await asyncio.sleep(0.3)
            assert not ending.done()
            async with concurrently(Worker(run).work()):
                assert (await ending).status == "completed"
            assert run.tally.accuracy == {0: 1.0}

    bounded(test())


def test_message_that_is_not_for_its_sender_to_send_is_shown_and_harmless(tmp_path):
    class Confused(Worker):
        async def on_lease(self, task):
            await self.peer.send(m.BatchRequest(step=99))
            await super().on_lease(task)

    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Confused(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert "unexpected message BatchRequest from rollout-0" in run.shown.getvalue()

    bounded(test())
    assert_whole(tmp_path, 3)


def test_random_stream_is_a_pure_function_of_seed_and_name():
    names = [
        (seed, purpose, g, i) for seed in (1, 2) for purpose in ("train", "eval") for g in range(3) for i in (0, 1)
    ]
    seeds = [stream_seed(*name) for name in names]
    assert seeds == [stream_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 1 << 62 for seed in seeds)
