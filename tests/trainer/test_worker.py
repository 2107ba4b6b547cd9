"""Claims about the trainer process: which batches it trains on, what it says when, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from forked_jobs import ForkedJob, JobServer
from made_keys import keys_of, run_keys
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings, TraceSettings
from areal_like.errors import ChannelError, DeadlineExceeded, OperationError, UserError, WeightError, WeightsDamaged
from areal_like.trace import Tracer, merge_traces
from areal_like.transport.channel import Hub
from areal_like.weights.weight_store import open_payload, verify
from areal_like.wire import messages as m
from trainer import worker as module
from trainer.activity import Activity
from trainer.checkpoints import checkpoint
from trainer.export import write_model
from trainer.model.tokenizers import build_tokenizer
from trainer.training import Saved, Training
from trainer.weights.version_writer import Written
from trainer.worker import ACCEPT, TrainerWorker

LIMIT_S = 300.0
FROM_TRAINER = frozenset({m.BatchRequest, m.VersionPublished, m.VersionRewritten, m.CheckpointSaved})


def process_spec(run_dir: Path, **changes: Any) -> ProcessSpec:
    facts: dict[str, Any] = {
        "role": "trainer", "name": "trainer", "run_id": "t", "run_dir": str(run_dir), "hub_address": "tcp://127.0.0.1:1",
        "parent_pid": os.getpid(), "seed": 1, "model": ModelSettings(path=str(run_dir / "prepared")),
        "sampling": SamplingSettings(), "staleness": StalenessSettings(), "groups_per_step": 3, "group_size": 4,
        "num_steps": 6, "weight_dir": str(run_dir / "weights"), "controller_silence_s": 5.0,
        "trace": {"max_events": 1000}, "curve_dir": str(keys_of("trainer", "trainer")),
        "settings": {"optimizer": {"lr": 1e-3}, "checkpoint": {"every_steps": 2}},
    }  # fmt: skip
    merged = {**facts, **changes}
    return ProcessSpec(**{**merged, "settings": {"device": "cpu", **merged["settings"]}})


# ---------------------------------------------------------------- a policy without torch, a wire without sockets


@dataclass
class FakeTraining:
    """Does nothing but remember the order of things. `gate` holds a step back until it is set."""

    log: list[str] = field(default_factory=list)
    version: int = -1
    start: int = 0
    is_saved: bool = False
    setup_description: str = ""
    gate: threading.Event | None = None
    error: Exception | None = None
    counters: dict[str, float] = field(default_factory=dict)
    every_steps: int = 0
    every_s: float | None = None
    max_batch_wait_s: float = LIMIT_S
    disk: threading.Event | None = None
    """Holds writes back until it is set."""
    disk_error: str = ""

    @property
    def settings(self) -> Any:
        saving = SimpleNamespace(every_steps=self.every_steps, every_s=self.every_s)
        return SimpleNamespace(checkpoint=saving, max_batch_wait_s=self.max_batch_wait_s)

    def open(self) -> None:
        self.version = self.start

    def prepare(self, samples: Any, step: int, position: m.RunPosition) -> Any:
        self.log.append(f"pack {step}")
        return SimpleNamespace(step=step)

    def run(self, prepared: Any) -> dict[str, float]:
        if self.gate is not None:
            assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert prepared.step == self.version + 1
        self.version, self.is_saved = prepared.step, False
        self.log.append(f"train {prepared.step}")
        return {"loss": 1.0}

    def publish(self) -> Callable[[], Written]:
        self.log.append(f"publish {self.version}")
        path = Path(f"/store/v{self.version}")
        return lambda: Written(path, 1, is_delta=False)

    def publish_again(self, version: int) -> Written | None:
        self.log.append(f"publish again {version}")
        if self.disk_error:
            raise WeightError(self.disk_error)
        return Written(Path(f"/store/again{version}"), 1, is_delta=False) if version == self.version else None

    def save(self) -> Callable[[], Saved]:
        version = self.version
        self.log.append(f"copy {version}")

        def write() -> Saved:
            if self.disk is not None:
                assert self.disk.wait(LIMIT_S)
            if self.disk_error:
                raise OperationError(self.disk_error)
            self.log.append(f"save {version}")
            self.is_saved = version == self.version
            return Saved(Path(f"/run/step_{version}"), 1, 0.0)

        return write

    @property
    def saved(self) -> Path:
        return Path(f"/run/step_{self.version}")

    def export(self) -> None:
        self.log.append(f"export {self.version}")


class FakeLink:
    """What a Peer is to the worker."""

    def __init__(self) -> None:
        self.hub_silence_s = 0.0
        self.to_trainer: asyncio.Queue[m.Message] = asyncio.Queue()
        self.from_trainer: asyncio.Queue[m.Message] = asyncio.Queue()

    async def receive(self, timeout_s: float) -> m.Message | None:
        try:
            return await asyncio.wait_for(self.to_trainer.get(), min(timeout_s, 0.02))
        except TimeoutError:
            return None

    async def send(self, message: m.Message, timeout_s: float = 30.0) -> None:
        if isinstance(message, m.CheckpointSaved):  # without times
            message = m.CheckpointSaved(version=message.version, path=message.path)
        await self.from_trainer.put(message)

    def tell(self, *messages: m.Message) -> None:
        for message in messages:
            self.to_trainer.put_nowait(message)

    async def received(self) -> m.Message:
        return await asyncio.wait_for(self.from_trainer.get(), LIMIT_S)

    async def received_until(self, wanted: m.Message) -> list[m.Message]:
        seen = [await self.received()]
        while seen[-1] != wanted:
            seen.append(await self.received())
        return seen

    def rest(self) -> list[m.Message]:
        found = []
        while not self.from_trainer.empty():
            found.append(self.from_trainer.get_nowait())
        return found


def batch(step: int, lineage: str = "l0") -> m.Batch:
    return m.Batch(step=step, lineage=lineage, samples=())


def asked(step: int) -> m.BatchRequest:
    return m.BatchRequest(step=step)


def published(version: int) -> m.VersionPublished:
    return m.VersionPublished(version=version, lineage="l0", manifest_path=f"/store/v{version}")


def saved(version: int) -> m.CheckpointSaved:
    return m.CheckpointSaved(version=version, path=f"/run/step_{version}")


def no_more(last_step: int) -> m.NoMoreBatches:
    return m.NoMoreBatches(last_step=last_step, reason="done")


@dataclass
class Stage:
    link: FakeLink
    training: FakeTraining
    stop: asyncio.Event
    activity: Activity
    task: asyncio.Task[str]

    async def first_batch(self) -> list[m.Message]:
        before = await self.link.received_until(asked(1))
        self.link.tell(batch(1))
        return before

    async def ended(self) -> str:
        """The end; a trainer whose work is done is notified that the run is over."""
        async with asyncio.timeout(LIMIT_S):
            while not self.task.done() and self.activity.heartbeat({}).state != "serve":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            self.link.tell(m.Shutdown(reason="the run is over", deadline_s=1.0))
            return await asyncio.shield(self.task)


@contextlib.asynccontextmanager
async def on_stage(tmp_path: Path, training: FakeTraining, **changes: Any) -> AsyncIterator[Stage]:
    link, stop, activity = FakeLink(), asyncio.Event(), Activity()
    worker = TrainerWorker(process_spec(tmp_path, **changes), training, link, stop, activity)  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    try:
        yield Stage(link, training, stop, activity, task)
    finally:
        if training.gate is not None:
            training.gate.set()
        task.cancel()
        await asyncio.wait([task], timeout=LIMIT_S)


def plain(messages: list[m.Message]) -> list[m.Message]:
    """Without metrics, which hold times."""
    return [published(one.version) if isinstance(one, m.VersionPublished) else one for one in messages]


async def written(training: FakeTraining, line: str) -> None:
    for _ in range(int(LIMIT_S / 0.01)):
        if line in training.log:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{line!r} is not in {training.log}")


async def failure(stage: Stage) -> BaseException:
    with pytest.raises(BaseExceptionGroup) as caught:
        await stage.ended()
    (error,) = caught.value.exceptions
    return error


# ---------------------------------------------------------------- the conversation


def test_run_goes_version_by_version_and_ends_with_checkpoint_and_export(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            assert await stage.link.received_until(asked(1)) == [published(0), asked(1)]
            stage.link.tell(batch(1))
            assert await stage.link.received() == asked(2)
            stage.link.tell(batch(2))
            seen = await stage.link.received_until(asked(3))
            stage.link.tell(no_more(2))
            assert await stage.ended() == "done"
            reports = [one for one in plain([*seen, *stage.link.rest()]) if not isinstance(one, m.BatchRequest)]
            assert reports == [published(1), published(2), saved(2)]  # the first while step 2 computes, or before
        done = [line for line in stage.training.log if not line.startswith(("pack", "copy"))]
        assert done == ["publish 0", "train 1", "publish 1", "train 2", "publish 2", "save 2", "export 2"]

    asyncio.run(scene())


def again(version: int, lineage: str = "l0") -> m.RewriteVersion:
    return m.RewriteVersion(version=version, lineage=lineage)


def test_damaged_version_is_written_again_while_the_trainer_waits_and_while_it_computes(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await stage.link.received_until(asked(1))
            answer = m.VersionRewritten(version=0, lineage="l0", manifest_path="/store/again0")
            stage.link.tell(again(0))
            assert await stage.link.received() == answer
            stage.link.tell(batch(1))
            await stage.link.received_until(asked(2))
            stage.link.tell(again(0))
            assert await stage.link.received() == answer, "step 1 runs"
            stage.link.tell(m.Welcome(run_id="t", incarnation="a"))
            repeated = await stage.link.received_until(asked(2))
            assert [one.manifest_path for one in repeated[:-1]] == ["/store/again0"], (
                "reported again with the new place"
            )

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("wanted", "disk_error", "reason"),
    [
        (again(7), "", "a newer version has replaced it"),
        (again(0, "l9"), "", "a newer version has replaced it"),
        (again(0), "no room", "no room"),
    ],
)
def test_version_that_is_not_written_again_is_answered_with_the_reason(tmp_path, wanted, disk_error, reason) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(disk_error=disk_error)) as stage:
            await stage.link.received_until(asked(1))
            stage.link.tell(wanted)
            answer = await stage.link.received()
            assert answer == m.VersionRewritten(version=wanted.version, lineage=wanted.lineage, reason=reason)

    asyncio.run(scene())


def test_what_was_chosen_is_reported_once_with_the_first_version(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(setup_description="attention sdpa (auto)")) as stage:
            seen = await stage.first_batch()
            stage.link.tell(no_more(1))
            await stage.ended()
            versions = [one for one in [*seen, *stage.link.rest()] if isinstance(one, m.VersionPublished)]
            assert [one.note for one in versions] == ["attention sdpa (auto)", ""]

    asyncio.run(scene())


def test_metrics_travel_with_the_version_they_made(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            seen = await stage.first_batch()
            stage.link.tell(no_more(1))
            await stage.ended()
            versions = [one for one in [*seen, *stage.link.rest()] if isinstance(one, m.VersionPublished)]
            assert versions[0].metrics == {}
            assert versions[1].metrics["loss"] == 1.0
            assert versions[1].metrics["publish_s"] >= 0

    asyncio.run(scene())


def test_next_batch_is_fetched_and_packed_while_the_step_runs(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            stage.link.tell(batch(2))
            await written(training, "pack 2")
            assert "train 1" not in training.log
            assert stage.activity.heartbeat({}).state == "forward_backward"
            assert stage.link.rest() == []  # one ahead, never two
            assert training.gate is not None
            training.gate.set()
            await stage.link.received_until(asked(3))
            stage.link.tell(no_more(2))
            await stage.ended()

    asyncio.run(scene())


def test_batch_packed_ahead_is_dropped_when_the_run_ends_before_it(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            stage.link.tell(batch(2), no_more(1))
            await written(training, "pack 2")
            assert training.gate is not None
            training.gate.set()
            await stage.ended()
        assert training.version == 1
        assert "train 2" not in training.log

    asyncio.run(scene())


def test_no_more_batches_for_a_later_step_lets_the_steps_before_it_run(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            stage.link.tell(no_more(2))
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            stage.link.tell(batch(2))
            await stage.ended()
        assert stage.training.version == 2

    asyncio.run(scene())


@pytest.mark.parametrize(
    "stray", [batch(2), batch(7), batch(0), batch(1, lineage="l9")], ids=["early", "far", "done", "lineage"]
)
def test_batch_that_was_not_asked_for_is_refused(stray: m.Batch, tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            await stage.link.received_until(asked(1))
            stage.link.tell(stray, batch(1), no_more(1))
            await stage.ended()
        assert [line for line in stage.training.log if line.startswith("train")] == ["train 1"]
        assert stage.activity.heartbeat({}).counters["refused_batches"] == 1

    asyncio.run(scene())


def test_repeated_batch_is_trained_on_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            await stage.first_batch()
            stage.link.tell(batch(1))
            await stage.link.received_until(asked(2))
            stage.link.tell(batch(1), batch(2), batch(2))
            await stage.link.received_until(asked(3))
            stage.link.tell(no_more(2))
            await stage.ended()
        assert [line for line in stage.training.log if line.startswith("train")] == ["train 1", "train 2"]

    asyncio.run(scene())


def test_checkpoints_come_every_so_many_steps_and_once_at_the_end(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(every_steps=2)) as stage:
            for step in range(1, 5):
                await stage.link.received_until(asked(step))
                stage.link.tell(batch(step))
            await stage.link.received_until(asked(5))
            stage.link.tell(no_more(4))
            await stage.ended()
        saves = [line for line in stage.training.log if line.startswith("save")]
        assert saves == ["save 2", "save 4"]

    asyncio.run(scene())


def test_checkpoint_on_demand_is_saved_while_waiting(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(start=5)) as stage:
            await stage.link.received_until(asked(6))
            stage.link.tell(m.SaveCheckpoint(reason="the user asked"))
            assert await stage.link.received() == saved(5)
            assert stage.training.log == ["publish 5", "copy 5", "save 5"]

    asyncio.run(scene())


def test_checkpoint_on_demand_waits_for_the_running_step(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            stage.link.tell(m.SaveCheckpoint(reason="the user asked"))
            await asyncio.sleep(0.05)
            assert training.gate is not None
            training.gate.set()
            seen = await stage.link.received_until(saved(1))
            assert plain(seen) == [published(1), saved(1)]

    asyncio.run(scene())


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(every_steps=1, disk=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            for step in range(1, 5):
                await stage.link.received_until(asked(step))
                stage.link.tell(batch(step))
            await written(training, "train 4")
            assert [line for line in training.log if line.startswith(("copy", "save"))] == ["copy 1"]
            assert training.disk is not None
            training.disk.set()
            assert (await stage.link.received_until(saved(4)))[-1] == saved(4), "of what came due meanwhile, the newest"
            stage.link.tell(no_more(4))
            await stage.ended()
        saves = [line for line in training.log if line.startswith(("copy", "save"))]
        assert saves == ["copy 1", "save 1", "copy 4", "save 4"]
        assert stage.activity.heartbeat({}).counters["put_off_checkpoints"] == 1
        assert stage.activity.heartbeat({}).counters["checkpoints"] == 2

    asyncio.run(scene())


def test_checkpoints_come_by_time_as_well(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(every_s=1e-9)) as stage:
            await stage.first_batch()
            assert plain(await stage.link.received_until(saved(1)))[-1] == saved(1)

    asyncio.run(scene())


def test_checkpoint_that_the_disk_refuses_is_reported_and_counted_and_training_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(every_steps=1, disk_error="the disk is full")
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(m.CheckpointFailed(version=1, reason="the disk is full"))
            training.disk_error = ""
            stage.link.tell(batch(2))
            await stage.link.received_until(saved(2))
            stage.link.tell(no_more(2))
            await stage.ended()
        assert stage.activity.heartbeat({}).counters["failed_checkpoints"] == 1

    asyncio.run(scene())


def test_last_checkpoint_must_succeed_and_otherwise_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(disk_error="the disk is full")
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            stage.link.tell(no_more(1))
            error = await failure(stage)
        assert isinstance(error, UserError)
        assert str(error).startswith("the last checkpoint could not be written: the disk is full -> correct the cause")
        assert "export 1" not in training.log

    asyncio.run(scene())


@pytest.mark.parametrize("how", ["signal", "message"])
def test_asked_to_stop_the_running_step_is_finished_published_and_saved(how: str, tmp_path: Path) -> None:
    async def scene() -> None:
        training = FakeTraining(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            if how == "signal":
                stage.stop.set()
            else:
                stage.link.tell(m.Shutdown(reason="end of shift", deadline_s=5.0))
                await asyncio.sleep(0.05)
            assert training.gate is not None
            training.gate.set()
            assert await stage.ended() == ("asked to stop" if how == "signal" else "end of shift")
            assert plain(stage.link.rest()) == [published(1), saved(1)]
        assert training.log[-4:] == ["train 1", "publish 1", "copy 1", "save 1"]

    asyncio.run(scene())


def test_asked_to_stop_while_waiting_it_saves_and_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(start=3, is_saved=True)) as stage:
            await stage.link.received_until(asked(4))
            stage.stop.set()
            await stage.ended()
            assert stage.link.rest() == [saved(3)]
        assert stage.training.log == ["publish 3"]  # the checkpoint it came from is still there

    asyncio.run(scene())


def test_batch_that_never_comes_is_an_error_that_names_the_controller(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(max_batch_wait_s=0.1)) as stage:
            error = await failure(stage)
        assert isinstance(error, DeadlineExceeded)
        assert "batch of step 1" in str(error)
        assert "controller" in str(error)

    asyncio.run(scene())


def test_silent_hub_ends_the_process(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            await stage.link.received_until(asked(1))
            stage.link.hub_silence_s = 5.5
            error = await failure(stage)
        assert isinstance(error, ChannelError)
        assert "silent" in str(error)

    asyncio.run(scene())


def test_error_in_a_step_ends_the_process_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(error=OperationError("not finite"))) as stage:
            await stage.first_batch()
            assert "not finite" in str(await failure(stage))

    asyncio.run(scene())


def test_hub_that_forgot_us_gets_everything_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            await stage.link.received()  # version 1
            stage.link.tell(m.Welcome(run_id="t", incarnation="new"))
            again = [await stage.link.received(), await stage.link.received()]
            assert plain(again) == [published(1), asked(2)]

    asyncio.run(scene())


def test_time_is_work_or_waiting_and_every_second_counts_once(tmp_path: Path) -> None:
    now_s = 0.0
    activity = Activity(clock=lambda: now_s)
    with activity.state("forward_backward"):
        now_s = 2.0
    with activity.state("wait:batch"):
        now_s = 5.0
        assert activity.heartbeat({}).state == "wait:batch"
        assert activity.times() == {"busy_s": 2.0, "wait_s": 3.0}
        with activity.state("checkpoint"):
            now_s = 6.0
        now_s = 7.0
    assert activity.times() == {"busy_s": 3.0, "wait_s": 4.0}
    with activity.span("micro_batch"):
        pass
    counters = activity.heartbeat({"steps": 1.0}).counters
    assert 0 < counters.pop("cpu_s") <= time.process_time()
    assert counters == {
        "busy_s": 3.0, "wait_s": 4.0, "steps": 1.0, "micro_batches": 1.0, "refused_batches": 0.0,
        "checkpoints": 0.0, "failed_checkpoints": 0.0, "put_off_checkpoints": 0.0,
    }  # fmt: skip


def test_states_are_drawn_one_after_the_other_and_arrows_arrive_at_the_step(tmp_path: Path) -> None:
    tracer = Tracer.of(tmp_path, "trainer", TraceSettings(max_events=100, every_group=2))
    activity = Activity(tracer)
    with activity.state("wait:batch", step=3), activity.state("checkpoint"):
        pass
    with activity.state("forward_backward", step=3):
        with activity.span("update"):
            pass
        activity.arrive([(4, 0), (4, 1), (5, 0)])
    tracer.close()
    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices] == [
        "wait:batch",
        "checkpoint",
        "wait:batch",
        "update",
        "forward_backward",
    ]
    assert slices[0]["args"] == slices[2]["args"] == slices[4]["args"] == {"step": 3}
    for before, after in ((0, 1), (1, 2), (2, 4)):
        assert slices[before]["ts"] + slices[before]["dur"] <= slices[after]["ts"], "no overlap"
    arrows = [event for event in events if event["ph"] == "f"]
    assert [event["name"] for event in arrows] == ["g4.0", "g4.1"], "every second group is drawn"
    update, step = slices[3], slices[4]
    assert all(step["ts"] <= event["ts"] < step["ts"] + step["dur"] for event in arrows)
    assert all(event["ts"] <= update["ts"] for event in arrows), "not into what the step does inside"


def test_worker_accepts_exactly_what_the_controller_sends_trainers() -> None:
    assert {m.Batch, m.NoMoreBatches, m.RewriteVersion, m.SaveCheckpoint} == ACCEPT


# ---------------------------------------------------------------- what wakes it, and how it lets go


def without_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that sleeps now is woken by what happens, or never."""
    monkeypatch.setattr(module, "POLL_S", 3600.0)


