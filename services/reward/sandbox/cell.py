"""One sandbox for one program: starts its first process, sends it commands, and kills it.

Limits and waits of a run are in run.py.

A cell is used for one program and then destroyed. If its first process is process 1 of a namespace, the kernel kills
all processes in the cell with it; otherwise the process tree is stopped and killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from services.reward.sandbox.launch import ENVIRONMENT, Setup, file_of
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.usage import Usage, children_of, tree_of, usage_below

MAX_REPLY_BYTES = 64
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 30.0
"""Time limits of start and end, which normally take milliseconds, for a busy or broken machine."""
MAX_SETTINGS_BYTES = 60_000


class SandboxFailed(Exception):
    """The sandbox itself could not be created, or failed; the program is not at fault."""


class Cell:
    """Call `start`, `wait_ready`, `begin` for one or more runs, then `close`."""

    def __init__(self, setup: Setup, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.setup, self._process, self._control = setup, process, control
        self._first_pid = 0

    @staticmethod
    def start(setup: Setup, limits: Limits, code_fd: int, source: bytes, errors_fd: int = -1) -> Cell:
        """Start the first process and pass it the program. Raises SandboxFailed."""
        kind = socket.SOCK_SEQPACKET if hasattr(os, "memfd_create") else socket.SOCK_STREAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        filter_code = setup.outer_filter()
        filter_fd = file_of(filter_code) if filter_code else -1
        source_fd = file_of(source)
        try:
            process = subprocess.Popen(
                setup.command(limits, code_fd, theirs.fileno(), filter_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if errors_fd < 0 else errors_fd,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[fd for fd in (code_fd, theirs.fileno(), filter_fd) if fd >= 0],
                start_new_session=True,
                user=setup.uid,
                group=setup.uid,
                extra_groups=None if setup.uid is None else [],
            )
            cell = Cell(setup, process, ours)
            cell._send(repr(setup.settings(limits)), [source_fd])
        except (OSError, ValueError) as error:
            ours.close()
            raise SandboxFailed(f"a sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(source_fd)
            if filter_fd >= 0:
                os.close(filter_fd)
        return cell

    def wait_ready(self) -> None:
        """Wait until the program can be run. Raises SandboxFailed."""
        if self._receive(START_TIMEOUT_S) != b"ready":
            self.close()
            raise SandboxFailed(f"a sandbox did not start (status {self._process.returncode})")
        self._first_pid = self._process.pid
        if self.setup.layer == "namespaces":
            self._first_pid = next(iter(children_of(self._process.pid)), 0)

    def begin(self, mode: str, fds: Sequence[int]) -> None:
        """Run the program once: `script` with three descriptors, `calls` with a fourth, its channel."""
        try:
            self._send(repr({"mode": mode}), fds)
        except OSError as error:
            raise SandboxFailed(f"the sandbox failed: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the started process: bubblewrap, or the first process itself."""
        return self._process.pid

    @property
    def control_fd(self) -> int:
        """Readable when the run has ended."""
        return self._control.fileno()

    def ended(self) -> int | None:
        """The wait status of the run that ended; None if the whole cell ended. Raises SandboxFailed."""
        reply = self._receive(0.0)
        if reply == b"broke":
            raise SandboxFailed("the namespaces of a run cannot be created")
        word, _, status = reply.partition(b" ")
        return int(status) if word == b"ended" and status.isdigit() else None

    def usage(self) -> Usage:
        """Current and past resource usage of the program."""
        root = self._first_pid
        if not root:
            return Usage()
        # the first process of the run's namespaces does not belong to the program either
        return usage_below(root, ours=children_of(root) if self.setup.is_fresh else ())

    def close(self) -> None:
        """Kill everything in it; returns when no process of it runs."""
        if self._process.returncode is None:
            self._kill()
        self._control.close()

    def _kill(self) -> None:
        """Kill process 1 first: the kernel then empties the namespace, and bubblewrap exits."""
        give_up_s = time.monotonic() + END_TIMEOUT_S
        in_namespaces = self.setup.layer == "namespaces"
        if in_namespaces and self._first_pid:
            _signal([self._first_pid], signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S / 2)
                return
        while self._process.poll() is None and time.monotonic() < give_up_s:
            members = tree_of(self._process.pid)
            _signal(members, signal.SIGSTOP)
            _signal(set(members) | set(tree_of(self._process.pid)), signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)

    def _send(self, text: str, fds: Sequence[int]) -> None:
        body = text.encode()
        assert len(body) <= MAX_SETTINGS_BYTES, "a command fits into one message"
        socket.send_fds(self._control, [body], list(fds))

    def _receive(self, timeout_s: float) -> bytes:
        """A message of the first process; empty if it has exited, or sends nothing within `timeout_s`."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return b""
        with contextlib.suppress(OSError):
            return self._control.recv(MAX_REPLY_BYTES)
        return b""


def _signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
