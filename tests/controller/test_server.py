"""Claims about the server: whole small runs over real sockets and a real ledger, with peers that misbehave."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from small_run import Trainer, Worker, answer, beside, bounded, segment, small_run, until

from areal_like import messages as m
from areal_like.errors import DeadlineExceeded, LedgerError, OperationError, UserError
from areal_like.verdict import Verdict
from controller import protocol as p
from controller.audit import audit
from controller.ledger import Ledger
from controller.outcome import StoppedAtOnce
from controller.outgoing import stream_seed
from controller.supervision import Loss


def assert_whole(folder: Path, num_steps: int) -> None:
    report = audit(folder)
    assert report.is_clean, report.lines()
    assert report.num_steps == num_steps


def test_small_run_consumes_every_step_once_and_its_ledger_is_clean(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker, trainer = Worker(run), Trainer(run)
            async with beside(worker.work(), trainer.work()):
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
            async with beside(Worker(run).work(), Trainer(run).work()):
                await run.go()
            rows = run.rows("step")
            assert [row["step"] for row in rows] == [1, 2, 3], "a metric of the trainer must not hide the step"
            wanted = {
                "reward_mean", "loss", "grad_norm", "staleness", "staleness_mean", "staleness_max", "samples_per_s",
                "rollout_tokens_per_s", "trainer_tokens_per_s", "trainer_wait_share", "wall_s", "time_s", "num_samples",
            }  # fmt: skip
            assert all(row.keys() >= wanted for row in rows)

    bounded(test())


def test_sample_is_in_the_ledger_before_its_worker_is_told_so(tmp_path):
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
            async with beside(worker.work(), Trainer(run).work()):
                await run.go()
            assert seen
            assert all(seen)

    bounded(test())


def test_finished_sample_told_three_times_is_used_once_and_acknowledged_each_time(tmp_path):
    class Repeating(Worker):
        async def on_lease(self, task):
            for _ in range(3):
                await self.peer.send(answer(task, self.version))

    async def test():
        async with small_run(tmp_path) as run:
            worker = Repeating(run)
            async with beside(worker.work(), Trainer(run).work()):
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
            async with beside(Resending(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.tally.samples == 12
            assert len(lost) == 4

    bounded(test())
    assert_whole(tmp_path, 3)


def test_samples_of_a_vanished_worker_go_on_elsewhere_from_their_tokens(tmp_path):
    class Vanishing(Worker):
        async def on_lease(self, task):
            part = m.SampleProgress(lease_id=task.lease_id, start=0, segment=segment(2, self.version))
            await self.peer.send(m.Progress(items=(part,)))

    async def test():
        async with small_run(tmp_path) as run:
            first, second = Vanishing(run, "rollout-0"), Worker(run, "rollout-1")
            async with beside(first.work(), Trainer(run).work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: any(record.samples for record in run.ledger.load().live))
                async with beside(second.work()):
                    await until(lambda: "rollout-1" in run.hub.peers)
                    run.supervisor.losses.append(Loss("rollout-0", "rollout", "killed", is_permanent=True))
                    assert (await ending).status == "completed"
            continued = [task for task in second.leased if len(task.prefix)]
            assert continued
            assert all(task.prefix.tokens_R.tolist() == [0, 1] for task in continued)
            assert "rollout-0: killed; it stays away" in run.shown.getvalue()

    bounded(test())
    assert_whole(tmp_path, 3)


def test_worker_that_says_goodbye_unasked_is_lost_but_stays_under_supervision(tmp_path):
    class Leaving(Worker):
        async def on_lease(self, task):
            await self.peer.close("spot machine taken away")
            raise asyncio.CancelledError

    async def test():
        async with small_run(tmp_path) as run, beside(Leaving(run).work(), Trainer(run).work()):
            ending = asyncio.create_task(run.go())
            await until(lambda: "spot machine taken away" in run.shown.getvalue())
            assert run.supervisor.released == []
            async with beside(Worker(run).work()):  # its successor
                assert (await ending).status == "completed"

    bounded(test())
    assert_whole(tmp_path, 3)


def test_worker_out_of_reach_is_struck_off_and_its_leases_are_given_anew(tmp_path):
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
            async with beside(worker.work(), Trainer(run).work()):
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
            async with beside(Worker(run).work(), trainer.work()):
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
            async with beside(Worker(run).work(), Twice(run).work()):
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
            async with beside(worker.work(), Trainer(run).work()):
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
            async with beside(Unscored(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert run.tally.accuracy == {}
            assert "2 of 2 evaluated answers got no score" in run.shown.getvalue()

    bounded(test())


# ---------------------------------------------------------------- stopping


def test_one_stop_finishes_the_running_step_saves_and_ends_well(tmp_path):
    class Slow(Trainer):
        async def on_batch(self, batch):
            if batch.step == 2:
                self.run.server.request_stop("SIGINT")
                await until(lambda: self.run.server._is_stop_told)
            await super().on_batch(batch)

    async def test():
        async with small_run(tmp_path, num_steps=9) as run:
            trainer = Slow(run)
            async with beside(Worker(run).work(), trainer.work()):
                outcome = await run.go()
            assert (outcome.status, outcome.reason, outcome.error) == ("stopped", "SIGINT", None)
            assert trainer.version == 2
            assert [record.version for record in run.ledger.load().checkpoints] == [2]

    bounded(test())


def test_stop_before_the_trainer_is_there_ends_at_once(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.server.request_stop("SIGTERM")  # before the coordinator has begun
            assert (await run.go()).status == "stopped"

    bounded(test())


def test_second_stop_waits_for_nobody(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker = Worker(run)
            async with beside(worker.work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: "rollout-0" in run.hub.peers)
                run.server.request_stop("SIGINT")
                run.server.request_stop("SIGINT")
                outcome = await ending
                assert isinstance(outcome.error, StoppedAtOnce)
                assert outcome.status == "stopped"
                assert run.server.is_hurried
                before_s = asyncio.get_running_loop().time()
                worker.on_lease = None  # type: ignore[assignment]
                await run.server.farewell(10.0)
                assert asyncio.get_running_loop().time() - before_s < 5.0, "the grace of ten seconds was sat out"

    bounded(test())


def test_stop_that_takes_too_long_ends_with_words_although_tokens_flow(tmp_path):
    async def test():
        async with small_run(tmp_path, stop_grace_s=0.3, num_steps=9) as run:

            class Stuck(Trainer):
                async def on_batch(self, batch):
                    run.server.request_stop("SIGINT")
                    while True:
                        run.tally.add_counters("rollout-7", "x", {"tokens": asyncio.get_running_loop().time()})
                        await asyncio.sleep(0.02)

            async with beside(Worker(run).work(), Stuck(run).work()):
                outcome = await run.go()
            assert outcome.status == "failed"
            assert isinstance(outcome.error, DeadlineExceeded)
            assert "waits for the trainer to finish step 1" in outcome.reason

    bounded(test())


def test_run_without_progress_ends_and_says_who_waits_for_whom(tmp_path):
    class Silent(Worker):
        async def on_lease(self, task):
            pass

    async def test():
        async with small_run(tmp_path, stall_after_s=0.8) as run:
            async with beside(Silent(run).work(), Trainer(run).work()):
                outcome = await run.go()
            assert isinstance(outcome.error, DeadlineExceeded)
            assert "trainer waits for batch 1" in outcome.reason
            assert "rollout-0 holds" in outcome.reason
            assert "no progress for" in run.shown.getvalue(), "it warns at half time"

    bounded(test())


# ---------------------------------------------------------------- losses and errors


def test_lost_trainer_ends_the_run_as_failed_with_its_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(Loss("trainer", "trainer", "ended with signal SIGKILL", True, -9))
            outcome = await run.go()
            assert outcome.status == "failed"
            assert outcome.error is not None
            assert outcome.error.tail == "its last words"  # type: ignore[attr-defined]

    bounded(test())


def test_trainer_that_crashes_after_its_work_is_done_spoils_nothing(tmp_path):
    class Crashing(Trainer):
        async def leave(self):
            await self.peer.send(m.CheckpointSaved(version=self.version, path="c"))
            await until(lambda: self.run.server._saved_version == 3)
            self.run.supervisor.losses.append(Loss("trainer", "trainer", "ended with signal SIGSEGV", True, -11))

    async def test():
        async with small_run(tmp_path, num_eval_rows=3) as run:
            async with beside(Worker(run).work(), Crashing(run).work()):
                assert (await run.go()).status == "completed"
            assert 3 in run.tally.accuracy

    bounded(test())


def test_goodbye_of_a_trainer_that_is_not_done_does_not_release_it(tmp_path):
    class Deserting(Trainer):
        async def on_batch(self, batch):
            await self.leave()
            raise asyncio.CancelledError

    async def test():
        async with small_run(tmp_path) as run, beside(Worker(run).work(), Deserting(run).work()):
            ending = asyncio.create_task(run.go())
            await until(lambda: "trainer" in run.supervisor.heard and "trainer" not in run.hub.peers)
            assert "trainer" not in run.supervisor.released
            run.supervisor.losses.append(Loss("trainer", "trainer", "ended with status 0", True, 0))
            assert (await ending).status == "failed"

    bounded(test())


def test_reward_service_lost_for_good_ends_the_run(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(Loss("reward", "reward", "ended with status 1", False, 1))
            run.supervisor.losses.append(Loss("reward", "reward", "ended with status 1", True, 1))
            outcome = await run.go()
            assert outcome.status == "failed"
            assert "reward" in outcome.reason
            assert "starting it again" in run.shown.getvalue()

    bounded(test())


def test_last_worker_lost_for_good_ends_the_run_with_its_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with beside(Trainer(run).work()):
                ending = asyncio.create_task(run.go())
                async with beside(Worker(run, capacity=0).work()):
                    await until(lambda: "rollout-0" in run.hub.peers)
                    await until(lambda: run.coordinator.version == 0)
                run.supervisor.gone.add("rollout-0")
                run.supervisor.losses.append(Loss("rollout-0", "rollout", "ended with status 1", True, 1))
                outcome = await ending
            assert outcome.status == "failed"
            assert "no rollout worker is left" in outcome.reason
            assert outcome.error is not None
            assert outcome.error.tail == "its last words"  # type: ignore[attr-defined]

    bounded(test())


def test_users_mistake_reported_by_a_process_ends_the_run_with_it(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            mistake = UserError("no such kernel", where="trainer.attention")
            run.supervisor.losses.append(mistake)
            outcome = await run.go()
            assert outcome.error is mistake

    bounded(test())


@pytest.mark.parametrize("stops", [True, False])
def test_prompt_that_is_too_long_stops_or_drops_as_configured(tmp_path, stops):
    class Rejecting(Worker):
        async def on_lease(self, task):
            if task.group_id == 1:
                await self.peer.send(
                    m.SampleReturned(
                        lease_id=task.lease_id, start=0, segment=segment(0, 0), reason="rejected: 9 tokens"
                    )
                )
            else:
                await super().on_lease(task)

    async def test():
        async with small_run(tmp_path, stop_on_long_prompt=stops) as run:
            async with beside(Rejecting(run).work(), Trainer(run).work()):
                outcome = await run.go()
            if stops:
                assert isinstance(outcome.error, UserError)
                assert "data.train" in str(outcome.error)
            else:
                assert outcome.status == "completed"
            assert run.coordinator.counts().dropped == {"rejected": 1}

    bounded(test())


def test_nothing_is_written_after_a_write_that_failed(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            worker, applied = Worker(run), []
            apply = run.ledger.apply

            def full(entries):
                applied.append(entries)
                if any(isinstance(entry.effect, p.StoreFinished) for entry in entries):
                    raise LedgerError("ledger.sqlite: cannot write (disk is full)")
                apply(entries)

            run.ledger.apply = full  # type: ignore[method-assign]
            async with beside(worker.work(), Trainer(run).work()):
                outcome = await run.go()
                num_writes = len(applied)
                await run.server.farewell(0.5)
            assert isinstance(outcome.error, LedgerError)
            assert len(applied) == num_writes, "the coordinator knows what the ledger does not"
            assert worker.acked == []

    bounded(test())
    assert audit(tmp_path).is_clean


def test_refusal_of_the_operating_system_ends_the_run_in_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:

            def full(row):
                raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

            run.server._metrics.append = full  # type: ignore[method-assign]
            async with beside(Worker(run).work(), Trainer(run).work()):
                outcome = await run.go()
                await run.server.farewell(0.2)
            assert isinstance(outcome.error, OperationError)
            assert str(outcome.error) == "metrics.jsonl: No space left on device"

    bounded(test())


# ---------------------------------------------------------------- farewell and resume


def test_what_is_finished_during_the_farewell_is_kept_for_the_next_stretch(tmp_path):
    class Late(Worker):
        async def on_lease(self, task):
            if not hasattr(self, "held"):
                self.held = task

        async def work(self):
            await super().work()

    async def test():
        async with small_run(tmp_path) as run:
            worker = Late(run)
            async with beside(worker.work(), Trainer(run).work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: hasattr(worker, "held"))
                run.server.request_stop("SIGINT")
                await ending
                saying_goodbye = asyncio.create_task(run.server.farewell(5.0))
                await worker.peer.send(answer(worker.held, worker.version))
                await saying_goodbye

    bounded(test())
    with Ledger(tmp_path) as ledger:
        finished = [sample for group in ledger.load().live for sample in group.samples if sample.is_finished]
    assert len(finished) == 1


def test_farewell_does_not_wait_for_the_dead(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with beside(Worker(run).work()):
                ending = asyncio.create_task(run.go())
                await run.connect("rollout-1", "rollout", set(Worker.ACCEPT))
                await until(lambda: "rollout-0" in run.hub.peers)
                run.supervisor.losses.append(Loss("trainer", "trainer", "gone", True))
                await ending
            run.supervisor.gone |= {"rollout-0", "rollout-1"}
            assert set(run.hub.peers) == {"rollout-0", "rollout-1"}
            before_s = asyncio.get_running_loop().time()
            await run.server.farewell(15.0)
            assert asyncio.get_running_loop().time() - before_s < 5.0

    bounded(test())


def test_process_that_comes_up_during_the_farewell_is_sent_home(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            first, late = Worker(run, "rollout-0"), Worker(run, "rollout-1")
            first.on_lease = lambda task: asyncio.sleep(0)  # type: ignore[method-assign]
            ending = asyncio.create_task(run.go())
            idle = await run.connect("idle", "reward", set())
            run.server.request_stop("SIGINT")
            await ending
            async with beside(late.work()):
                farewell = asyncio.create_task(run.server.farewell(5.0))
                await until(lambda: late.was_shut_down)
                await idle.close("bye")
                await farewell

    bounded(test())


def test_crashed_run_replays_its_batches_unchanged_and_finishes(tmp_path):
    shipped: list[list[tuple[int, int]]] = []

    def names(batch: m.Batch) -> list[tuple[int, int]]:
        return [(sample.group_id, sample.sample_index) for sample in batch.samples]

    async def crash():
        class Dying(Trainer):
            async def on_batch(self, batch):
                shipped.append(names(batch))
                if batch.step == 2:
                    self.run.supervisor.losses.append(Loss("trainer", "trainer", "killed", True, -9))
                else:
                    await super().on_batch(batch)

        async with small_run(tmp_path) as run, beside(Worker(run).work(), Dying(run).work()):
            assert (await run.go()).status == "failed"

    async def resume():
        async with small_run(tmp_path) as run:
            trainer = Trainer(run)
            async with beside(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert [batch.is_replay for batch in trainer.batches] == [True, True, False]
            assert [names(batch) for batch in trainer.batches[:2]] == shipped
            assert {batch.lineage for batch in trainer.batches} == {"l1"}
            assert [row["is_replay"] for row in run.rows("step")[-3:]] == [True, True, False]

    bounded(crash())
    bounded(resume())
    assert_whole(tmp_path, 3)


def test_stop_during_a_replay_is_orderly_and_the_next_resume_finishes(tmp_path):
    class Dying(Trainer):
        async def on_batch(self, batch):
            if batch.step == 3:
                self.run.supervisor.losses.append(Loss("trainer", "trainer", "killed", True, -9))
            else:
                await super().on_batch(batch)

    class Stopped(Trainer):
        async def on_batch(self, batch):
            if batch.step == 1:
                self.run.server.request_stop("SIGINT")
                await until(lambda: self.run.server._is_stop_told)
            await super().on_batch(batch)

    async def crash():
        async with small_run(tmp_path) as run, beside(Worker(run).work(), Dying(run).work()):
            assert (await run.go()).status == "failed"

    async def stop():
        async with small_run(tmp_path) as run:
            trainer = Stopped(run)
            async with beside(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "stopped"
            assert trainer.version == 1

    async def finish():
        async with small_run(tmp_path, base=1) as run:
            trainer = Trainer(run)
            async with beside(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert [batch.step for batch in trainer.batches] == [2, 3]

    for life in (crash, stop, finish):
        bounded(life())
    assert_whole(tmp_path, 3)


def test_run_killed_in_its_final_evaluation_only_evaluates_again(tmp_path):
    class Deaf(Worker):
        async def on_lease(self, task):
            if task.purpose == "train":
                await super().on_lease(task)

    async def train():
        async with small_run(tmp_path, num_eval_rows=2, eval_at_start=False) as run:
            trainer = Trainer(run)
            async with beside(Deaf(run).work(), trainer.work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: trainer.has_left)
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    async def resume():
        async with small_run(tmp_path, base=3, num_eval_rows=2, eval_at_start=False) as run:
            trainer = Trainer(run)
            async with beside(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert trainer.batches == []
            assert run.tally.accuracy == {3: 1.0}

    bounded(train())
    bounded(resume())
    assert_whole(tmp_path, 3)


def test_evaluation_waits_for_workers_that_are_still_to_come(tmp_path):
    async def test():
        async with small_run(tmp_path, num_steps=0, num_eval_rows=2) as run:
            first = [
                p.RunStarted(lineage="l0", checkpoint_version=0),
                p.Published(version=0, lineage="l0", manifest_path="v0"),
            ]
            ending = asyncio.create_task(run.server.run(first))
            await until(lambda: run.coordinator.version == 0)
            await asyncio.sleep(0.3)
            assert not ending.done()
            async with beside(Worker(run).work()):
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
            async with beside(Confused(run).work(), Trainer(run).work()):
                assert (await run.go()).status == "completed"
            assert "rollout-0 sent BatchRequest, which nobody awaits" in run.shown.getvalue()

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
