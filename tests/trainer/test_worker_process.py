"""Claims about the life of a trainer process around its worker, and about saving and states, without processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError, UserError
from areal_like.wire.messages import CheckpointFailed, CheckpointSaved, Message
from trainer import worker as module
from trainer.activity import Activity
from trainer.peer_errors import RankLost
from trainer.saving import Saving
from trainer.training import Saved
from trainer.weights.version_writer import Written
from trainer.worker import ACCEPT, TrainerWorker

LIMIT_S = 300.0


def process_spec(tmp_path: Path, **changes: Any) -> ProcessSpec:
    facts: dict[str, Any] = {
        "role": "trainer", "name": "trainer-0", "run_id": "t", "run_dir": str(tmp_path), "hub_address": "tcp://h:1",
        "parent_pid": 1, "seed": 1, "model": ModelSettings(path="m"), "sampling": SamplingSettings(), "num_threads": 1,
        "staleness": StalenessSettings(), "groups_per_step": 3, "group_size": 4, "num_steps": 6, "curve_dir": "/keys",
        "weight_dir": str(tmp_path / "weights"), "heartbeat_s": 0.25, "controller_silence_s": 6.0,
        "settings": {},
    }  # fmt: skip
    merged = {**facts, **changes}
    return ProcessSpec(**{**merged, "settings": {"device": "cpu", **merged["settings"]}})


# ---------------------------------------------------------------- a process from its spec to its exit


class Puppets:
    """Everything `serve` makes, and the order in which it uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.error: BaseException | None = None
        self.has_group = False
        self.peer: dict[str, Any] = {}
        self.sender: Any = None
        puppets = self

        class FakeTraining:
            def __init__(self, spec: ProcessSpec, spans: Any) -> None:
                self.settings, self.counters = "settings", {"steps": 2.0}
                self.ranks = SimpleNamespace(has_group=puppets.has_group)

            def close(self) -> None:
                puppets.log.append("training closed")

        class FakePeer:
            def __init__(self, **facts: Any) -> None:
                puppets.peer = facts

            async def connect(self, timeout_s: float) -> None:
                puppets.log.append("connected")

            async def close(self, reason: str) -> None:
                puppets.log.append(f"goodbye: {reason}")

        class FakeWorker:
            def __init__(self, spec: Any, training: Any, link: Any, stop: Any, activity: Any, sender: Any) -> None:
                assert sender is puppets.sender
                assert isinstance(link, FakePeer)

            async def run(self) -> str:
                puppets.log.append("worker ran")
                if puppets.error is not None:
                    raise puppets.error
                return "done"

        class FakeFollower:
            def __init__(self, training: Any, activity: Any) -> None:
                pass

            def run(self) -> None:
                puppets.log.append("follower ran")
                if puppets.error is not None:
                    raise puppets.error

        def leave(error: BaseException) -> None:
            puppets.log.append(f"left at once: {error}")

        for name, fake in {
            "Training": FakeTraining, "EmulatedTraining": lambda *_: pytest.fail("emulated"), "Peer": FakePeer,
            "TrainerWorker": FakeWorker, "Follower": FakeFollower, "leave_at_once": leave,
            "sender_of": lambda spec, settings: self.sender,
        }.items():  # fmt: skip
            monkeypatch.setattr(module, name, fake)
        tracer = SimpleNamespace(
            now_s=lambda: 0.0, complete=lambda *_, **__: None, close=lambda: self.log.append("traced")
        )
        monkeypatch.setattr(module.Tracer, "of", lambda *_: tracer)

    def serve(self, spec: ProcessSpec) -> list[Any]:
        asyncio.run(module.serve(spec, asyncio.Event()))
        return self.log


@pytest.fixture
def puppets(monkeypatch: pytest.MonkeyPatch) -> Puppets:
    return Puppets(monkeypatch)


def test_rank_0_says_goodbye_before_the_other_ranks_may_exit(puppets: Puppets, tmp_path: Path) -> None:
    assert puppets.serve(process_spec(tmp_path)) == [
        "connected", "worker ran", "goodbye: done", "training closed", "traced"
    ]  # fmt: skip


def test_controller_learns_who_it_is_and_everything_counted(puppets: Puppets, tmp_path: Path) -> None:
    puppets.sender = SimpleNamespace(counters={"weights_sent_bytes": 5.0})
    puppets.serve(process_spec(tmp_path))
    hello = puppets.peer["hello"]
    assert (hello.role, hello.name, hello.run_id) == ("trainer", "trainer-0", "t")
    assert {
        "address": "tcp://h:1", "curve_dir": Path("/keys"), "audience": "controller", "accept": ACCEPT,
        "heartbeat_s": 0.25, "silence_s": 6.0,
    }.items() <= puppets.peer.items()  # fmt: skip
    beat = puppets.peer["status"]()
    assert {"steps": 2.0, "weights_sent_bytes": 5.0, "micro_batches": 0.0}.items() <= beat.counters.items()
    puppets.sender = None
    puppets.serve(process_spec(tmp_path))
    assert "weights_sent_bytes" not in puppets.peer["status"]().counters


