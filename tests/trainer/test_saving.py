"""Claims about checkpoints of a trainer at work: when one is taken, what is put off, what is said of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from areal_like.wire.messages import CheckpointFailed, CheckpointSaved
from trainer import saving as module
from trainer.activity import Activity
from trainer.peer_errors import RankLost
from trainer.saving import Saving
from trainer.training import Saved

LIMIT_S = 300.0


class FakeTraining:
    """A policy at a version; `disk` holds writes back until it is set, `error` is what the disk raises."""

    def __init__(self, every_steps: int, every_s: float | None) -> None:
        self.settings = SimpleNamespace(checkpoint=SimpleNamespace(every_steps=every_steps, every_s=every_s))
        self.version = 1
        self.saved: Path | None = None
        self.copied: list[int] = []
        self.disk = threading.Event()
        self.disk.set()
        self.error: Exception | None = None

    @property
    def is_saved(self) -> bool:
        return self.saved == Path(f"/run/{self.version}")

    def save(self) -> Callable[[], Saved]:
        version = self.version
        self.copied.append(version)

        def write() -> Saved:
            assert self.disk.wait(LIMIT_S)
            if self.error is not None:
                raise self.error
            self.saved = Path(f"/run/{version}")
            return Saved(self.saved, 10 * version, 0.5)

        return write


class Scene:
    """A Saving with all it works with; `time_s` passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_steps: int = 0, every_s: float | None = None) -> None:
        self.time_s = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock, perf_counter=self.clock))
        self.training = FakeTraining(every_steps, every_s)
        self.said: list[Any] = []
        self.news = asyncio.Event()
        self.activity = Activity()
        self.states: list[str] = []
        self.stall_s = 0.0
        self.saving = Saving(self.training, self, self.activity, self.compute, self.news)  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.time_s

    async def send(self, message: Any) -> None:
        self.said.append(message)

    async def compute(self, work: Callable[[], Any]) -> Any:
        self.states.append(self.activity.heartbeat({}).state)
        self.time_s += self.stall_s
        return work()

    def at(self, version: int) -> None:
        self.training.version = version
        self.saving.look()

    async def ended(self) -> None:
        """The write under way, if any."""
        if self.saving._writing is not None:
            await asyncio.wait([self.saving._writing])


def play(scene: Scene, script: Callable[[asyncio.TaskGroup], Any]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            await script(group)
        scene.saving.close()

    asyncio.run(run())


def test_checkpoint_is_due_at_every_multiple_of_the_steps_and_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, every_steps=3)

    async def script(group: asyncio.TaskGroup) -> None:
        for version in range(1, 8):
            scene.at(version)
            await scene.saving.start_if_free(group, None)
            await scene.ended()

    play(scene, script)
    assert scene.training.copied == [3, 6]
    assert scene.states == ["checkpoint", "checkpoint"]
    assert scene.activity.num_checkpoints == 2
    assert scene.activity.num_put_off_checkpoints == 0
    assert scene.news.is_set()


@pytest.mark.parametrize(("passed_s", "is_taken"), [(59.0, False), (60.0, True)])
def test_checkpoint_is_due_by_time_since_the_newest_copy(
    passed_s: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, every_s=60.0)
    scene.stall_s = 5.0

    async def script(group: asyncio.TaskGroup) -> None:
        scene.time_s += 60
        scene.at(1)
        await scene.saving.start_if_free(group, None)
        await scene.ended()
        scene.time_s += passed_s
        scene.at(2)
        await scene.saving.start_if_free(group, None)

    play(scene, script)
    assert scene.training.copied == ([1, 2] if is_taken else [1])


def test_without_steps_and_time_none_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def script(group: asyncio.TaskGroup) -> None:
        scene.time_s += 1e6
        scene.at(2)
        await scene.saving.start_if_free(group, None)

    play(scene, script)
    assert scene.training.copied == []


def test_what_comes_due_during_a_write_is_one_checkpoint_of_the_newest_version_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, every_steps=1)
    scene.training.disk.clear()

    async def script(group: asyncio.TaskGroup) -> None:
        scene.at(1)
        await scene.saving.start_if_free(group, None)
        for version in (2, 3):
            scene.at(version)
            await scene.saving.start_if_free(group, None)
        assert scene.training.copied == [1]
        scene.training.disk.set()
        await scene.ended()
        await scene.saving.start_if_free(group, None)

    play(scene, script)
    assert scene.training.copied == [1, 3]
    assert scene.activity.num_put_off_checkpoints == 1, "one and the same checkpoint was put off"


