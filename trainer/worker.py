"""The trainer process: requests batches, trains on them in order, publishes every version, saves and exits.

It handles the communication with the controller and all waiting. The policy is in training.py. Staleness and replay are
decided by the controller: batches are trained on in the order of their steps.

Map of the loops, all in one TaskGroup on one event loop:
  _train      the steps, in order. Waits for the requested batch (woken by _listen and by packing; at most
              max_batch_wait_s), and for the compute thread. Ends when the run does, and ends the others.
  _listen     messages of the hub into fields of this object; raises if the hub is silent for controller_silence_s.
  _watch      wakes _train when the process is asked to stop.
  _write_out  one task per version: writes the copy of it that _train made, then announces it. The next version's copy
              waits for it, and so does the report of a saved checkpoint: versions are announced in order.
  (rewrite)   one task per version whose files were found damaged: waits for a running write, writes the copy again.
  (saving)    one task per checkpoint: writes the copy that _train made, and reports it. _train waits for the last one
              only.
  (sender)    if weights are streamed: serves them to the workers.
After the last step it runs until asked to end, because workers may still need the last version, possibly rewritten.
There are three threads in addition to the loop: one computes (torch), one packs, one writes checkpoints. A batch is
requested when the previous step starts, and packed while that step computes: a prefetch of exactly one, so at most two
batches are in memory. In `mode: sync` the controller does not send it earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from areal_like.config import ProcessSpec
from areal_like.errors import ChannelError, DeadlineExceeded, WeightError
from areal_like.trace import Tracer
from areal_like.transport.channel import Peer
from areal_like.wire.messages import (
    Batch,
    BatchRequest,
    Hello,
    Message,
    NoMoreBatches,
    RewriteVersion,
    SaveCheckpoint,
    Shutdown,
    VersionPublished,
    VersionRewritten,
    Welcome,
)
from trainer.activity import Activity
from trainer.data.batch import PreparedBatch
from trainer.emulated import EmulatedTraining
from trainer.follower import Follower
from trainer.ranks import leave_at_once
from trainer.saving import Link, Saving
from trainer.training import Training
from trainer.weights.choice import sender_of
from trainer.weights.port import Sender
from trainer.weights.version_writer import Written

log = logging.getLogger(__name__)

ACCEPT: frozenset[type] = frozenset({Batch, NoMoreBatches, RewriteVersion, SaveCheckpoint})
CONNECT_S = 30.0
POLL_S = 0.5
"""Longest sleep of a wait, which bounds the delay in detecting a silent hub or a missed deadline."""

Result = TypeVar("Result")


class TrainerWorker:
    """Drives one Training over one Link until the run ends, the process is asked to stop, or an error occurs."""

    def __init__(
        self,
        spec: ProcessSpec,
        training: Training,
        link: Link,
        stop: asyncio.Event,
        activity: Activity,
        sender: Sender | None = None,
    ) -> None:
        """`sender`: serves the versions to the workers; None: they read them from the weight store."""
        self._sender = sender
        self._writing: asyncio.Task[None] | None = None
        """Writes and announces the newest version."""
        self._store_turn = asyncio.Lock()
        """Held while a version is written: there is one writer at a time."""
        self._spec, self._training, self._link, self._stop, self._activity = spec, training, link, stop, activity
        self._compute_thread = ThreadPoolExecutor(1, "compute")
        self._packing_thread = ThreadPoolExecutor(1, "packing")
        self._news = asyncio.Event()
        self._requested = 0
        """Step of the newest requested batch."""
        self._packing: tuple[int, asyncio.Future[PreparedBatch]] | None = None
        """Step and packed form of the batch that was received for it."""
        self._samples: dict[int, tuple[tuple[int, int], ...]] = {}
        """Group and index of the samples of a batch that is not trained on yet, by step."""
        self._published: VersionPublished | None = None
        self._last_step: int | None = None
        self._saving = Saving(training, link, activity, self._compute, self._news)
        self._end_reason = ""

    async def run(self) -> str:
        """Train until the end; returns why it ended. Raises OperationError or UserError."""
        try:
            async with asyncio.TaskGroup() as self._group:
                helpers = [self._group.create_task(loop()) for loop in (self._listen, self._watch)]
                if self._sender is not None:
                    await self._sender.start()
                    helpers.append(self._group.create_task(self._sender.run()))
                await self._train()
                await self._serve_until_stopped()
                for helper in helpers:
                    helper.cancel()
        finally:
            for thread in (self._compute_thread, self._packing_thread):
                thread.shutdown(wait=False)
            self._saving.close()
            if self._sender is not None:
                await self._sender.close()
        return self._end_reason

    async def _serve_until_stopped(self) -> None:
        """Run until asked to end, or until _listen finds the hub silent: workers may still need the last version."""
        with self._activity.state("serve"):
            await self._stop.wait()

    # ------------------------------------------------------------ the steps

    async def _train(self) -> None:
        with self._activity.state("load"):
            await self._compute(self._training.open)
        await self._publish({}, note=self._training.setup_description)
        await self._all_announced()
        await self._request(self._training.version + 1)
        while (prepared := await self._next_batch()) is not None:
            await self._request(prepared.step + 1)
            with self._activity.state("forward_backward", step=prepared.step):
                metrics = await self._compute(self._training.run, prepared)
                self._activity.arrive(self._samples.pop(prepared.step, ()))
            del prepared
            await self._publish(metrics)
            self._saving.look()
            await self._saving.start_if_free(self._group, self._writing)
        await self._finish()

    async def _next_batch(self) -> PreparedBatch | None:
        """Return the packed batch of the next step; None if there is no next step. Raises DeadlineExceeded."""
        step = self._training.version + 1
        limit_s = self._training.settings.max_batch_wait_s
        with self._activity.state("wait:batch", step=step):
            due_s = time.monotonic() + limit_s
            while not self._is_over():
                if self._packing is not None and self._packing[0] == step and self._packing[1].done():
                    prepared, self._packing = self._packing[1].result(), None
                    return prepared
                await self._saving.start_if_free(self._group, self._writing)
                if self._packing is None and time.monotonic() > due_s:
                    raise DeadlineExceeded(f"the batch of step {step}", "the controller", limit_s)
                await self._wait_for_news()
        return None

    async def _wait_for_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):  # wait_for of Python 3.11 can swallow a cancellation
                await self._news.wait()
        self._news.clear()

    def _is_over(self) -> bool:
        """True if no further step is to run; the reason is in `_end_reason`."""
        if self._stop.is_set():
            self._end_reason = self._end_reason or "asked to stop"
            return True
        return self._last_step is not None and self._training.version >= self._last_step

    async def _finish(self) -> None:
        """Save a checkpoint; after the last step also export the policy as a Hugging Face folder."""
        await self._saving.last(self._group, self._writing)
        if self._last_step is not None and self._training.version >= self._last_step:
            with self._activity.state("export"):
                await self._compute(self._training.export)
        await self._all_announced()
        await self._saving.tell()

    async def _publish(self, metrics: dict[str, float], note: str = "") -> None:
        """Copy the version; it is written and announced while the next step computes."""
        await self._all_announced()
        started_s = time.perf_counter()
        with self._activity.state("publish", version=self._training.version):
            write = await self._compute(self._training.publish)
        if metrics:
            metrics["publish_s"] = time.perf_counter() - started_s
        self._writing = self._group.create_task(self._write_out(self._training.version, write, metrics, note))

    async def _write_out(
        self, version: int, write: Callable[[], Written], metrics: dict[str, float], note: str
    ) -> None:
        started_s = time.perf_counter()
        async with self._store_turn:
            written = await asyncio.to_thread(write)
            place = await self._publish_location(written, version)
        if metrics:
            metrics |= {"publish_bytes": float(written.num_bytes), "publish_write_s": time.perf_counter() - started_s}
        self._published = VersionPublished(
            version=version, lineage=self._spec.lineage, manifest_path=place,
            metrics=metrics, note=note,
        )  # fmt: skip
        await self._link.send(self._published)

    async def _publish_location(self, written: Written, version: int) -> str:
        """Return the location for the announcement of a version that was just written."""
        if self._sender is None:
            return str(written.path)
        return await self._sender.publish(written.path, version, self._spec.lineage)

    async def _write_again(self, wanted: RewriteVersion) -> None:
        """Write a version again whose files are damaged. If it was superseded meanwhile, workers load its successor."""
        await self._all_announced()
        place, reason = "", ""
        async with self._store_turn:
            try:
                written = None
                if wanted.lineage == self._spec.lineage:
                    written = await asyncio.to_thread(self._training.publish_again, wanted.version)
                if written is None:
                    reason = "a newer version has replaced it"
                else:
                    if self._sender is not None:
                        self._sender.rewritten(wanted.version, wanted.lineage)
                    place = await self._publish_location(written, wanted.version)
            except WeightError as error:
                reason = str(error)
        if reason:
            log.warning("the damaged weights of version %d were not written again: %s", wanted.version, reason)
        else:
            log.warning("the damaged weights of version %d have been written again (%s)", wanted.version, place)
        if place and self._published is not None and self._published.version == wanted.version:
            self._published = msgspec.structs.replace(self._published, manifest_path=place)
        await self._link.send(
            VersionRewritten(version=wanted.version, lineage=wanted.lineage, manifest_path=place, reason=reason)
        )

    async def _all_announced(self) -> None:
        """Wait until every version copied so far is written and announced; a failure ends the group and this task."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _request(self, step: int) -> None:
        self._requested = step
        await self._link.send(BatchRequest(step=step))

    async def _compute(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compute_thread, work, *args)

    # ------------------------------------------------------------ messages

    async def _listen(self) -> None:
        while True:
            message = await self._link.receive(POLL_S)
            if message is not None:
                await self._take(message)
                self._news.set()
            elif self._link.hub_silence_s > self._spec.controller_silence_s:
                raise ChannelError(
                    f"the controller has been silent for more than {self._spec.controller_silence_s:g} s"
                )

    async def _take(self, message: Message) -> None:
        match message:
            case Batch():
                self._take_batch(message)
            case NoMoreBatches():
                log.info("step %d is the last step of the run: %s", message.last_step, message.reason)
                self._last_step, self._end_reason = message.last_step, message.reason
            case RewriteVersion():
                self._group.create_task(self._write_again(message), name=f"rewrite:{message.version}")
            case SaveCheckpoint():
                self._saving.ask(message.reason or "asked for")
            case Shutdown():
                log.info("the controller requested an exit within %g s: %s", message.deadline_s, message.reason)
                self._end_reason = self._end_reason or message.reason
                self._stop.set()
            case Welcome():
                await self._report_again()
            case _:
                log.warning("ignored a %s", type(message).__name__)

    def _take_batch(self, batch: Batch) -> None:
        """Pack the batch if it is the requested one; refuse any other, which is repeated or out of order."""
        is_repeated = self._packing is not None and self._packing[0] == batch.step
        is_stray = batch.lineage != self._spec.lineage
        if batch.step != self._requested or is_repeated or is_stray:
            self._activity.num_refused += 1
            why = (
                f"lineage {batch.lineage}" if is_stray else "repeated" if batch.step <= self._requested else "too early"
            )
            log.error(
                "rejected the batch of step %d (%s); the last request was for step %d of lineage %s",
                batch.step, why, self._requested, self._spec.lineage,
            )  # fmt: skip
            return
        future = asyncio.get_running_loop().run_in_executor(self._packing_thread, self._pack, batch)
        future.add_done_callback(lambda _: self._news.set())
        self._packing = (batch.step, future)
        self._samples[batch.step] = tuple((sample.group_id, sample.sample_index) for sample in batch.samples)

    def _pack(self, batch: Batch) -> PreparedBatch:
        with self._activity.span("packing", "packing", step=batch.step, samples=len(batch.samples)):
            return self._training.prepare(batch.samples, batch.step, batch.position)

    async def _report_again(self) -> None:
        """Repeat what the hub must know after it lost its state."""
        log.warning("the controller registered the trainer again; repeating the last reports")
        if self._published is not None:
            await self._link.send(self._published)
        if self._requested and (self._packing is None or self._packing[0] != self._requested):
            await self._link.send(BatchRequest(step=self._requested))

    async def _watch(self) -> None:
        await self._stop.wait()
        self._news.set()


