"""Starts the processes of a run on this machine, directly or by forking.

The common part of all launchers is in launcher.py. Children get their own session, so that Ctrl-C in the terminal only
reaches the controller, and they are killed when it exits: each requests that from the kernel at its start
(areal_like.process.die_with_parent).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from areal_like.device_names import names_cpu
from areal_like.transport.ports import unused_port
from areal_like.transport.sockets import is_reachable
from controller.config.run_config import RunConfig
from controller.launch.environments import child_environment
from controller.launch.forked import Forker, ForkServerGone
from controller.launch.launcher import Launcher, Say, Spawned
from controller.launch.pids import LocalPid, start_python
from controller.run_folder.run_folder import RunFolder
from controller.wiring.preload import PRELOAD
from controller.wiring.process_specs import FORKED

log = logging.getLogger(__name__)


class LocalProcess(LocalPid):
    """A child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process.pid)
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> None:
        """Wait until it has exited."""
        await self._process.wait()


class LocalLauncher(Launcher):
    """Processes of one run on this machine, by name. Must be used from the main thread's event loop.

    (The kernel's parent-death signal is bound to the thread that forked.)
    """

    def __init__(
        self, log_dir: Path, host: str = "127.0.0.1", *, preload: Sequence[str] = (), forked: Collection[str] = ()
    ) -> None:
        """`forked`: modules whose processes are forked from a server that has imported `preload`, once it is open."""
        super().__init__(log_dir)
        self._host = host
        self._preload = preload
        self._forked = forked
        self.is_forking = bool(forked)
        self._forker: Forker | None = None

    @property
    def host(self) -> str:
        """The configured host."""
        return self._host

    async def open(self, say: Say) -> bool:
        """Start the fork server, if configured; nothing else is needed."""
        if self._forked:
            forker = Forker(self.log_of("forkserver"), self._preload, say)
            try:
                await forker.open(child_environment(1, user_path=self.user_path))
                self._forker = forker
            except (OSError, TimeoutError) as error:
                log.warning(
                    "the fork server could not be started (%s), so processes start more slowly: each process imports "
                    "its own modules",
                    error,
                )
        return True

    async def close(self) -> None:
        """End the fork server."""
        if self._forker is not None:
            await self._forker.close()

    async def address_for(self, name: str) -> str:
        """A free port of the configured host, or of loopback: all processes that it starts are on this machine."""
        host = self._host if _is_ipv4(self._host) and is_reachable(self._host) else "127.0.0.1"
        return f"tcp://{host}:{unused_port(host)}"

    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
        if self._forker is not None and argv[0] == "-m" and argv[1] in self._forked:
            try:
                return await self._forker.fork(argv[1], argv[2:], environment, self.log_of(name))
            except ForkServerGone as error:
                log.warning("starting %s without the fork server, which takes longer: %s", name, error)
        return LocalProcess(await start_python(argv, environment, self.log_of(name)))


def _is_ipv4(host: str) -> bool:
    """Whether it is an IPv4 address, and not the name of an interface, which the controller can bind too."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def make(config: RunConfig, folder: RunFolder) -> LocalLauncher:
    """Make the launcher of a run on this machine."""
    forked = FORKED if is_forking(config) else ()
    return LocalLauncher(folder.logs, config.launch.host, preload=PRELOAD, forked=forked)


def is_forking(config: RunConfig) -> bool:
    """Return whether workers and trainer are forked from one process that has imported torch and transformers."""
    if config.launch.start_method != "auto":
        return config.launch.start_method == "forkserver"
    return sys.platform == "linux" and all(
        names_cpu(device) for device in (*config.rollout_devices, *config.trainer_devices)
    )
