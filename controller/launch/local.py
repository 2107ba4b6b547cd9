"""Spawns the processes of a run on this machine.

Owns: how a process is spawned here, its environment, its end. Refuses: everything that holds wherever processes are
(launcher.py).
Children get a session of their own, so that Ctrl-C in the terminal reaches the controller alone, and they die with it:
each asks the kernel for that at start (areal_like.process.die_with_parent).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from areal_like.ports import quiet_port
from areal_like.shadow import USER_PATH
from controller.launch.launcher import Launcher, Say, Spawned


def child_environment(num_threads: int, *, user_path: Path) -> dict[str, str]:
    """Environment of a child: our installation first on its path, the user's folder last, and one thread budget."""
    import areal_like

    installation = Path(areal_like.__file__).resolve().parent.parent
    environment = dict(os.environ)
    inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(installation), *inherited]))
    environment[USER_PATH] = str(user_path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        environment[key] = str(num_threads)
    # Threads that wait for a sibling must not spin for long: with one busy neighbour on two cores a step took 25 times
    # as long with the default, and no longer than usual with this.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    return environment


class LocalProcess:
    """A child of this process, in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode

    @property
    def cpu_s(self) -> float | None:
        """Processor time it has spent."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

    @property
    def awaited(self) -> str:
        """Nothing: it was started at once."""
        return ""

    def terminate(self) -> None:
        """SIGTERM to it alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it, if it lives, and to whatever it started in its own session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Until it has ended."""
        await self._process.wait()


class LocalLauncher(Launcher):
    """Processes of one run on this machine, by name. Must be used from the main thread's event loop.

    (The kernel's parent-death signal is bound to the thread that forked.)
    """

    def __init__(self, log_dir: Path, host: str = "127.0.0.1") -> None:
        super().__init__(log_dir)
        self._host = host

    @property
    def host(self) -> str:
        """As it was told."""
        return self._host

    async def open(self, say: Say) -> bool:
        """Nothing is needed."""
        return True

    async def close(self) -> None:
        """Nothing to give back."""

    async def address_for(self, name: str) -> str:
        """A quiet port of this machine's loopback: all processes are here."""
        return f"tcp://127.0.0.1:{quiet_port()}"

    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
        log: IO[bytes] = self.log_of(name).open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # never the current folder first: a user's trainer.py must not become our trainer
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            log.close()
        return LocalProcess(process)
