"""Child processes of a replay: started in the folder of the run, killed at the end, and their errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from areal_like.errors import OperationError, UserError
from areal_like.process import USER_MISTAKE, describe_status, last_error
from controller.launch.environments import child_environment


def start_child(
    words: Sequence[str], num_threads: int, home: Path, log: Path, stack: ExitStack, *, has_pipes: bool = False
) -> subprocess.Popen[bytes]:
    """Start `python -m WORDS`; closing `stack` kills it.

    home: the folder in which the run was started. log: file for its stderr. has_pipes: stdin and stdout are pipes.
    """
    pipe = subprocess.PIPE if has_pipes else subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *words],
        stdin=pipe, stdout=pipe, stderr=stack.enter_context(log.open("wb")), cwd=home,
        env=child_environment(num_threads, user_path=home),
    )  # fmt: skip
    stack.callback(_end, process)
    return process


def child_error(status: int, log: Path, title: str) -> UserError | OperationError:
    """The error of a child that ended with this status. title: its name in messages."""
    words = last_error(log.read_text(errors="replace"))
    if status == USER_MISTAKE and words:
        return UserError(words)
    return OperationError(words or f"{title} ended with {describe_status(status)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    process.wait()
