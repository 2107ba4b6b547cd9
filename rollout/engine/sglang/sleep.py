"""Releases a server's GPU memory while there is nothing to generate, and allocates it again when there is.

It decides when, and ensures that no request is sent to a server without its memory. Pauses for versions are in
engine.py; they share the engine's lock with this module.

One task waits for `release_idle_s` without a request, then for the engine's lock, and closes the gate. A request
(`wanted`) wakes it, and a load (`wake`, with the same lock) allocates the memory itself. If a server exits without its
memory, the new server has its memory.
"""

from __future__ import annotations

import asyncio
import logging

from areal_like.errors import EngineError
from rollout.config import SGLangSettings
from rollout.engine.server.attempts import Attempts
from rollout.engine.server.http import ServerGone, ServerRefused, ServerSilent
from rollout.engine.server.keeper import ServerKeeper
from rollout.engine.sglang.client import SGLangClient

log = logging.getLogger(__name__)

ALL = ("kv_cache", "weights")


class Sleeper:
    """Releases the memory of one engine. `lock`: the lock of its loads and pauses."""

    def __init__(
        self,
        keeper: ServerKeeper[SGLangClient],
        attempts: Attempts[SGLangClient],
        lock: asyncio.Lock,
        *,
        idle_s: float,
        tags: tuple[str, ...],
    ) -> None:
        self._keeper, self._attempts, self._lock = keeper, attempts, lock
        self._idle_s, self._tags = idle_s, tags
        self._epoch: int | None = None
        """Epoch of the server without memory."""
        self._wanted = asyncio.Event()
        self.num_sleeps = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._attempts.on_request = self.wanted
        self._task = asyncio.create_task(self.run(), name="sglang-sleeper")

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    def wanted(self) -> None:
        """Record that a request has arrived."""
        self._wanted.set()

    async def run(self) -> None:
        """Run until cancelled by the engine, or until there is no server any more. Woken by the clock, then by a
        request."""
        try:
            while True:
                self._wanted.clear()
                if await self._is_wanted_within(self._idle_s) or not await self._fell_asleep():
                    continue
                await self._wanted.wait()
                async with self._lock:
                    if await self.wake():
                        self._attempts.gate.set()
        except EngineError:
            self._attempts.gate.set()  # requests that pass it get the error from the keeper

    async def _is_wanted_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True

    async def _fell_asleep(self) -> bool:
        """Release the memory; returns whether it was released. Raises EngineError if there is no server any more."""
        async with self._lock:
            live = self._keeper.live
            if live is None or self._attempts.num_open or not self._attempts.gate.is_set():
                return False
            self._attempts.gate.clear()
            try:
                await live.client.release_memory(self._tags)
            except ServerSilent as error:
                await self._keeper.replace(
                    live.epoch, f"the server does not release its memory ({error})", is_forgiven=False
                )
            except ServerGone as error:
                await self._keeper.settle(live.epoch, str(error))
            except ServerRefused as error:  # e.g. a request that was just aborted is still there
                log.warning("the server did not release its memory: %s", error)
            else:
                self._epoch = live.epoch
                self.num_sleeps += 1
                log.info(
                    "no answer was generated for %g s; released the memory of %s",
                    self._idle_s,
                    " and ".join(self._tags),
                )
                return True
            self._attempts.gate.set()
            return False

    async def wake(self) -> bool:
        """Allocate the memory again if it was released, with the lock held. Returns whether it was released; the gate
        is not changed."""
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return False
        live = await self._keeper.ready()
        if live.epoch == epoch:
            try:
                await live.client.resume_memory(self._tags)
            except (ServerGone, ServerRefused) as error:
                await self._keeper.replace(epoch, f"the server did not allocate its memory again ({error})")
        self._wanted.set()
        return True


def start_sleeper(
    settings: SGLangSettings, keeper: ServerKeeper[SGLangClient], attempts: Attempts[SGLangClient], lock: asyncio.Lock
) -> Sleeper | None:
    """Start a sleeper if it is configured."""
    if settings.release_idle_s is None:
        return None
    tags = ALL if settings.release == "all" else ("kv_cache",)
    sleeper = Sleeper(keeper, attempts, lock, idle_s=settings.release_idle_s, tags=tags)
    sleeper.start()
    return sleeper
