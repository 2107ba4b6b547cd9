"""The time that the program of an agent takes itself, which its time limit counts.

Its requests are answered by session.py, and the limit is applied by workflow.py.
"""

from __future__ import annotations

import asyncio
import contextlib


class ProgramTime:
    """All time since its creation but that in which a request is answered, in seconds of the event loop's clock.

    A request may wait for other samples, for new weights, or for the trainer on a shared device, which a time limit of
    the program must not count.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before_s, self._since_s = 0.0, self._loop.time()
        self._num_held = 0
        self._changed = asyncio.Event()

    @property
    def seconds(self) -> float:
        """The time until now."""
        return self._before_s + (0.0 if self._num_held else self._loop.time() - self._since_s)

    def hold(self) -> None:
        """A request begins."""
        self._before_s = self.seconds
        self._num_held += 1
        self._changed.set()

    def release(self) -> None:
        """A request has ended."""
        self._num_held -= 1
        self._since_s = self._loop.time()
        self._changed.set()

    async def taken(self, limit_s: float) -> None:
        """Wait until the program has taken this much more time."""
        end_s = self.seconds + limit_s
        while (left_s := end_s - self.seconds) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._num_held else left_s):
                    await self._changed.wait()