def test_other_ranks_follow_and_talk_to_nobody(puppets: Puppets, tmp_path: Path) -> None:
    assert puppets.serve(process_spec(tmp_path, rank=1, num_ranks=2)) == ["follower ran", "traced"]


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_is_raised_without_a_goodbye_and_one_of_a_group_leaves_at_once(
    rank: int, puppets: Puppets, tmp_path: Path
) -> None:
    puppets.error = OperationError("broken")
    spec = process_spec(tmp_path, rank=rank, num_ranks=2)
    with pytest.raises(OperationError, match="broken"):
        puppets.serve(spec)
    assert puppets.log[-1] == "traced"
    assert not any("goodbye" in str(line) or "left" in str(line) for line in puppets.log)
    puppets.log.clear()
    puppets.has_group = True
    with pytest.raises(OperationError, match="broken"):
        puppets.serve(spec)
    assert "left at once: broken" in puppets.log, "threads inside collectives are not waited for"


# ---------------------------------------------------------------- a worker that serves versions itself


def test_place_of_a_version_is_the_senders_where_there_is_one(tmp_path: Path) -> None:
    async def scene() -> None:
        async def publish(path: Path, version: int, lineage: str) -> str:
            return f"{path.name}/{version}/{lineage}"

        sender = SimpleNamespace(publish=publish)
        training: Any = SimpleNamespace()
        for chosen, place in ((None, "/store/v3"), (sender, "v3/3/l0")):
            worker = TrainerWorker(
                process_spec(tmp_path), training, None, asyncio.Event(), Activity(), chosen  # type: ignore[arg-type]
            )  # fmt: skip
            assert await worker._publish_location(Written(Path("/store/v3"), 1, is_delta=False), 3) == place

    asyncio.run(scene())


# ---------------------------------------------------------------- saving


class Link:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def send(self, message: Message, timeout_s: float = 30.0) -> None:
        self.sent.append(message)


class Desk:
    """A `Saving` over a training that only counts, and what it sent the controller."""

    def __init__(self, every_steps: int = 0, every_s: float | None = None) -> None:
        self.link, self.activity, self.news = Link(), Activity(), asyncio.Event()
        self.error: Exception | None = None
        self.num_copies = 0
        settings = SimpleNamespace(checkpoint=SimpleNamespace(every_steps=every_steps, every_s=every_s))
        self.training: Any = SimpleNamespace(
            version=4, is_saved=False, saved=Path("/run/step_4"), settings=settings, save=self._save
        )
        self.gate: asyncio.Event | None = None
        self.saving = Saving(self.training, self.link, self.activity, self._compute, self.news)  # type: ignore[arg-type]

    async def _compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    def _save(self) -> Callable[[], Saved]:
        self.num_copies += 1

        def write() -> Saved:
            if self.error is not None:
                raise self.error
            return Saved(Path("/run/step_4"), 77, 0.5)

        return write

    async def start(self, announced: asyncio.Task[None] | None = None) -> None:
        async with asyncio.TaskGroup() as group:
            await self.saving.start_if_free(group, announced)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))


@pytest.mark.parametrize(
    ("every_steps", "version", "is_due"), [(0, 4, False), (2, 4, True), (3, 4, False), (4, 4, True)]
)
def test_checkpoint_is_due_every_so_many_steps(every_steps: int, version: int, is_due: bool) -> None:
    async def scene() -> None:
        desk = Desk(every_steps)
        desk.training.version = version
        desk.saving.look()
        await desk.start()
        assert desk.num_copies == int(is_due)

    play(scene)


def test_checkpoint_is_due_so_long_after_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        now_s = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now_s)
        desk = Desk(every_s=10.0)
        for at_s, copies in ((109.9, 0), (110.0, 1), (119.9, 1), (120.0, 2)):
            now_s = at_s
            desk.saving.look()
            await desk.start()
            assert desk.num_copies == copies, at_s

    play(scene)


