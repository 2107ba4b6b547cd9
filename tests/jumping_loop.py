"""An event loop on which time passes only while everything waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting: where nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            found = select(0)
            self.now_s += 0.0 if found else (timeout or 0.0)
            return found

        selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now_s


def run(play: Coroutine[Any, Any, Any]) -> Any:
    """What `play` returns, on such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(asyncio.wait_for(play, 1e6))