def test_a_batch_that_is_packed_later_and_the_wish_to_stop_wake_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_polls(monkeypatch)
    packing = threading.Event()

    class SlowToPack(FakeTraining):
        def prepare(self, samples: Any, step: int, position: m.RunPosition) -> Any:
            prepared = super().prepare(samples, step, position)
            assert packing.wait(LIMIT_S)
            return prepared

    async def scene() -> None:
        training = SlowToPack()
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await written(training, "pack 1")
            await asyncio.sleep(0.05)  # the message has woken it by now, in vain
            packing.set()
            await stage.link.received_until(asked(2))
            await written(training, "publish 1")
            await asyncio.sleep(0.05)
            stage.stop.set()
            assert await stage.ended() == "asked to stop"

    asyncio.run(scene())


def test_the_end_of_a_write_wakes_the_trainer_for_the_checkpoint_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_polls(monkeypatch)

    async def scene() -> None:
        training = FakeTraining(every_steps=1, disk=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            for step in (1, 2):
                await stage.link.received_until(asked(step))
                stage.link.tell(batch(step))
            await written(training, "publish 2")
            await asyncio.sleep(0.05)
            assert training.disk is not None
            training.disk.set()
            await stage.link.received_until(saved(2))

    asyncio.run(scene())


def test_a_hub_that_forgot_us_early_or_while_the_batch_is_here_is_asked_for_nothing(tmp_path: Path) -> None:
    loading = threading.Event()
    welcome = m.Welcome(run_id="t", incarnation="new")

    class SlowToLoad(FakeTraining):
        def open(self) -> None:
            assert loading.wait(LIMIT_S)
            super().open()

    async def taken(stage: Stage) -> None:
        stage.link.tell(welcome)
        async with asyncio.timeout(LIMIT_S):
            while not stage.link.to_trainer.empty():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)

    async def scene() -> None:
        training = SlowToLoad(gate=threading.Event())
        async with on_stage(tmp_path, training) as stage:
            await taken(stage)
            loading.set()
            assert plain(await stage.link.received_until(asked(1))) == [published(0), asked(1)]
            stage.link.tell(batch(1))
            await stage.link.received_until(asked(2))
            stage.link.tell(batch(2))
            await written(training, "pack 2")
            await taken(stage)
            assert plain(stage.link.rest()) == [published(0)], "the batch of step 2 is here"

    asyncio.run(scene())


