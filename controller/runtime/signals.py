"""Handling of SIGINT and SIGTERM of a job.

The meaning of a stop is defined in server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Signals(contextlib.AbstractContextManager["Signals"]):
    """Converts SIGINT and SIGTERM to calls: during preparation they end it, later they are passed to the server."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._handle: Callable[[str], None] | None = None
        self.say: Callable[[str], None] = lambda text: None
        """Shows the user that a signal has come; during preparation its end may take seconds."""

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number.name)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _on_signal(self, name: str) -> None:
        if self._handle is None:
            if not self._asked.is_set():
                self.say(f"{name}: stopping")
            self._asked.set()
        else:
            self._handle(name)

    def hand_to(self, handle: Callable[[str], None]) -> None:
        """Pass signals to `handle(name)` from now on, including one received just before."""
        self._handle = handle
        if self._asked.is_set():
            handle("a signal")

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None if a signal arrived first (the work is cancelled)."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        finally:
            asked.cancel()
