"""Claims about how the server ends a run: asked to, by a loss, by an error; whole small runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sqlite3
import threading
from typing import Any, Literal

import pytest
from small_run import Trainer, Worker, assert_whole, bounded, concurrently, segment, small_run, until

from areal_like.errors import DeadlineExceeded, LedgerError, OperationError, PolicyDiverged, ProcessDied, UserError
from areal_like.process import DIVERGED
from areal_like.wire import messages as m
from controller.coordinator.effects import StoreFinished
from controller.ledger.audit import audit
from controller.runtime import trainer_restart
from controller.runtime.outcome import StoppedAtOnce
from controller.runtime.supervisor import Loss
from controller.runtime.trainer_restart import Found


def test_one_stop_finishes_the_running_step_saves_and_ends_well(tmp_path):
    class Slow(Trainer):
        async def on_batch(self, batch):
            if batch.step == 2:
                self.run.server.request_stop("SIGINT")
                await until(lambda: self.run.server._is_stop_sent)
            await super().on_batch(batch)

    async def test():
        async with small_run(tmp_path, num_steps=9) as run:
            trainer = Slow(run)
            async with concurrently(Worker(run).work(), trainer.work()):
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
            async with concurrently(worker.work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: "rollout-0" in run.hub.peers)
                run.server.request_stop("SIGINT")
                run.server.request_stop("SIGINT")
                outcome = await ending
                assert isinstance(outcome.error, StoppedAtOnce)
                assert outcome.status == "stopped"
                assert run.parts.end.is_hurried
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

            async with concurrently(Worker(run).work(), Stuck(run).work()):
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
            async with concurrently(Silent(run).work(), Trainer(run).work()):
                outcome = await run.go()
            assert isinstance(outcome.error, DeadlineExceeded)
            assert "trainer waits for batch 1" in outcome.reason
            assert "rollout-0 holds" in outcome.reason
            assert "no progress for" in run.shown.getvalue(), "it warns at half time"

    bounded(test())


def test_a_wait_for_clients_is_no_stall_and_is_shown_but_the_trainer_s_silence_is_one(tmp_path):
    class Silent(Worker):
        async def on_lease(self, task):
            pass

    async def test():
        clients = {"rollout-0": "http://127.0.0.1:8001"}
        async with small_run(tmp_path, stall_after_s=0.8, client_addresses=clients) as run:
            run.supervisor.states = lambda: {"rollout-0": "wait:traffic"}
            async with concurrently(Silent(run).work(), Trainer(run).work()):
                going = asyncio.ensure_future(run.go())
                await asyncio.wait({going}, timeout=2.5)  # three times the limit
                assert not going.done()
                shown = json.loads((tmp_path / "status.json").read_text())["waits"]
                assert "rollout-0 waits for clients at http://127.0.0.1:8001" in shown
                run.supervisor.states = lambda: {"rollout-0": "generate"}
                outcome = await going
            assert isinstance(outcome.error, DeadlineExceeded)

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


def test_trainer_that_dies_within_its_budget_goes_on_from_its_checkpoint_in_the_same_run(tmp_path):
    class Mortal(Trainer):
        """Dies after step 2; its successor has the checkpoint it names."""

        async def on_batch(self, batch):
            if self.lineage == "l0" and batch.step == 2:
                raise ProcessLookupError
            await super().on_batch(batch)

    async def test():
        async with small_run(tmp_path) as run:
            first, second = Mortal(run), Trainer(run)

            async def lives():
                with contextlib.suppress(ProcessLookupError):
                    await first.work()
                await first.peer.close("killed")
                run.hub.forget("trainer")
                run.supervisor.losses.append(Loss("trainer", "trainer", "ended with signal SIGKILL", False, -9))
                await until(lambda: bool(run.supervisor.renewed))
                spec = run.supervisor.renewed[0]
                assert (spec.lineage, spec.resume_from, spec.ranks_address) == ("l1", None, "tcp://127.0.0.1:1")
                second.version, second.lineage = 0, spec.lineage
                await second.work()

            async with concurrently(Worker(run).work(), lives()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert [(batch.step, batch.is_replay) for batch in second.batches] == [(1, True), (2, True), (3, False)]
            assert first.batches[0].samples[0].group_id == second.batches[0].samples[0].group_id
            assert {batch.lineage for batch in second.batches} == {"l1"}
            assert "the trainer restarts from version 0, 2 recorded batches" in run.shown.getvalue()
            assert [row["step"] for row in run.rows("step")] == [1, 2, 3]
            (lost, *_) = run.rows("process")
            assert (lost["name"], lost["event"], lost["reason"]) == ("trainer", "lost", "ended with signal SIGKILL")

    bounded(test())
    assert_whole(tmp_path, 3)


def test_other_processes_are_looked_after_while_the_checkpoint_of_a_dead_trainer_is_read(tmp_path, monkeypatch):
    is_read = threading.Event()

    def slow(*args: Any, **more: Any) -> Found:
        assert is_read.wait(300.0)
        return Found()

    async def test():
        monkeypatch.setattr(trainer_restart, "find_checkpoint", slow)
        async with small_run(tmp_path) as run:

            async def losses():
                run.supervisor.losses.append(Loss("trainer", "trainer", "ended with signal SIGKILL", False, -9))
                await until(lambda: not run.supervisor.losses)
                run.supervisor.losses.append(Loss("reward", "reward", "out of memory", False, 1))
                await until(lambda: "reward: out of memory; restarting it" in run.shown.getvalue())
                assert not run.supervisor.renewed
                is_read.set()
                await until(lambda: "the trainer restarts from version 0" in run.shown.getvalue())
                assert run.supervisor.renewed
                for _ in range(2):
                    run.server.request_stop("enough")

            async with concurrently(losses()):
                outcome = await run.go()
            assert outcome.status == "stopped"

    bounded(test())


def test_trainer_that_crashes_after_its_work_is_done_spoils_nothing(tmp_path):
    class Crashing(Trainer):
        async def leave(self):
            await self.peer.send(m.CheckpointSaved(version=self.version, path="c"))
            await until(lambda: self.run.server.saved_version == 3)
            self.run.supervisor.losses.append(Loss("trainer", "trainer", "ended with signal SIGSEGV", True, -11))
            await until(lambda: not self.run.supervisor.losses)
            self.has_left = True

    async def test():
        async with small_run(tmp_path, num_eval_rows=3, eval_at_start=False) as run:
            trainer = Crashing(run)

            class Patient(Worker):
                async def on_lease(self, task):
                    if task.purpose == "eval":
                        await until(lambda: trainer.has_left)
                    await super().on_lease(task)

            async with concurrently(Patient(run).work(), trainer.work()):
                assert (await run.go()).status == "completed"
            assert run.tally.accuracy == {3: 1.0}

    bounded(test())


def test_goodbye_of_a_trainer_that_is_not_done_does_not_release_it(tmp_path):
    class Deserting(Trainer):
        async def on_batch(self, batch):
            await self.leave()
            raise asyncio.CancelledError

    async def test():
        async with small_run(tmp_path) as run, concurrently(Worker(run).work(), Deserting(run).work()):
            ending = asyncio.create_task(run.go())
            await until(lambda: "trainer" in run.supervisor.received and "trainer" not in run.hub.peers)
            assert "trainer" not in run.supervisor.released
            run.supervisor.losses.append(Loss("trainer", "trainer", "ended with status 0", True, 0))
            assert (await ending).status == "failed"

    bounded(test())


def test_reward_service_lost_for_good_ends_the_run(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(Loss("reward", "reward", "ended with status 1", False, 1))
            run.supervisor.losses.append(Loss("reward", "reward", "ended with status 1", True, 1))
            run.supervisor.gone.add("reward")
            outcome = await run.go()
            assert outcome.status == "failed"
            assert "reward" in outcome.reason
            assert "restarting it" in run.shown.getvalue()

    bounded(test())


def test_one_of_several_reward_services_lost_for_good_is_reported_and_the_run_goes_on(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(Loss("reward-0", "reward", "ended with status 1", True, 1))
            async with concurrently(Trainer(run).work(), Worker(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert "the other reward services continue" in run.shown.getvalue()

    bounded(test())


def test_last_worker_lost_for_good_ends_the_run_with_its_words(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            async with concurrently(Trainer(run).work()):
                ending = asyncio.create_task(run.go())
                async with concurrently(Worker(run, capacity=0).work()):
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


def divergence(name: str, role: Literal["rollout", "trainer"] = "rollout") -> Loss:
    return Loss(name, role, str(PolicyDiverged(3, "its log-probs are not finite")), False, DIVERGED)


@pytest.mark.parametrize(("name", "role"), [("rollout-0", "rollout"), ("trainer", "trainer")])
def test_policy_that_diverged_ends_the_run_in_one_sentence(tmp_path, name, role):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(divergence(name, role))
            outcome = await run.go()
            assert outcome.status == "failed"
            assert outcome.reason == str(outcome.error)
            assert outcome.reason.startswith("the policy has diverged at version 3 (its log-probs are not finite) ->")
            assert "trainer.optimizer.lr" in outcome.reason
            assert not isinstance(outcome.error, ProcessDied), "a tail of a log would be shown"
            assert "restarting it" not in run.shown.getvalue()

    bounded(test())


def test_one_worker_alone_that_calls_the_policy_diverged_is_started_again(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.members = ["trainer", "rollout-0", "rollout-1"]
            run.supervisor.losses += [divergence("rollout-1"), divergence("rollout-1")]
            async with concurrently(Trainer(run).work(), Worker(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert "rollout-1: the policy has diverged at version 3" in run.shown.getvalue()

    bounded(test())


def test_worker_that_has_finished_a_sample_since_does_not_call_the_policy_diverged_any_more(tmp_path):
    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.members = ["trainer", "rollout-0", "rollout-1"]
            run.server._losses._diverged.add("rollout-0")
            async with concurrently(Trainer(run).work(), Worker(run).work()):
                ending = asyncio.create_task(run.go())
                await until(lambda: not run.server._losses._diverged)
                run.supervisor.losses.append(divergence("rollout-1"))
                assert (await ending).status == "completed"

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
                        lease_id=task.lease_id, start=0, segment=segment(0, 0), reason="rejected", detail="9 tokens"
                    )
                )
            else:
                await super().on_lease(task)

    async def test():
        async with small_run(tmp_path, stop_on_long_prompt=stops) as run:
            async with concurrently(Rejecting(run).work(), Trainer(run).work()):
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
                if any(isinstance(entry.effect, StoreFinished) for entry in entries):
                    raise LedgerError("ledger.sqlite: cannot write (disk is full)")
                apply(entries)

            run.ledger.apply = full  # type: ignore[method-assign]
            async with concurrently(worker.work(), Trainer(run).work()):
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

            run.parts.telemetry.journal.append = full  # type: ignore[method-assign]
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                outcome = await run.go()
                await run.server.farewell(0.2)
            assert isinstance(outcome.error, OperationError)
            assert str(outcome.error).startswith("metrics.jsonl: No space left on device -> free some disk space")

    bounded(test())


def test_what_broke_and_was_repaired_is_on_screen_and_in_the_ledger_in_the_order_of_other_facts(tmp_path):
    class Recovering(Worker):
        is_repaired = False

        async def on_lease(self, task):
            if not self.is_repaired:
                self.is_repaired = True
                await self.peer.send(m.Incident(text="SGLang server: it ended with signal SIGKILL; starting another"))
            await super().on_lease(task)

    async def test():
        async with small_run(tmp_path) as run:
            run.supervisor.losses.append(Loss("rollout-7", "rollout", "ended with signal SIGKILL", False, -9))
            async with concurrently(Trainer(run).work(), Recovering(run).work()):
                assert (await run.go()).status == "completed"
            words = "rollout-0: SGLang server: it ended with signal SIGKILL; starting another"
            assert words in run.shown.getvalue()
        with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
            found = {kind: (seq, text) for seq, kind, text in db.execute("SELECT seq, kind, text FROM incidents")}
            (step_seq,) = db.execute("SELECT seq FROM batches WHERE step = 1").fetchone()
        assert found["worker_lost"][1].startswith("rollout-7 is lost (ended with signal SIGKILL)")
        assert found["incident"][1] == words
        assert found["incident"][0] < step_seq
        assert_whole(tmp_path, 3)

    bounded(test())


def test_a_killed_rank_that_the_kernel_keeps_delays_a_restart_for_a_bounded_time(tmp_path, monkeypatch, caplog):
    class Supervisor:
        def living(self, role):
            return ["trainer-1"]

    async def test():
        restart = object.__new__(trainer_restart.TrainerRestart)
        restart._supervisor = Supervisor()
        await restart._until_all_are_gone()

    monkeypatch.setattr(trainer_restart, "GONE_S", 0.05)
    monkeypatch.setattr(trainer_restart, "GONE_POLL_S", 0.01)
    bounded(test())
    assert "still running: trainer-1" in caplog.text