@pytest.mark.parametrize("busy", ["computing", "writing"])
def test_an_error_ends_it_at_once_whatever_its_threads_are_doing(tmp_path: Path, busy: str) -> None:
    left: list[bool] = []

    class Held(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            left.append(super().wait(timeout))
            return left[-1]

    async def scene() -> None:
        held = Held()
        training = FakeTraining(gate=held) if busy == "computing" else FakeTraining(disk=held, every_steps=1)
        async with on_stage(tmp_path, training) as stage:
            await stage.first_batch()
            await stage.link.received_until(asked(2))
            if busy == "writing":
                await written(training, "copy 1")
            stage.link.hub_silence_s = 5.5
            try:
                assert isinstance(await failure(stage), ChannelError)
                assert left == [], "nobody waited for the thread"
            finally:
                held.set()

    asyncio.run(scene())


def test_its_threads_end_with_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(every_steps=1)) as stage:
            await stage.first_batch()
            stage.link.tell(no_more(1))
            await stage.ended()
        names = ("compute", "packing", "checkpoint")
        own = [one for one in threading.enumerate() if one not in before and one.name.startswith(names)]
        for thread in own:
            await asyncio.to_thread(thread.join, LIMIT_S)
        assert not [thread.name for thread in own if thread.is_alive()]

    asyncio.run(scene())


