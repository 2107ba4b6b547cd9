"""The virtual cluster with links in both directions, and each worker's real `VersionLoader`, for shared devices.

Simulates delays and losses of the controller's messages, and accounts for the shared device's memory. Every link
delivers in order; the schedule (colocated_schedules.py) chooses how long a message takes.

The trainer counts as holding the device from the arrival of a batch until it has published its version, because a batch
that has arrived may be started at any time; an engine from the start of a load until a release has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
from accounted_engine import LOOP, AccountedEngine, spin
from virtual_cluster import Task, VirtualCluster, VirtualWorker

from areal_like.wire import messages as m
from controller.coordinator.effects import (
    Effect,
    EndWorker,
    LeaseOrder,
    SendBatch,
    SendLeases,
    SendNoMoreBatches,
    SendRelease,
    SendVersion,
)
from controller.coordinator.events import (
    BatchRequested,
    Event,
    LeaseReturned,
    PartialReport,
    Published,
    SampleReported,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.runtime.inbound import translate
from rollout.weights.versions import VersionGate, VersionLoader


class Nothing:
    """Stands for a tracer and for the record of what a worker is doing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0


class LinkedCluster(VirtualCluster):
    """One colocated run."""

    def __init__(self, settings: CoordinatorSettings, rng: random.Random, **options: Any) -> None:
        self.links: dict[str, deque[tuple[Any, ...]]] = {}
        """What is on its way from the controller, by receiver."""
        self.halted: set[str] = set()
        """Links over which nothing arrives, by receiver, or by sender after `from`."""
        self.held_links: set[str] = set()
        """The same, until the plan that holds them lets them go on (handover_plans.py)."""
        self.paused_engines: set[str] = set()
        """Workers whose loads and releases do not end, until the plan lets them."""
        self.dying: dict[str, bool] = {}
        """Processes that were killed or said goodbye, and are not gone: whether they still hold memory."""
        self.complaints: list[str] = []
        self.engines: dict[str, AccountedEngine] = {}
        self.loaders: dict[str, tuple[VersionLoader, asyncio.Task[None]]] = {}
        self.num_releases = self.num_ended = 0
        super().__init__(settings, rng, **options)
        for worker in self.workers.values():
            self._start_loader(worker)

    def close(self) -> None:
        """End the loaders."""
        for name in list(self.loaders):
            self._end_loader(name)

    # ------------------------------------------------------------ loaders

    def _start_loader(self, worker: VirtualWorker) -> None:
        def report(message: m.Message) -> None:
            received = translate(worker.name, message, is_eval=lambda _: False)
            assert received is not None
            self.post(worker.name, received.event)

        self._end_loader(worker.name)
        engine = self.engines[worker.name] = AccountedEngine(self, worker)
        self.paused_engines.discard(worker.name)
        loader = VersionLoader(
            engine=engine, gate=VersionGate(), interruption="recompute", report=report, park_all=lambda: None,
            doing=Nothing(), tracer=Nothing(),
        )  # fmt: skip
        self.loaders[worker.name] = (loader, LOOP.create_task(loader.run()))
        spin()

    def _end_loader(self, name: str) -> None:
        if found := self.loaders.pop(name, None):
            found[1].cancel()
            with suppress(asyncio.CancelledError):
                LOOP.run_until_complete(found[1])

    def check_memory(self) -> None:
        """The device is the trainer's or the engines', never both's."""
        holders = [worker.name for worker in self.workers.values() if worker.is_alive and worker.has_memory]
        holders += [name for name, has_memory in self.dying.items() if has_memory]
        if holders and self.trainer.batches:
            self.complaints.append(f"{holders} and the trainer hold memory")

    def work(self) -> None:
        """An engine ends a load or a release."""
        busy = [name for name, one in self.engines.items() if one.is_busy and name not in self.paused_engines]
        if busy:
            self.engines[self.rng.choice(busy)].go_on()
            self._raise_complaints()

    def _raise_complaints(self) -> None:
        assert not self.complaints, self.complaints[0]

    # ------------------------------------------------------------ from the controller

    def _carry_out(self, effect: Effect) -> None:
        name = getattr(effect, "worker", None)
        if name is None and not isinstance(effect, SendBatch | SendNoMoreBatches):
            super()._carry_out(effect)
        elif name is None:
            if self.trainer.is_alive:
                self._send("trainer", effect)
        elif isinstance(effect, EndWorker):
            self.num_ended += 1
            worker = self.workers[name]
            is_present = self.coordinator._state.workers[name].is_present
            is_present &= self.joined.get(name) == str(worker.incarnation)
            if is_present and worker.is_alive and not self.engines[name].is_stuck and not self._is_asked(name):
                self.complaints.append(f"{name} was ended for its memory although it had answered every request")
            super()._carry_out(effect)
        else:
            worker = self.workers[name]
            if not worker.is_alive or not worker.is_known or self.joined.get(name) != str(worker.incarnation):
                return  # out of reach, or meant for a process that is dead
            if isinstance(effect, SendVersion | SendRelease) and effect.incarnation != str(worker.incarnation):
                return  # its successor has said Hello meanwhile
            if isinstance(effect, SendLeases):
                self._send_leases(worker, effect)
            else:
                self._send(name, effect)

    def _is_asked(self, name: str) -> bool:
        """A request to release is on its way to the worker, waits or is in work there, or its answer is on its way."""
        is_coming = any(isinstance(one[0], SendRelease) for one in self.links.get(name, ()))
        is_answered = any(sender == name and isinstance(event, WorkerReleased) for sender, event, _ in self.letters)
        is_in_work = self.engines[name].is_releasing or self.loaders[name][0].is_release_due
        return is_coming or is_answered or is_in_work

    def _send(self, receiver: str, *message: Any) -> None:
        self.links.setdefault(receiver, deque()).append(message)

    def _send_leases(self, worker: VirtualWorker, effect: SendLeases) -> None:
        """What they refer to is looked up when they are sent, as the shell does."""
        for order in effect.leases:
            if not self.coordinator.is_live(order.lease_id):
                continue
            self.orders[order.lease_id] = order
            self._check_alone(worker, order)
            prefix = self._prefix_of(order)
            self._send(worker.name, order, prefix)

    def receive(self) -> None:
        """One message of the controller arrives somewhere."""
        halted = self.halted | self.held_links
        names = [name for name, link in self.links.items() if link and name not in halted]
        if names:
            self._receive(self.rng.choice(names))

    def halt_link(self) -> None:
        """Nothing arrives any more over one link, until all go on; often one that a request to release is on."""
        asked = [name for name, link in self.links.items() if any(isinstance(x[0], SendRelease) for x in link)]
        name = self.rng.choice(asked or [*self.workers, "trainer"])
        self.halted.add(self.rng.choice([name, f"from {name}"]))

    def let_links_go_on(self) -> None:
        self.halted.clear()

    def _receive(self, name: str) -> None:
        first, *rest = self.links[name].popleft()
        if name == "trainer":
            self._trainer_receives(first)
        elif isinstance(first, LeaseOrder):
            self._take_order(self.workers[name], first, rest[0])
        else:
            self._worker_receives(self.workers[name], first)
        self._raise_complaints()

    def _receive_all(self, name: str) -> None:
        while self.links.get(name):
            self._receive(name)

    def _take_order(self, worker: VirtualWorker, order: LeaseOrder, prefix: list[int]) -> None:
        if worker.is_leaving:
            self.num_refused += 1
            assert self.num_refused < 1000, f"{worker.name} leaves, and is leased to again and again"
            part = PartialReport(lease_id=order.lease_id, start=order.prefix_tokens, num_tokens=0)
            self.post(worker.name, LeaseReturned(worker=worker.name, part=part, reason="drain"), {})
            return
        length = max(len(prefix), self.rng.choice([1, 1, 1, 4]))
        worker.tasks[order.lease_id] = Task(order, prefix, length, len(prefix))
        assert len(worker.tasks) <= worker.capacity, "credits were exceeded"

    def _worker_receives(self, worker: VirtualWorker, effect: Effect) -> None:
        loader = self.loaders[worker.name][0]
        match effect:
            case SendVersion():
                assert effect.manifest_path, "a version was announced that is not available"
                loader.announce(
                    m.AnnounceVersion(
                        version=effect.version, lineage=effect.lineage, manifest_path=effect.manifest_path,
                        is_held=effect.is_held,
                    )
                )  # fmt: skip
                spin()
            case SendRelease():
                self.num_releases += 1
                loader.release(effect.number)
                spin()
            case _:
                super()._carry_out(effect)

    def _trainer_receives(self, effect: Effect) -> None:
        trainer = self.trainer
        match effect:
            case SendBatch():
                if effect.lineage == self.lineage and effect.step == trainer.asked:
                    trainer.asked = None
                    if trainer.last_step is None or effect.step <= trainer.last_step:
                        trainer.batches[effect.step] = effect
                        self.check_memory()
            case SendNoMoreBatches():
                trainer.last_step = effect.last_step
                if trainer.asked is not None and trainer.asked > effect.last_step:
                    trainer.asked = None

    # ------------------------------------------------------------ to the controller

    def deliver(self) -> None:
        """The first message of a random sender arrives."""
        self.handle_burst(self._next_letters(1))

    def _next_letters(self, number: int) -> list[tuple[Event, dict[int, list[int]]]]:
        found: list[tuple[Event, dict[int, list[int]]]] = []
        halted = self.halted | self.held_links
        while len(found) < number:
            senders = sorted({sender for sender, _, _ in self.letters if f"from {sender}" not in halted})
            if not senders:
                break
            sender = self.rng.choice(senders)
            index = next(i for i, letter in enumerate(self.letters) if letter[0] == sender)
            _, event, tokens = self.letters.pop(index)
            found.append((event, tokens))
        return found

    def deliver_burst(self) -> None:
        """Several messages of random senders are handled before anything is committed or sent."""
        self.handle_burst(self._next_letters(self.rng.choice([2, 4, 8])))

    # ------------------------------------------------------------ faults

    def fail_to_load(self) -> None:
        if (worker := self._alive()) is not None:
            self.engines[worker.name].is_failing = True

    def get_stuck(self) -> None:
        """An engine whose releases never end: only its end helps."""
        worker = self._alive()
        if worker is not None and self.settings.load_deadline_s < 100.0:
            self.engines[worker.name].is_stuck = True

    def hang_in_load(self) -> None:
        """An engine whose loads never end, while another worker stays fit: only its end helps."""
        names = {worker.name for worker in self.workers.values() if not worker.is_leaving and not worker.is_away}
        names -= self.leaving
        can_hang = len(names) > 1 and not self._is_any_hung()
        worker = self._alive()
        if worker is not None and worker.name in names and can_hang and self.settings.load_deadline_s < 100.0:
            self.engines[worker.name].is_hung = True

    def _is_any_hung(self) -> bool:
        return any(engine.is_hung for engine in self.engines.values())

    def drain_worker(self) -> None:
        """Not while a worker hangs: it might be the last one."""
        if not self._is_any_hung():
            super().drain_worker()

    def silence(self) -> None:
        """The controller cannot reach a worker that goes on; what is on its way may be lost, in either direction."""
        if (worker := self._alive()) is not None:
            self._silence(worker)

    def silence_at_handover(self) -> None:
        """The same for a worker that is asked to release its memory."""
        if asked := self.asked():
            self._silence(self.rng.choice(asked))

    def asked(self) -> list[VirtualWorker]:
        """Workers with a request to release, or an answer to one, on its way or in work."""
        return [worker for worker in self.workers.values() if worker.is_alive and self._is_asked(worker.name)]

    def _silence(self, worker: VirtualWorker) -> None:
        if not self._is_reachable(worker):
            return
        if self.rng.random() < 0.5:
            self.links.pop(worker.name, None)
        if self.rng.random() < 0.5:  # finished samples are sent again until they are acknowledged
            kept = (SampleReported, WorkerLost)
            self.letters = [x for x in self.letters if x[0] != worker.name or isinstance(x[1], kept)]
        self._lose_touch(worker)

    def _is_reachable(self, worker: VirtualWorker) -> bool:
        """The controller knows of this process, and can reach it."""
        is_coming = any(one == worker.name and isinstance(event, WorkerJoined) for one, event, _ in self.letters)
        return worker.is_alive and worker.is_known and not is_coming

    def _lose_touch(self, worker: VirtualWorker) -> None:
        worker.is_known = False
        self.handle(WorkerLost(worker=worker.name, reason="silent", may_live=True))

    def reconnect(self, worker: VirtualWorker) -> bool:
        """Out of reach and back at once, without a loss of messages; False where the controller does not know it."""
        if not self._is_reachable(worker):
            return False
        self._lose_touch(worker)
        if self.end is None:
            self._come_back(worker)
        return True

    def come_back(self) -> None:
        lost = [worker for worker in self.workers.values() if worker.is_alive and not worker.is_known]
        if lost:
            self._come_back(self.rng.choice(lost))

    def _come_back(self, worker: VirtualWorker) -> None:
        """It gives up what it had begun and says again what it has loaded."""
        worker.tasks.clear()
        worker.recalled.clear()
        self.hello(worker)
        self.loaders[worker.name][0].report_again()

    def lose_touch_with_trainer(self) -> None:
        """What is on its way to the trainer is lost; it says again what it published and what it wants."""
        trainer = self.trainer
        if trainer.is_alive and trainer.version >= 0:
            self.links.pop("trainer", None)
            manifest_path = f"v{trainer.version}"
            self.post("trainer", Published(version=trainer.version, lineage=self.lineage, manifest_path=manifest_path))
            if trainer.asked is not None:
                self.post("trainer", BatchRequested(step=trainer.asked))

    def _die(self, worker: VirtualWorker, reason: str, *, is_permanent: bool, may_return: bool = False) -> None:
        had_memory = worker.has_memory
        self._end_loader(worker.name)
        self.links.pop(worker.name, None)
        super()._die(worker, reason, is_permanent=is_permanent, may_return=may_return)
        _, event, tokens = self.letters.pop()  # judged after its last words were read
        if reason != "killed":  # by the supervisor, or at its own goodbye: reported before it is gone
            assert isinstance(event, WorkerLost)
            event = msgspec.structs.replace(event, may_live=True)
            self.dying[worker.name] = had_memory
        self.post(worker.name, event, tokens)

    def see_end(self) -> None:
        """The supervisor sees that a process is gone."""
        if self.dying:
            self._see_end(self.rng.choice(list(self.dying)))

    def _see_end(self, name: str) -> None:
        if self.dying.pop(name, None) is not None:
            self.post(name, WorkerEnded(worker=name))

    def _restart(self, worker: VirtualWorker) -> None:
        self._see_end(worker.name)
        super()._restart(worker)
        self._start_loader(worker)

    def kill_trainer(self) -> None:
        if self.trainer.is_alive and not self.trainer.is_done:
            self.links.pop("trainer", None)
        super().kill_trainer()

    def kill_trainer_at_handover(self) -> None:
        """It dies while an engine releases its memory for it."""
        if self.asked():
            self.kill_trainer()

    def restart(self, load: Any = None) -> None:
        self.links.clear()
        self.dying.clear()
        self.held_links.clear()
        super().restart(load)
        for worker in self.workers.values():
            self._start_loader(worker)

    # ------------------------------------------------------------ liveness

    def check_end(self) -> None:
        """Acknowledgements travel as well, and reach who is back in touch."""
        for worker in self.workers.values():
            if worker.is_alive and not worker.is_known:
                self._come_back(worker)
        for _ in range(3):
            for worker in self.workers.values():  # `resend` picks one of them at random
                self._resend(worker)
            self.deliver_all()
            for worker in self.workers.values():
                self._receive_all(worker.name)
        super().check_end()

    def calm_round(self) -> None:
        """Everybody does what is due, and everything arrives."""
        self.halted.clear()
        self.held_links.clear()
        self.paused_engines.clear()
        for name in list(self.dying):
            self._see_end(name)
        for worker in self.workers.values():
            if worker.is_away:
                continue
            if not worker.is_alive:
                self._restart(worker)
            elif not worker.is_known:
                self._come_back(worker)
            for _ in range(3):
                self._receive_all(worker.name)
                self.engines[worker.name].go_on()
            self._generate(worker, 3)
            self._report(worker)
            self._answer_recalls(worker)
        self.resend()
        self.start_trainer()
        self._receive_all("trainer")
        for _ in range(2):  # the next batch is asked for when a step starts
            self.request_batch()
            self.deliver_all()
            self._receive_all("trainer")
        for worker in self.workers.values():
            self._leave(worker)
            if worker.is_alive:
                self._tell_speed(worker)
        self.finish_step()
        self.deliver_all()
        self.tick()