def test_written_checkpoint_is_reported_with_its_size_and_times_after_its_version(caplog: Any) -> None:
    async def scene() -> None:
        desk = Desk()
        order: list[str] = []

        async def announce() -> None:
            await asyncio.sleep(0.01)
            order.append("version")

        announced = asyncio.create_task(announce())
        desk.saving.ask("the user asked")
        with caplog.at_level(logging.INFO, "trainer.saving"):
            await desk.start(announced)
        assert order == ["version"]
        (saved,) = desk.link.sent
        assert isinstance(saved, CheckpointSaved)
        assert (saved.version, saved.path, saved.num_bytes, saved.write_s) == (4, "/run/step_4", 77, 0.5)
        assert 0 <= saved.stall_s < LIMIT_S
        assert "saved the checkpoint of version 4 (the user asked) to /run/step_4" in caplog.text
        assert desk.news.is_set(), "who waits for a free writer looks again"
        assert desk.activity.heartbeat({}).counters["checkpoints"] == 1
        desk.training.is_saved = True
        desk.saving.ask("again")
        await desk.start()
        assert desk.num_copies == 1, "the present version is saved already"
        assert desk.link.sent == [saved, saved]

    play(scene)


def test_disk_that_refuses_is_reported_and_counted_and_a_lost_rank_is_no_such_thing() -> None:
    async def scene() -> None:
        desk = Desk()
        for error in (OperationError("no space"), UserError("read-only")):
            desk.error = error
            desk.saving.ask("due")
            await desk.start()
        assert desk.link.sent == [
            CheckpointFailed(version=4, reason="no space"), CheckpointFailed(version=4, reason="read-only")
        ]  # fmt: skip
        assert desk.activity.heartbeat({}).counters["failed_checkpoints"] == 2
        assert desk.activity.heartbeat({}).counters["checkpoints"] == 0
        desk.error = RankLost("rank 1 is gone")
        desk.saving.ask("due")
        with pytest.raises(BaseExceptionGroup) as raised:
            await desk.start()
        assert raised.group_contains(RankLost)
        assert len(desk.link.sent) == 2

    play(scene)


def test_last_checkpoint_is_waited_for_and_reported_only_when_asked() -> None:
    async def scene() -> None:
        desk = Desk()
        async with asyncio.TaskGroup() as group:
            await desk.saving.last(group, None)
        assert desk.num_copies == 1
        assert desk.link.sent == [], "that word comes after the export"
        await desk.saving.tell()
        (saved,) = desk.link.sent
        assert (saved.version, saved.num_bytes) == (4, 77)  # type: ignore[attr-defined]
        desk.training.is_saved = True
        async with asyncio.TaskGroup() as group:
            await desk.saving.last(group, None)
        assert desk.num_copies == 1, "there is one already"

    play(scene)


def test_last_checkpoint_that_fails_ends_the_run_with_a_remedy() -> None:
    async def scene() -> None:
        desk = Desk()
        desk.error = OperationError("no space")
        with pytest.raises(BaseExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                await desk.saving.last(group, None)
        (error,) = raised.value.exceptions
        assert isinstance(error, UserError)
        assert error.what == "the last checkpoint could not be written: no space"
        assert "areal-like resume" in error.remedy

    play(scene)


def test_checkpoint_of_an_older_life_is_reported_by_its_folder() -> None:
    async def scene() -> None:
        desk = Desk()
        desk.training.is_saved = True
        await desk.saving.tell()
        assert desk.link.sent == [CheckpointSaved(version=4, path="/run/step_4")]

    play(scene)


# ---------------------------------------------------------------- states


def test_states_inside_one_another_end_where_they_began_and_spans_count() -> None:
    now_s = 0.0
    activity = Activity(clock=lambda: now_s)
    assert activity.heartbeat({}).state == "start"
    with activity.state("wait:batch"):
        now_s += 1.0
        with activity.state("checkpoint"):
            now_s += 2.0
            assert activity.heartbeat({}).state == "checkpoint"
            assert activity.times() == {"busy_s": 2.0, "wait_s": 1.0}
        assert activity.heartbeat({}).state == "wait:batch"
        now_s += 4.0
    now_s += 8.0
    assert activity.times() == {"busy_s": 10.0, "wait_s": 5.0}
    for name in ("micro_batch", "micro_batch", "update"):
        with activity.span(name):
            pass
    activity.num_refused, activity.num_put_off_checkpoints = 3, 4
    counters = activity.heartbeat({"own": 1.0}).counters
    assert {
        "own": 1.0, "micro_batches": 2.0, "refused_batches": 3.0, "checkpoints": 0.0, "failed_checkpoints": 0.0,
        "put_off_checkpoints": 4.0, "busy_s": 10.0, "wait_s": 5.0,
    }.items() <= counters.items()  # fmt: skip
    assert counters["cpu_s"] > 0