async def serve(spec: ProcessSpec, stop: asyncio.Event) -> None:
    """Run a trainer process with the given spec until it exits."""
    torch.set_num_threads(spec.num_threads)
    tracer = Tracer.of(spec.run_dir, spec.name, spec.trace)
    activity = Activity(tracer)
    training = Training(spec, activity) if spec.emulation is None else EmulatedTraining(spec, activity)
    try:
        if spec.rank:
            await asyncio.get_running_loop().run_in_executor(
                ThreadPoolExecutor(1, "compute"), Follower(training, activity).run
            )
        else:
            await _lead(spec, stop, training, activity)
    except BaseException as error:
        if training.ranks.has_group:
            leave_at_once(error)
        raise
    finally:
        tracer.close()


async def _lead(spec: ProcessSpec, stop: asyncio.Event, training: Training, activity: Activity) -> None:
    """Run rank 0, or the only rank."""
    sender = sender_of(spec, training.settings)
    peer = Peer(
        address=spec.hub_address,
        hello=Hello(
            role="trainer", name=spec.name, pid=os.getpid(), run_id=spec.run_id, incarnation=secrets.token_hex(8)
        ),
        curve_dir=Path(spec.curve_dir),
        audience="controller",
        accept=ACCEPT,
        heartbeat_s=spec.heartbeat_s,
        silence_s=spec.controller_silence_s,
        status=lambda: activity.heartbeat({**training.counters, **(sender.counters if sender else {})}),
    )
    await peer.connect(CONNECT_S)
    reason = await TrainerWorker(spec, training, peer, stop, activity, sender).run()
    await peer.close(reason)  # not after a failure: a Goodbye means a normal exit
    await asyncio.to_thread(training.close)  # last: the other ranks must not exit before the Goodbye
