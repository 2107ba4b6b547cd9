"""A fork server that is started before the run is known.

It imports torch and transformers on one core, while the controller imports its own modules, reads the configuration and
checks the machine on another. forked.Forker takes it over; where the run does not fork its processes it is ended, and
otherwise the kernel ends it with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from controller.launch.environments import child_environment
from controller.wiring.preload import PRELOAD

SHARED = "AREAL_LIKE_FORKSERVER"
"""Environment variable: address of a fork server that is shared by many runs (for a series of short ones)."""
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files of machines with GPUs, whose processes are not forked."""
_started: EarlyServer | None = None


@dataclass
class EarlyServer:
    """A server that nobody uses yet. Its output is kept until it is known where it belongs."""

    connection: socket.socket
    _process: subprocess.Popen[bytes]
    _output: BinaryIO

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until it has exited, and return its status."""
        return await asyncio.to_thread(self._process.wait)

    def write_output(self, log_path: Path) -> None:
        """Append what it has printed to a file."""
        with contextlib.suppress(OSError, ValueError):
            self._output.seek(0)
            if printed := self._output.read():
                with log_path.open("ab") as file:
                    file.write(printed)
            self._output.close()


def server_arguments(preload: Sequence[str]) -> list[str]:
    """Arguments of Python for a fork server of this process that imports these modules."""
    return ["-m", "areal_like.forkserver", "--starter", str(os.getpid()), *preload]


def start() -> None:
    """Start the server, if a run on this machine may use it; without it a run starts its own."""
    global _started
    if _started is not None or not _may_help():
        return
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115, closed by write_output or discard
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *server_arguments(PRELOAD)],
            env=child_environment(1, user_path=Path.cwd()),
            stdin=theirs.fileno(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except OSError:
        ours.close()
        output.close()
        return
    finally:
        theirs.close()
    _started = EarlyServer(ours, process, output)


def take(preload: Sequence[str]) -> EarlyServer | None:
    """Return the server that was started, if it imports these modules; it is then the caller's."""
    global _started
    if _started is None or tuple(preload) != PRELOAD:
        return None
    found, _started = _started, None
    return found


def discard() -> None:
    """End the server, if nobody has taken it."""
    if (found := take(PRELOAD)) is not None:
        found.connection.close()
        found.kill()
        found._process.wait()
        found._output.close()


def _may_help() -> bool:
    is_forking = sys.platform == "linux" and not any(path.exists() for path in GPUS)
    return is_forking and SHARED not in os.environ and (os.cpu_count() or 1) > 1