def test_one_thread_computes_one_packs_and_one_writes_checkpoints(tmp_path: Path) -> None:
    """What a thread has of its own, such as the current GPU, is the same in every step."""
    training: Any = FakeTraining()
    worker = TrainerWorker(process_spec(tmp_path), training, FakeLink(), asyncio.Event(), Activity())
    pools = (worker._compute_thread, worker._packing_thread, worker._saving._thread)
    assert [pool._max_workers for pool in pools] == [1, 1, 1]


def test_a_hub_is_silent_once_it_has_been_for_longer_than_that(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(), controller_silence_s=5.0) as stage:
            stage.link.hub_silence_s = 5.0
            await stage.first_batch()
            await asyncio.sleep(0.05)
            assert not stage.task.done()
            stage.link.hub_silence_s = 5.25
            assert str(await failure(stage)) == "the controller has been silent for more than 5 s"

    asyncio.run(scene())


def test_a_refused_batch_is_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining(start=3)) as stage:
            await stage.link.received_until(asked(4))
            stage.link.tell(batch(4, lineage="l9"), batch(5), batch(3), no_more(3))
            await stage.ended()

    asyncio.run(scene())
    asked_for = "the last request was for step 4 of lineage l0"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        f"rejected the batch of step 4 (lineage l9); {asked_for}",
        f"rejected the batch of step 5 (too early); {asked_for}",
        f"rejected the batch of step 3 (repeated); {asked_for}",
    ]  # fmt: skip


