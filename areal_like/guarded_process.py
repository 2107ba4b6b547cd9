"""Running and ending a guarded command (guard.py) from the process that started it.

Owns: `run_guarded` (a command with a time limit), `end_guarded` and the same for asyncio. Refuses: what the guard
itself does.

A guard must not be killed while its command lives: SIGKILL ends the guard and the command, but what the command started
in sessions of its own goes on, with nobody left who knows of it. `end_guarded` has the guard end all of it.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.guard import END, SWEEP_S, guarded

MARGIN_S = 2.0
"""Time of the guard in addition to its sweep."""


def end_guarded(process: subprocess.Popen[Any]) -> None:
    """End a guarded command with everything that it started, and wait for it. Does nothing where it has ended."""
    process.send_signal(END)
    try:
        process.wait(SWEEP_S + MARGIN_S)
    except subprocess.TimeoutExpired:  # the kernel holds a process of the family: it cannot be killed either
        process.kill()
        process.wait()


async def end_guarded_child(process: asyncio.subprocess.Process) -> None:
    """As `end_guarded`, of a process that asyncio started."""
    if process.returncode is None:
        process.send_signal(END)
        try:
            await asyncio.wait_for(process.wait(), SWEEP_S + MARGIN_S)
        except TimeoutError:  # as above
            process.kill()
            await process.wait()


def run_guarded(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without standard input and capture its text; nothing it started is left afterwards.

    Raises subprocess.TimeoutExpired, OSError.
    """
    with subprocess.Popen(
        guarded(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            end_guarded(process)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
