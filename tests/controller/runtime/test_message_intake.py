"""What each message means to the run besides its event: bookkeeping, measurements, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.trajectory import Segment
from areal_like.wire import messages as m
from controller.coordinator.events import BatchRequested, CheckpointTaken, Published, WorkerJoined
from controller.runtime.message_intake import MessageIntake
from controller.runtime.trainer_progress import TrainerProgress


class Bench:
    """Records every call by the name of what was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gone: set[str] = set()
        """Processes that are not under supervision."""
        self.trainer = TrainerProgress(SimpleNamespace(trained=2))  # type: ignore[arg-type]
        components = SimpleNamespace(
            watch=self.part("watch", "saved"),
            admission=None,
            supervisor=SimpleNamespace(
                watches=lambda name: name not in self.gone,
                is_external=lambda name: False,
                **vars(self.part("supervisor", "reported", "release")),
            ),
            worker_admin=self.part("admin", "goodbye", "draining", "checkpoint_saved", "checkpoint_failed"),
            telemetry=SimpleNamespace(display=self.part("display", "note"), journal=self.part("journal", "measure")),
            tracer=self.part("tracer", "instant"),
        )
        self.intake = MessageIntake(
            components,  # type: ignore[arg-type]
            SimpleNamespace(is_eval=lambda lease_id: lease_id >= 100),  # type: ignore[arg-type]
            losses=self.part("losses", "finished_sample"),
            monitor=self.part("monitor", "received", "checkpoint_saved", "checkpoint_failed"),
            trainer=self.trainer,
            clock=lambda: 5.0,
        )
        self.hear("rollout-0", hello("rollout"))
        self.hear("trainer", hello("trainer"))
        self.calls.clear()

    def part(self, name: str, *methods: str) -> Any:
        def method(what: str) -> Any:
            def call(*args: Any, **facts: Any) -> str:
                self.calls.append((f"{name}.{what}", *args, *facts.items()))
                return f"{name}.{what}"

            return call

        return SimpleNamespace(**{what: method(what) for what in methods})

    def hear(self, peer: str, message: m.Message) -> Any:
        """What the message means to the coordinator."""
        found = self.intake.events([(peer, message)])
        return found[0] if found else None


def hello(role: Any) -> m.Hello:
    return m.Hello(role=role, name=role, pid=1, run_id="r", incarnation="a", capacity=8)


def test_a_worker_that_says_hello_joins_and_another_process_is_only_known() -> None:
    bench = Bench()
    joined = bench.hear("rollout-1", hello("rollout"))
    assert joined.event == WorkerJoined(worker="rollout-1", incarnation="a", capacity=8)
    assert bench.calls == [("supervisor.reported", "rollout-1"), ("monitor.received", "rollout-1")]
    assert bench.hear("reward-0", hello("reward")) is None
    assert ("monitor.received", "reward-0") in bench.calls


def test_a_hello_read_after_its_worker_ended_for_good_brings_it_not_back() -> None:
    bench = Bench()
    bench.gone.add("rollout-1")
    assert bench.hear("rollout-1", hello("rollout")) is None


def test_only_a_workers_goodbye_and_notice_concern_the_run() -> None:
    bench = Bench()
    assert bench.hear("rollout-0", m.Goodbye(reason="spot")) == "admin.goodbye"
    assert bench.hear("trainer", m.Goodbye(reason="done")) is None
    assert bench.hear("rollout-0", m.Draining(reason="spot")) == "admin.draining"
    assert bench.calls == [("admin.goodbye", "rollout-0", "spot"), ("admin.draining", "rollout-0", 5.0)]


@pytest.mark.parametrize("peer", ["rollout-0", "stranger"])
def test_a_message_of_another_role_is_refused_in_words(peer: str) -> None:
    bench = Bench()
    assert bench.hear(peer, m.BatchRequest(step=1)) is None
    assert bench.calls == [("display.note", f"unexpected message BatchRequest from {peer}", "warning")]
    assert bench.hear("trainer", m.BatchRequest(step=1)).event == BatchRequested(step=1)
    assert len(bench.calls) == 1


