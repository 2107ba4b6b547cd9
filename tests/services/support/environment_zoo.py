"""Environments that behave and misbehave, as the row's `mode` says; run in environment processes by the tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

kept = []


class Counter:
    """Counts its actions: the observation is `seed:number:action`, done at `most`."""

    def __init__(self, most=3):
        self.most, self.number, self.seed, self.mode = most, 0, 0, ""

    def reset(self, row, seed):
        self.mode, self.seed = row.get("mode", ""), seed
        if self.mode == "hang_at_reset":
            time.sleep(600)
        return f"begin {seed}"

    def step(self, action):
        self.number += 1
        misbehave = getattr(self, f"_{self.mode}", None)
        if misbehave is not None and self.number >= 2:
            return misbehave()
        return f"{self.seed}:{self.number}:{action}", float(self.number), self.number >= self.most

    def _hang(self):
        time.sleep(600)

    def _raise(self):
        raise LookupError("the board is gone")

    def _leave(self):
        raise SystemExit(0)

    def _die(self):
        os._exit(7)

    def _flood(self):
        return "x" * (1 << 20), 0.0, False

    def _print(self):
        sys.stdout.write("y" * (1 << 20))
        return "printed", 0.0, False

    def _lie(self):
        return "over", 1.0, "yes"

    def _nan(self):
        return "over", float("nan"), True

    def _files(self):
        kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(100))
        return "opened", 0.0, False

    def _memory(self):
        kept.append(b"z" * (64 << 20))
        return "grown", 0.0, False

    def _random(self):
        return f"{time.monotonic_ns()}", 0.0, False

    def _child(self):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return str(child.pid), 0.0, False

    def _pid(self):
        return str(os.getpid()), 0.0, False


class Slow:
    """Waits, as one that asks a server does."""

    async def reset(self, row, seed):
        self.mode = row.get("mode", "")
        await asyncio.sleep(0)
        return "begin"

    async def step(self, action):
        await asyncio.sleep(0)
        if self.mode == "wait":
            await asyncio.sleep(600)
        if self.mode == "swallow":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(600)
        if self.mode == "block":
            time.sleep(600)  # noqa: ASYNC251
        if self.mode == "leave":
            raise SystemExit(0)
        return action.upper(), 1.0, False


class NoStep:
    def reset(self, row, seed):
        return None


class OtherStep(NoStep):
    def step(self, action, tools):
        return "", 0.0, True


_counted: list[None] = []


def count() -> int:
    """How often this was called in its process."""
    _counted.append(None)
    return len(_counted)


def leave() -> None:
    """Ends the process."""
    os._exit(3)


TOOLS = [count, leave]