def test_saved_checkpoint_is_reported_with_its_times_and_size_after_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.stall_s = 2.0

    async def script(group: asyncio.TaskGroup) -> None:
        version_is_out = asyncio.Event()

        async def announce() -> None:
            await version_is_out.wait()
            scene.said.append("version")

        announced = group.create_task(announce())
        scene.saving.ask("somebody")
        await scene.saving.start_if_free(group, announced)
        while not scene.activity.num_checkpoints:  # noqa: ASYNC110 - on disk, and not reported yet
            await asyncio.sleep(0.005)
        assert scene.said == []
        assert not scene.news.is_set(), "the next one waits for the report"
        version_is_out.set()
        await scene.ended()
        assert scene.news.is_set()
        await scene.saving.tell()

    play(scene, script)
    wanted = CheckpointSaved(version=1, path="/run/1", stall_s=2.0, write_s=0.5, num_bytes=10)
    assert scene.said == ["version", wanted, wanted]


def test_asked_for_what_is_saved_it_says_so_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.training.saved = Path("/run/1")

    async def script(group: asyncio.TaskGroup) -> None:
        scene.saving.ask("somebody")
        for _ in range(2):
            await scene.saving.start_if_free(group, None)

    play(scene, script)
    assert scene.training.copied == []
    assert scene.said == [CheckpointSaved(version=1, path="/run/1")]


def test_the_digest_of_the_manifest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "manifest_digest", lambda folder: {"1": "0a", "2": "0b"}[folder.name] * 32)
    scene = Scene(monkeypatch)

    async def script(group: asyncio.TaskGroup) -> None:
        scene.saving.ask("somebody")
        await scene.saving.start_if_free(group, None)
        await scene.ended()
        scene.training.version, scene.training.saved = 2, Path("/run/2")
        await scene.saving.tell()

    play(scene, script)
    assert [said.digest for said in scene.said] == ["0a" * 32, "0b" * 32]


def test_word_of_an_older_checkpoint_is_not_given_for_the_present_version(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def script(group: asyncio.TaskGroup) -> None:
        scene.saving.ask("somebody")
        await scene.saving.start_if_free(group, None)
        await scene.ended()
        scene.training.version, scene.training.saved = 2, Path("/run/2")
        await scene.saving.tell()

    play(scene, script)
    assert scene.said[-1] == CheckpointSaved(version=2, path="/run/2")


def test_refused_checkpoint_is_reported_and_counted_and_the_next_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.training.error = OperationError("no room")

    async def script(group: asyncio.TaskGroup) -> None:
        for version in (1, 2):
            scene.training.version = version
            scene.saving.ask("somebody")
            scene.news.clear()
            await scene.saving.start_if_free(group, None)
            await scene.ended()
            assert scene.news.is_set()
            scene.training.error = None

    play(scene, script)
    failed, saved = scene.said
    assert failed == CheckpointFailed(version=1, reason="no room")
    assert (type(saved), saved.version) == (CheckpointSaved, 2)
    assert (scene.activity.num_failed_checkpoints, scene.activity.num_checkpoints) == (1, 1)


def test_lost_rank_is_no_refusal_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.training.error = RankLost("rank 1 is gone")

    async def script(group: asyncio.TaskGroup) -> None:
        scene.saving.ask("somebody")
        await scene.saving.start_if_free(group, None)

    with pytest.raises(ExceptionGroup) as raised:
        play(scene, script)
    assert raised.group_contains(RankLost)
    assert scene.said == []


def test_last_checkpoint_waits_for_the_write_before_it_and_is_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, every_steps=1)
    scene.training.disk.clear()

    async def script(group: asyncio.TaskGroup) -> None:
        scene.at(1)
        await scene.saving.start_if_free(group, None)
        scene.training.version = 2
        asyncio.get_running_loop().call_soon(scene.training.disk.set)
        await scene.saving.last(group, None)
        assert [message.version for message in scene.said] == [1], "the word of the last one comes after the export"
        await scene.saving.tell()

    play(scene, script)
    assert scene.training.copied == [1, 2]
    assert scene.said[-1] == CheckpointSaved(version=2, path="/run/2", write_s=0.5, num_bytes=20)


def test_last_checkpoint_that_is_there_already_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.training.saved = Path("/run/1")
    play(scene, lambda group: scene.saving.last(group, None))
    assert scene.training.copied == []


def test_last_checkpoint_must_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.training.error = OperationError("no room")
    with pytest.raises(ExceptionGroup) as raised:
        play(scene, lambda group: scene.saving.last(group, None))
    (error,) = raised.value.exceptions
    assert isinstance(error, UserError)
    assert error.what == "the last checkpoint could not be written: no room"
    assert "areal-like resume" in error.remedy
    assert scene.activity.num_failed_checkpoints == 0