def test_a_version_travels_with_what_publishing_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)), monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", clock)

    async def scene() -> None:
        async with on_stage(tmp_path, FakeTraining()) as stage:
            await stage.first_batch()
            seen = await stage.link.received_until(asked(2))
            while not isinstance(seen[-1], m.VersionPublished):
                seen.append(await stage.link.received())
            metrics = {"loss": 1.0, "publish_s": 1.0, "publish_bytes": 1.0, "publish_write_s": 1.0}
            assert seen[-1].metrics == metrics

    asyncio.run(scene())


class FakeSender:
    """Serves versions at places of its own."""

    counters: ClassVar[dict[str, float]] = {"weights_sent_bytes": 3.0}

    def __init__(self) -> None:
        self.log: list[str] = []

    async def start(self) -> None:
        self.log.append("start")

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("cancelled")

    async def publish(self, path: Path, version: int, lineage: str) -> str:
        self.log.append(f"publish {path} {version} {lineage}")
        return f"place {version}"

    def rewritten(self, version: int, lineage: str) -> None:
        self.log.append(f"rewritten {version} {lineage}")

    async def close(self) -> None:
        self.log.append("close")


def test_versions_are_announced_where_the_sender_has_them_also_when_written_again(tmp_path: Path) -> None:
    async def scene() -> None:
        sender, link = FakeSender(), FakeLink()
        training: Any = FakeTraining()
        worker = TrainerWorker(process_spec(tmp_path), training, link, asyncio.Event(), Activity(), sender)
        task = asyncio.create_task(worker.run())
        first = await link.received()
        assert isinstance(first, m.VersionPublished)
        assert first.manifest_path == "place 0"
        assert await link.received() == asked(1)
        link.tell(again(0), again(7))
        assert await link.received() == m.VersionRewritten(version=0, lineage="l0", manifest_path="place 0")
        assert await link.received() == m.VersionRewritten(
            version=7, lineage="l0", reason="a newer version has replaced it"
        )
        link.tell(m.Shutdown(reason="over", deadline_s=1.0))
        assert await asyncio.wait_for(task, LIMIT_S) == "over"
        assert sender.log == [
            "start", "publish /store/v0 0 l0", "rewritten 0 l0", "publish /store/again0 0 l0", "cancelled", "close"
        ]  # fmt: skip

    asyncio.run(scene())


