"""Runs and ends guarded commands (guard.py) from the process that started them.

A guard must not be killed while its command runs: SIGKILL ends the guard and the command, but processes that the
command started in other sessions continue, and nothing tracks them any more. `end_guarded` makes the guard end all of
them.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.guard import END, SWEEP_S, guarded

MARGIN_S = 2.0
"""Time of the guard in addition to the time in which it kills the descendants."""


def end_guarded(process: subprocess.Popen[Any]) -> None:
    """End a guarded command with all its descendants, and wait for it. Does nothing if it has exited."""
    process.send_signal(END)
    try:
        process.wait(SWEEP_S + MARGIN_S)
    except subprocess.TimeoutExpired:  # the kernel blocks a process of the tree, so it cannot be killed
        process.kill()
        process.wait()


async def end_guarded_child(process: asyncio.subprocess.Process) -> None:
    """As `end_guarded`, for a process that asyncio started."""
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
    """Run a command without standard input and capture its output; none of its descendants is left afterwards.

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