def test_swaps_and_releases_are_measured() -> None:
    bench = Bench()
    bench.hear("rollout-0", m.VersionLoaded(version=3, lineage="l0", stage_s=1.0, pause_s=0.5))
    bench.hear("rollout-0", m.MemoryReleased(number=1, num_bytes=7, seconds=2.0))
    assert bench.calls == [
        ("tracer.instant", "version_loaded", ("lane", "rollout-0"), ("version", 3)),
        ("journal.measure", "swap", ("worker", "rollout-0"), ("version", 3), ("stage_s", 1.0), ("pause_s", 0.5)),
        ("tracer.instant", "memory_released", ("lane", "rollout-0"), ("num_bytes", 7)),
        ("journal.measure", "release", ("worker", "rollout-0"), ("num_bytes", 7), ("seconds", 2.0)),
    ]


@pytest.mark.parametrize("note", ["", "attention sdpa"])
def test_a_published_version_is_marked_and_what_the_trainer_chose_is_shown(note: str) -> None:
    bench = Bench()
    message = m.VersionPublished(version=1, lineage="l0", manifest_path="v1", note=note)
    assert bench.hear("trainer", message).event == Published(version=1, lineage="l0", manifest_path="v1")
    shown = [("display.note", "trainer: attention sdpa")] if note else []
    assert bench.calls == [("tracer.instant", "version_published", ("version", 1)), *shown]


def test_the_newest_checkpoint_counts_whatever_is_reported_later() -> None:
    bench = Bench()
    saved = [m.CheckpointSaved(version=version, path=f"c{version}") for version in (4, 3)]
    assert bench.hear("trainer", saved[0]).event == CheckpointTaken(version=4, path="c4")
    assert bench.calls == [
        ("admin.checkpoint_saved", 4, "c4"),
        ("monitor.checkpoint_saved", saved[0]),
        ("watch.saved", 4, Path("c4")),
    ]
    bench.hear("trainer", saved[1])
    assert bench.trainer.saved_version == 4


def test_a_checkpoint_that_failed_answers_who_asked_for_it_and_is_no_event() -> None:
    bench, message = Bench(), m.CheckpointFailed(version=4, reason="disk full")
    assert bench.hear("trainer", message) is None
    assert bench.calls == [("admin.checkpoint_failed", "disk full"), ("monitor.checkpoint_failed", message)]
    assert bench.trainer.saved_version == -1


def returned(lease_id: int, reason: Any) -> m.SampleReturned:
    return m.SampleReturned(lease_id=lease_id, start=0, segment=Segment.empty(), reason=reason, detail="too long")


def test_a_rejected_prompt_is_a_mistake_in_the_data_that_it_came_from() -> None:
    burst = [("rollout-0", message) for message in (
        returned(1, "rejected"), returned(2, "drain"), m.BatchRequest(step=1), returned(100, "rejected"),
        returned(3, "refused"),
    )]  # fmt: skip
    errors = Bench().intake.mistakes(burst)
    assert [(str(error).split(":")[0], "rejected: too long" in str(error)) for error in errors] == [
        ("data.train", True), ("data.eval", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "message", "last_step", "is_released"),
    [
        ("trainer", m.Goodbye(reason="done"), 2, True), ("trainer", m.Goodbye(reason="done"), None, False),
        ("rollout-0", m.Goodbye(reason="done"), 2, False), ("trainer", m.BatchRequest(step=1), 2, False),
    ],
)  # fmt: skip
def test_a_trainer_may_end_when_it_says_goodbye_after_its_last_step(
    peer: str, message: m.Message, last_step: int | None, is_released: bool
) -> None:
    bench = Bench()
    bench.trainer.last_step, bench.trainer.saved_version = last_step, 2
    bench.intake.release_finished_trainer([(peer, message)])
    assert bench.calls == ([("supervisor.release", peer)] if is_released else [])