# ---------------------------------------------------------------- a process from spec to exit


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` does, with everything played but itself."""
    log: list[Any] = []

    class Traced:
        def close(self) -> None:
            log.append("trace closed")

    class Played:
        ranks = SimpleNamespace(has_group=False)
        counters: ClassVar[dict[str, float]] = {"steps": 2.0}
        settings = "settings"

        def __init__(self, kind: str) -> None:
            self.kind = kind

        def close(self) -> None:
            log.append("training closed")

    class Following:
        def __init__(self, training: Any, activity: Any) -> None:
            log.append(f"follow {training.kind}")

        def run(self) -> None:
            log.append(threading.current_thread().name)

    class Connection:
        def __init__(self, **facts: Any) -> None:
            log.append(facts)

        async def connect(self, limit_s: float) -> None:
            log.append("connect")

        async def close(self, reason: str) -> None:
            log.append(f"goodbye {reason}")

    class Working:
        def __init__(self, spec: Any, training: Any, link: Any, stop: Any, activity: Any, sender: Any) -> None:
            assert isinstance(link, Connection)
            log.append(f"work on {training.kind} with {sender}")

        async def run(self) -> str:
            if log[0] == "fail":
                raise OperationError("broken")
            return "done"

    monkeypatch.setattr(module.torch, "set_num_threads", lambda num: log.append(f"{num} threads"))
    monkeypatch.setattr(module.Tracer, "of", lambda *_: Traced())
    monkeypatch.setattr(module, "Activity", lambda tracer: SimpleNamespace(heartbeat=lambda counters: counters))
    monkeypatch.setattr(module, "Training", lambda spec, activity: Played("real"))
    monkeypatch.setattr(module, "EmulatedTraining", lambda spec, activity: Played("emulated"))
    monkeypatch.setattr(module, "Follower", Following)
    monkeypatch.setattr(module, "Peer", Connection)
    monkeypatch.setattr(module, "TrainerWorker", Working)
    monkeypatch.setattr(module, "sender_of", lambda spec, settings: None)
    monkeypatch.setattr(module, "leave_at_once", lambda error: log.append(f"left: {error}"))
    log.append(Played)
    return log


def serve(spec: Any) -> None:
    asyncio.run(module.serve(spec, asyncio.Event()))


@pytest.mark.parametrize(("emulation", "kind"), [(None, "real"), ("any", "emulated")])
def test_rank_0_leads_and_says_goodbye_before_the_other_ranks_may_end(
    tmp_path: Path, life: list[Any], emulation: Any, kind: str
) -> None:
    spec = process_spec(tmp_path).model_copy(update={"emulation": emulation, "num_threads": 3})
    serve(spec)
    facts = life.pop(2)
    assert life[1:] == [
        "3 threads", "connect", f"work on {kind} with None", "goodbye done", "training closed", "trace closed"
    ]  # fmt: skip
    assert (facts["address"], facts["audience"], facts["accept"]) == (spec.hub_address, "controller", ACCEPT)
    assert (facts["heartbeat_s"], facts["silence_s"]) == (spec.heartbeat_s, spec.controller_silence_s)
    hello = facts["hello"]
    assert (hello.role, hello.name, hello.pid, hello.run_id) == ("trainer", "trainer", os.getpid(), "t")
    assert len(bytes.fromhex(hello.incarnation)) == 8
    assert facts["status"]() == {"steps": 2.0}


def test_heartbeats_count_what_the_sender_sent(
    tmp_path: Path, life: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sender_of", lambda spec, settings: FakeSender())
    serve(process_spec(tmp_path))
    assert life[2]["status"]() == {"steps": 2.0, "weights_sent_bytes": 3.0}


def test_another_rank_follows_on_a_thread_of_its_own(tmp_path: Path, life: list[Any]) -> None:
    serve(process_spec(tmp_path).model_copy(update={"rank": 1}))
    assert life[2] == "follow real"
    assert life[3].startswith("compute")
    assert life[4:] == ["trace closed"]


@pytest.mark.parametrize("has_group", [False, True])
def test_after_a_failure_there_is_no_goodbye_and_a_group_of_ranks_is_left_at_once(
    tmp_path: Path, life: list[Any], has_group: bool
) -> None:
    life[0].ranks = SimpleNamespace(has_group=has_group)
    life[0] = "fail"
    with pytest.raises(OperationError, match="broken"):
        serve(process_spec(tmp_path))
    left = ["left: broken"] if has_group else []
    assert life[3:] == ["connect", "work on real with None", *left, "trace closed"]


# ---------------------------------------------------------------- the real thing


@pytest.fixture
def run_dir(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    write_model(tiny_model(), prepared, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(prepared)
    (prepared / "generation_config.json").write_text('{"eos_token_id": 2}')
    return tmp_path


MakeSamples = Callable[..., list[m.BatchSample]]


@contextlib.contextmanager
def real_process(server: JobServer, run_dir: Path, address: str, **changes: Any) -> Iterator[ForkedJob]:
    file = run_dir / "spec.json"
    process_spec(run_dir, hub_address=address, **changes).save(file)
    process = server.start("trainer", ["--spec", str(file)], run_dir / "log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def status_of(process: ForkedJob) -> int:
    """How it ends, while the hub goes on."""
    return await asyncio.to_thread(process.wait, LIMIT_S)


async def next_message(hub: Hub, run_dir: Path) -> m.Message:
    received = await hub.receive(60.0)
    assert received is not None, (run_dir / "log").read_text()
    return received[1]


def published_at(seen: list[m.Message], version: int) -> str:
    """The manifest's path that was announced for a version."""
    return next(one.manifest_path for one in seen if isinstance(one, m.VersionPublished) and one.version == version)


def damage(manifest_path: Path) -> None:
    """Flip bits in the middle of a published payload; checksums find it."""
    manifest, _ = open_payload(manifest_path)
    with (manifest_path.parent / manifest.payload).open("r+b") as file:
        file.seek(manifest.tensors[0].offset + 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
    with pytest.raises(WeightsDamaged):
        verify(*open_payload(manifest_path))


@pytest.mark.parametrize(
    ("newest", "written", "announced"),
    [
        (3, SimpleNamespace(path="again3"), "again3"),
        (4, SimpleNamespace(path="again3"), "v4"),  # an older version than the newest
        (3, WeightError("disk full"), "v3"),
        (3, None, "v3"),
        (None, SimpleNamespace(path="again3"), None),
    ],
)
def test_only_the_newest_version_is_announced_where_it_was_written_again(
    newest: int | None, written: Any, announced: str | None
) -> None:
    sent: list[m.Message] = []

    def publish_again(version: int) -> Any:
        if isinstance(written, WeightError):
            raise written
        return written

    async def nothing() -> None:
        return

    async def send(message: m.Message) -> None:
        sent.append(message)

    async def place_of(found: Any, version: int) -> str:
        return str(found.path)

    published = None
    if newest is not None:
        published = m.VersionPublished(version=newest, lineage="l0", manifest_path=f"v{newest}", metrics={})
    worker: Any = SimpleNamespace(
        _all_announced=nothing, _store_turn=asyncio.Lock(), _spec=SimpleNamespace(lineage="l0"), _sender=None,
        _training=SimpleNamespace(publish_again=publish_again), _publish_location=place_of, _published=published,
        _link=SimpleNamespace(send=send),
    )  # fmt: skip
    asyncio.run(TrainerWorker._write_again(worker, m.RewriteVersion(version=3, lineage="l0")))
    assert (worker._published.manifest_path if worker._published is not None else None) == announced
    [answer] = sent
    assert isinstance(answer, m.VersionRewritten)
    assert bool(answer.reason) == (not hasattr(written, "path"))


@pytest.mark.processes
def test_real_process_trains_over_a_real_hub(run_dir: Path, make_samples: MakeSamples, job_server: JobServer) -> None:
    async def scene() -> None:
        hub = Hub(run_id="t", role="controller", bind="tcp://127.0.0.1:0", curve_dir=run_keys(), accept=FROM_TRAINER)
        address = await hub.start()
        try:
            with real_process(job_server, run_dir, address) as process:
                seen: list[m.Message] = []
                while not (seen and isinstance(seen[-1], m.Goodbye)):
                    seen.append(await next_message(hub, run_dir))
                    match seen[-1]:
                        case m.BatchRequest(step=step) if step <= 3:
                            samples = tuple(make_samples([4, 4, 4], version=step - 1, seed=step))
                            hub.send("trainer", m.Batch(step=step, lineage="l0", samples=samples))
                        case m.BatchRequest(step=step):
                            hub.send("trainer", no_more(step - 1))
                        case m.CheckpointSaved(version=3):  # its work is done; it stays while workers may need it
                            manifest = Path(published_at(seen, 3))
                            damage(manifest)
                            hub.send("trainer", m.RewriteVersion(version=3, lineage="l0"))
                        case m.VersionRewritten():
                            hub.send("trainer", m.Shutdown(reason="the run is over", deadline_s=5.0))
                assert await status_of(process) == 0, (run_dir / "log").read_text()
        finally:
            await hub.close()
        versions = [one for one in seen if isinstance(one, m.VersionPublished)]
        assert [one.version for one in versions] == [0, 1, 2, 3]
        assert all(one.metrics["grad_norm"] > 0 for one in versions[1:])
        assert [one.note.partition(" (")[0] for one in versions] == ["attention sdpa", "", "", ""]
        (rewritten,) = [one for one in seen if isinstance(one, m.VersionRewritten)]
        assert rewritten == m.VersionRewritten(version=3, lineage="l0", manifest_path=versions[-1].manifest_path)
        newest, payload = open_payload(Path(rewritten.manifest_path))
        verify(newest, payload)
        assert [one.version for one in seen if isinstance(one, m.CheckpointSaved)] == [2, 3]
        assert checkpoint.latest(run_dir) == checkpoint.checkpoint_folder(run_dir, 3)
        checkpoint.verify(checkpoint.checkpoint_folder(run_dir, 3))
        final = AutoModelForCausalLM.from_pretrained(run_dir / "final")
        for name, parameter in final.named_parameters():
            assert bytes(payload[name]) == parameter.detach().numpy().tobytes()
        assert json.loads((run_dir / "trainer.json").read_text())["attention"] == "sdpa"
        slices = {
            json.loads(line)["name"] for line in (run_dir / "logs" / "trainer.trace.jsonl").read_text().splitlines()
        }
        assert {
            "wait:batch",
            "packing",
            "forward_backward",
            "micro_batch",
            "publish",
            "checkpoint",
            "write_checkpoint",
        } <= slices

    asyncio.run(scene())


@pytest.mark.e2e
def test_real_process_resumes_stops_on_sigterm_and_says_a_mistake_in_one_line(
    run_dir: Path, make_samples: MakeSamples, job_server: JobServer
) -> None:
    spec = process_spec(run_dir)
    training = Training(spec)
    training.open()
    training.run(training.prepare(make_samples([4, 4, 4], version=0, seed=1), 1))
    folder = training.save()().folder

    async def scene() -> None:
        hub = Hub(run_id="t", role="controller", bind="tcp://127.0.0.1:0", curve_dir=run_keys(), accept=FROM_TRAINER)
        address = await hub.start()
        try:
            with real_process(job_server, run_dir, address, resume_from=str(folder), lineage="l1") as process:
                while not isinstance(message := await next_message(hub, run_dir), m.BatchRequest):
                    if isinstance(message, m.VersionPublished):
                        assert (message.version, message.lineage, message.metrics) == (1, "l1", {})
                assert message.step == 2
                process.send_signal(signal.SIGTERM)
                assert isinstance(await next_message(hub, run_dir), m.CheckpointSaved)
                assert isinstance(await next_message(hub, run_dir), m.Goodbye)
                assert await status_of(process) == 0
            nowhere = ModelSettings(path=str(run_dir / "nowhere"))
            with real_process(job_server, run_dir, address, model=nowhere) as process:
                said = []
                while process.poll() is None:
                    if (received := await hub.receive(0.2)) is not None:
                        said.append(received[1])
                assert process.returncode == 2
                assert not any(isinstance(one, m.Goodbye) for one in said)  # it would mean an orderly end
            log = (run_dir / "log").read_text()
            assert log.strip().splitlines()[-1].startswith("error: ")
            assert "Traceback" not in log
        finally:
            await hub.close()

    asyncio.run(scene())


def test_memory_stays_flat_over_hundreds_of_steps(run_dir: Path, make_samples: MakeSamples) -> None:
    import psutil

    training = Training(process_spec(run_dir))
    training.open()
    process, sizes = psutil.Process(), []
    for step in range(1, 202):
        samples = make_samples([4, 4, 4], version=step - 1, seed=step)
        training.run(training.prepare(samples, step))
        if step % 100 == 1:
            training.publish()
            sizes.append(process.memory_info().rss)
    assert sizes[2] - sizes[1] < 4 << 20
