"""Checkpoints during training: when one is taken, writing it in parallel with the next step, and reporting it.

What a checkpoint contains is defined in training.py and checkpoints/checkpoint.py.

There is one write at a time. If a checkpoint is due or requested while another is being written, it is postponed until
that one is complete; several such requests become one checkpoint of the newest version. Training never waits for a
disk, except for the last checkpoint. If writing fails, the failure is reported and counted and training continues: the
previous checkpoint is unchanged, and the next one that is due is another attempt. The last one must succeed; otherwise
the trainer ends with an error message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from areal_like.errors import OperationError, UserError
from areal_like.wire.messages import CheckpointFailed, CheckpointSaved, Message
from trainer.activity import Activity
from trainer.checkpoints.checkpoint import manifest_digest
from trainer.peer_errors import RankLost
from trainer.training import Saved, Training

log = logging.getLogger(__name__)


class Link(Protocol):
    """The part of areal_like.transport.channel.Peer that the trainer uses."""

    @property
    def hub_silence_s(self) -> float: ...

    async def receive(self, timeout_s: float) -> Message | None: ...

    async def send(self, message: Message, timeout_s: float = 30.0) -> None: ...


class Saving:
    """Takes checkpoints. Call `look` after every step, `start_if_free` often, `last` at the end, all on the event loop.

    compute: runs a function on the compute thread. news: set when a write has ended and was reported.
    """

    def __init__(
        self,
        training: Training,
        link: Link,
        activity: Activity,
        compute: Callable[..., Awaitable[Any]],
        news: asyncio.Event,
    ) -> None:
        self._training, self._link, self._activity = training, link, activity
        self._compute, self._news = compute, news
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._reason = ""
        """Why a checkpoint is to be taken as soon as possible; empty: none is to be taken."""
        self._writing: asyncio.Task[None] | None = None
        self._reported: CheckpointSaved | None = None
        self._copied_s = time.monotonic()
        """Time when the newest one was taken."""

    def ask(self, reason: str) -> None:
        """Request a checkpoint; answered by CheckpointSaved or CheckpointFailed."""
        self._reason = reason

    def look(self) -> None:
        """Check after a step whether a checkpoint is due, by steps or by time."""
        settings, version = self._training.settings.checkpoint, self._training.version
        is_due = bool(settings.every_steps) and version % settings.every_steps == 0
        if not is_due and settings.every_s is not None:
            is_due = time.monotonic() - self._copied_s >= settings.every_s
        if is_due and not self._reason:
            self._reason = "due"
            self._activity.num_put_off_checkpoints += self._is_writing()

    async def start_if_free(self, group: asyncio.TaskGroup, announced: asyncio.Task[None] | None) -> None:
        """Take the checkpoint that is due, unless one is being written. announced: reports the current version."""
        if not self._reason or self._is_writing():
            return
        reason, self._reason = self._reason, ""
        if self._training.is_saved:
            await self.tell()
        else:
            await self._start(group, announced, reason)

    async def last(self, group: asyncio.TaskGroup, announced: asyncio.Task[None] | None) -> None:
        """Wait until the current version has a checkpoint. Raises UserError through `group` if it cannot be written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if not self._training.is_saved:
            await asyncio.wait([await self._start(group, announced, "the end", is_last=True)])
        await asyncio.sleep(0)  # if it failed, the group cancels this task here

    async def tell(self) -> None:
        """Report that the current version is saved."""
        folder, version = self._training.saved, self._training.version
        if self._reported is None or self._reported.version != version:
            digest = "" if folder is None else manifest_digest(folder)
            self._reported = CheckpointSaved(version=version, path=str(folder), digest=digest)
        await self._link.send(self._reported)

    def close(self) -> None:
        """End the writing thread; no more checkpoints can be taken."""
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ inside

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _start(
        self, group: asyncio.TaskGroup, announced: asyncio.Task[None] | None, reason: str, *, is_last: bool = False
    ) -> asyncio.Task[None]:
        version, started_s = self._training.version, time.perf_counter()
        with self._activity.state("checkpoint", version=version):
            write = await self._compute(self._training.save)
        self._copied_s = time.monotonic()
        stall_s = time.perf_counter() - started_s
        work = self._write(version, reason, write, stall_s, announced, is_last=is_last)
        self._writing = group.create_task(work)
        self._writing.add_done_callback(lambda _: self._news.set())  # not earlier: the next one waits for its end
        return self._writing

    async def _write(
        self,
        version: int,
        reason: str,
        write: Callable[[], Saved],
        stall_s: float,
        announced: asyncio.Task[None] | None,
        *,
        is_last: bool,
    ) -> None:
        try:
            saved = await asyncio.get_running_loop().run_in_executor(self._thread, self._traced, version, write)
        except RankLost:
            raise
        except (OperationError, UserError) as error:  # writing failed: previous checkpoints are unchanged
            if is_last:
                remedy = "correct the cause, such as a full disk, then continue with areal-like resume"
                raise UserError(f"the last checkpoint could not be written: {error}", remedy=remedy) from error
            self._activity.num_failed_checkpoints += 1
            log.warning("no checkpoint of version %d was written: %s", version, error)
            await self._link.send(CheckpointFailed(version=version, reason=str(error)))
            return
        self._activity.num_checkpoints += 1
        log.info("saved the checkpoint of version %d (%s) to %s", version, reason, saved.folder)
        if announced is not None:
            await asyncio.wait([announced])  # versions and checkpoints are reported in order
        self._reported = CheckpointSaved(
            version=version, path=str(saved.folder), stall_s=stall_s, write_s=saved.write_s, num_bytes=saved.num_bytes,
            digest=manifest_digest(saved.folder),
        )  # fmt: skip
        if not is_last:  # the last one is reported after the export
            await self._link.send(self._reported)

    def _traced(self, version: int, write: Callable[[], Saved]) -> Saved:
        with self._activity.span("write_checkpoint", "checkpoint", version=version):
            return write()
