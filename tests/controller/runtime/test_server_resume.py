"""Claims about the server's farewell and about the next life of a run; whole small runs."""

from __future__ import annotations

import asyncio

import pytest
from small_run import Trainer, Worker, answer, assert_whole, bounded, concurrently, small_run, until

from areal_like.wire import messages as m
from controller.ledger.ledger import Ledger
from controller.runtime.server import BURST
from controller.runtime.supervisor import Loss


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
            async with concurrently(worker.work(), Trainer(run).work()):
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


@pytest.mark.parametrize(("num_waiting", "num_read"), [(0, 1), (3, 4), (10 * BURST, BURST)])
def test_farewell_reads_what_has_come_when_its_time_is_over(tmp_path, num_waiting, num_read):
    """Up to one that finds nothing, and at most a burst: a process may send indefinitely."""
    looks: list[float] = []

    async def look(timeout_s, grace_s):
        looks.append(timeout_s)
        return len(looks) <= num_waiting

    async def test():
        async with small_run(tmp_path) as run:
            run.server._take_last_words = look
            await run.server.farewell(0.0)

    bounded(test())
    assert looks == [0.0] * num_read


def test_farewell_does_not_wait_for_the_dead(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Worker(run).work()):
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
            async with concurrently(late.work()):
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

        async with small_run(tmp_path) as run, concurrently(Worker(run).work(), Dying(run).work()):
            assert (await run.go()).status == "failed"

    async def resume():
        async with small_run(tmp_path) as run:
            trainer = Trainer(run)
            async with concurrently(Worker(run).work(), trainer.work()):
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
                await until(lambda: self.run.server._is_stop_sent)
            await super().on_batch(batch)

    async def crash():
        async with small_run(tmp_path) as run, concurrently(Worker(run).work(), Dying(run).work()):
            assert (await run.go()).status == "failed"

    async def stop():
        async with small_run(tmp_path) as run:
            trainer = Stopped(run)
            async with concurrently(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "stopped"
            assert trainer.version == 1

    async def finish():
        async with small_run(tmp_path, base=1) as run:
            trainer = Trainer(run)
            async with concurrently(Worker(run).work(), trainer.work()):
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
            async with concurrently(Deaf(run).work(), trainer.work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: trainer.has_left)
                ending.cancel()
                await asyncio.gather(ending, return_exceptions=True)

    async def resume():
        async with small_run(tmp_path, base=3, num_eval_rows=2, eval_at_start=False) as run:
            trainer = Trainer(run)
            async with concurrently(Worker(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert trainer.batches == []
            assert run.tally.accuracy == {3: 1.0}

    bounded(train())
    bounded(resume())
    assert_whole(tmp_path, 3)
