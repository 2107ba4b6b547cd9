"""The service's end of one environment process: its messages, and its marker.

Start, exit and output of the process are in child_process.py, replacement of processes in pool.py, and episodes in
episode_scheduler.py.

Loop `run`: waits for a message, woken by the stream; ends with `Died` when the stream or the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import msgspec
import psutil

from areal_like.errors import UserError
from services.environment.job import (
    Act,
    Answered,
    Begin,
    Close,
    Failed,
    HostReady,
    HostRefusal,
    HostSetup,
    decode_for_service,
)
from services.environment.marker import Mark, Marker
from services.processes.child_process import LAST_WORDS_S, ChildProcess, Died, OutputLog
from services.processes.framing import frame


class HostProcess(ChildProcess):
    """One child that holds many episodes."""

    MODULE, NOUN = "services.environment.host", "environment process"
    marker: Marker

    def _prepared(self, marker: Marker) -> HostProcess:
        self.marker = marker
        self.episodes: set[int] = set()
        """Numbers of the episodes that it has."""
        self.waiting: set[int] = set()
        """Episodes for which a reply is due."""
        self.num_begun = 0
        self.is_retired = False
        """It accepts no further episodes."""
        self.makes_room = False
        """It is killed because too many processes are retired, whatever runs in it."""
        self.culprit = 0
        """The episode for which it is killed."""
        self.culprit_kind = "crashed"
        self.moved_s = time.monotonic()
        """Time of its last activity."""
        self._calls = 0
        self._call_cpu = (-1, 0.0)
        """A call, and the processor time of the process when it was first seen."""
        return self

    @staticmethod
    def start(output_log: OutputLog) -> HostProcess:
        """Start a process. Raises Died."""
        marker, fd = Marker.make()
        try:
            return HostProcess.spawn(output_log, ("--marker", str(fd)), (fd,))._prepared(marker)
        finally:
            os.close(fd)

    async def prepare(self, setup: HostSetup, timeout_s: float) -> None:
        """Send the setup and wait until the class is loaded. Raises UserError for a refusal, Died otherwise."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._raw)
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(frame(setup))
                answer = await self._receive()
        except TimeoutError:
            raise Died(f"loading the environment took longer than {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            raise await self._died(error) from error
        if isinstance(answer, HostRefusal):
            raise UserError(answer.sentence)
        if not isinstance(answer, HostReady):
            raise Died("the environment process sent an unexpected message while loading")

    def send(self, message: Begin | Act | Close) -> None:
        """Queue a message; `run` detects a process that has exited."""
        assert self._writer is not None, "prepare comes first"
        if isinstance(message, Begin):
            self.num_begun += 1
            self.episodes.add(message.episode)
        if isinstance(message, Close):
            self.episodes.discard(message.episode)
            self.waiting.discard(message.episode)
        else:
            if not self.waiting:
                self.moved_s = time.monotonic()
            self.waiting.add(message.episode)
        if not self._writer.is_closing():  # each write to a broken stream would log a line
            with contextlib.suppress(OSError):
                self._writer.write(frame(message))

    async def run(self, on_message: Callable[[Answered | Failed], None]) -> str:
        """Pass on its messages until it exits; returns the reason."""
        receiving = asyncio.create_task(self._receive_all(on_message))
        try:
            await asyncio.wait({receiving, self.died}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=LAST_WORDS_S)  # a reply may still be in the stream
            error = receiving.exception() if receiving.done() else None
            return await self._cause_of_death(error if isinstance(error, Exception) else None)
        finally:
            receiving.cancel()

    async def _receive_all(self, on_message: Callable[[Answered | Failed], None]) -> None:
        while True:
            message = await self._receive()
            if not isinstance(message, Answered | Failed):
                raise ValueError(f"unexpected {type(message).__name__}")
            self.moved_s = time.monotonic()
            self.waiting.discard(message.episode)
            if isinstance(message, Failed):
                self.episodes.discard(message.episode)
                self.is_retired = self.is_retired or message.is_left
            on_message(message)

    async def _receive(self) -> HostReady | HostRefusal | Answered | Failed:
        return decode_for_service(await self._receive_body())

    def look(self) -> Mark:
        """Read its marker, and record whether it changes."""
        mark = self.marker.look()
        if mark.calls != self._calls:
            self._calls, self.moved_s = mark.calls, time.monotonic()
        return mark

    def is_starved(self, mark: Mark, limit_s: float) -> bool:
        """Whether the call of `mark` could continue, but has had less processor time than `limit_s`, so that the
        machine is at fault.

        Call it at every check, from the beginning of the call on.
        """
        try:
            process = psutil.Process(self.pid)
            used_s = sum(process.cpu_times()[:2])
            if self._call_cpu[0] != mark.calls:
                self._call_cpu = (mark.calls, used_s)
            return process.status() == psutil.STATUS_RUNNING and used_s - self._call_cpu[1] < limit_s
        except psutil.Error:
            return False

    def close_marker(self) -> None:
        """Close the marker, after the process has exited."""
        self.marker.close()
