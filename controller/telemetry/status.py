"""status.json: the current state of a run for other terminals, replaced atomically about once a second.

The facts are collected in runtime/monitor.py; an outdated file is interpreted in run_folder/owner_host.py.

It is written while the starting model is prepared, during the run, and at every kind of end; after a kill the last one
remains. A file that cannot be written never ends a run: a warning is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

from areal_like.metrics import encode

log = logging.getLogger(__name__)

FORMAT = 1
EVERY_S = 1.0

Phase = Literal["preparing", "running", "finished", "stopped", "failed"]


class StatusFile:
    """One run's status.json."""

    def __init__(self, path: Path, *, run: str, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Values of an earlier session are kept until this one replaces them."""
        self._path, self._clock = path, clock
        self._started_s, self._written_s = clock(), -EVERY_S
        self._is_broken = False
        self._facts: dict[str, Any] = {
            "format": FORMAT, "time_s": 0.0, "run": run, "status": "preparing", "host": socket.gethostname(),
            "pid": os.getpid(), "step": 0, "num_steps": num_steps, "version": 0, "elapsed_s": 0.0, "eta_s": None,
            "waits": [], "counts": {}, "processes": {}, "last_step": None, "accuracy": {}, "preparing": "",
            **_kept(path),
        }  # fmt: skip

    def is_due(self) -> bool:
        """Return whether the last write is EVERY_S old."""
        return self._clock() - self._written_s >= EVERY_S

    def write(self, status: Phase, **facts: Any) -> None:
        """Replace the file; facts not given are kept."""
        self._written_s = self._clock()
        self._facts |= {
            "status": status,
            "time_s": time.time(),
            "elapsed_s": self._written_s - self._started_s,
            **facts,
        }
        fresh = self._path.with_suffix(".json.tmp")
        try:
            fresh.write_bytes(encode(self._facts))
            fresh.replace(self._path)
        except OSError as error:
            if not self._is_broken:
                log.warning("%s cannot be written: %s", self._path, error)
            self._is_broken = True

    def end(self, status: Phase) -> None:
        """Record the end of the run: no waits, and no running processes."""
        processes = {name: {**one, "state": "ended"} for name, one in self._facts["processes"].items()}
        self.write(status, waits=[], processes=processes, eta_s=None)

    @contextlib.asynccontextmanager
    async def preparing(self, words: Callable[[], str], processes: Callable[[], dict[str, Any]]) -> AsyncIterator[None]:
        """Context manager: write the latest progress once a second while the starting model is prepared."""

        async def follow() -> None:
            while True:
                self.write("preparing", preparing=words(), processes=processes())
                await asyncio.sleep(EVERY_S)

        follower = asyncio.create_task(follow(), name="status.json")
        try:
            yield
        finally:
            follower.cancel()
            self._facts |= {"processes": {}, "preparing": ""}


def _kept(path: Path) -> dict[str, Any]:
    """Progress of an earlier session, from its last status.json."""
    try:
        found = json.loads(path.read_text())
        return {key: found[key] for key in ("step", "version", "counts", "last_step", "accuracy") if key in found}
    except (OSError, ValueError, TypeError):
        return {}
