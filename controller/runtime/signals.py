"""SIGINT and SIGTERM of a job, in the order of its life.

Owns: the two handlers. Refuses: what a stop means (server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Signals(contextlib.AbstractContextManager["Signals"]):
    """SIGINT and SIGTERM as calls, in order of life: during preparation they end it, later the server decides."""

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
        """From now on signals go to `handle(name)`; one that came just before is handed over as well."""
        self._handle = handle
        if self._asked.is_set():
            handle("a signal")

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a signal came first (the work is cancelled)."""
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
