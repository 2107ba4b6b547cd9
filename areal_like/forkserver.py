"""`python -m areal_like.forkserver`: imports the modules that several processes of a run need once, and forks the
processes.

A child process behaves as `python -P -m MODULE ...` would, without the time and memory of the imports: it has its own
session, environment, log and program name, and runs the module as `__main__`. Children exit with this process, and this
process exits with the process that started it, so a whole run ends when its controller is killed. Nothing may start a
thread, a pool or a device before the fork: a child inherits their memory, but not the running objects.

One server may serve many runs (`--listen`): each connection gets a forked copy of the server.

The protocol is one JSON object per line, over stdin or the connection (a socket). Requests {"module", "arguments",
"environment", "folder", "log", "title"} are answered in order by {"pid"} or {"error"}. The server also sends {"ready":
true} when the imports are done ("server": its process id), and {"ended": pid, "status": n} when a child has exited (n
negative: a signal). The controller's side is controller/launch/forked.py.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import setproctitle

from areal_like import quick_exit
from areal_like.process import die_with_starter, private_files, report_end

LINE_BYTES = 1 << 20
"""Longest request. A request is an environment and a few strings; a longer line is not a request."""


@dataclass(frozen=True)
class ChildSpec:
    """What one child process runs; only the child has it."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    """Working directory."""
    log: str
    title: str


@dataclass
class ForkServer:
    """Serves one client until it disconnects. `serve` returns only in a child process, with what the child runs."""

    starter: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _children: dict[int, int] = field(default_factory=dict)
    """Process id by pidfd."""
    _unread: bytes = b""

    def serve(self) -> ChildSpec:
        """Fork on request and report exited children; exits when the client has disconnected."""
        self._selector.register(self.starter, selectors.EVENT_READ)
        self._send(ready=True, server=os.getpid())
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self.starter:
                    self._report_exit(key.fd)
                elif child := self._on_request():
                    return child

    def _on_request(self) -> ChildSpec | None:
        data = self.starter.recv(1 << 16)
        if not data or len(self._unread) > LINE_BYTES:
            sys.exit(0)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            child = ChildSpec(**json.loads(line))
            if self._fork() == 0:
                is_last = line is lines[-1] and not self._unread
                assert is_last, "a request was sent before the previous one was answered"
                self._close_all()
                return child
        return None

    def _fork(self) -> int:
        """Fork; returns 0 in the child."""
        try:
            pid = os.fork()
        except OSError as error:
            self._send(error=str(error))
            return -1
        if pid:
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ)
            self._send(pid=pid)
        return pid

    def _report_exit(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._send(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _close_all(self) -> None:
        """Close the server's file descriptors in a child."""
        self._selector.close()
        for pidfd in self._children:
            os.close(pidfd)
        self.starter.close()

    def _send(self, **fields: Any) -> None:
        try:
            self.starter.sendall(json.dumps(fields).encode() + b"\n")
        except OSError:
            sys.exit(0)  # the client has disconnected


def run_child(child: ChildSpec, server_pid: int) -> NoReturn:
    """Run `python -P -m <module> <arguments>` in this process, a child of `server_pid`."""
    os.setsid()
    die_with_starter(server_pid)
    os.chdir(child.folder)
    log = os.open(child.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    setproctitle.setproctitle(child.title)  # uses the memory of the original environment
    if os.environ.get("TMPDIR") != child.environment.get("TMPDIR"):
        tempfile.tempdir = None  # a module that was imported has looked it up already
    os.environ.clear()
    os.environ.update(child.environment)
    sys.argv = [child.module, *child.arguments]
    if numpy := sys.modules.get("numpy"):  # Python reseeds its own generator at every fork, NumPy does not
        numpy.random.seed()
    quick_exit.run(lambda: runpy.run_module(child.module, run_name="__main__", alter_sys=True))


def share(listener: socket.socket) -> socket.socket:
    """Accept connections indefinitely. Returns in a forked child only, with the connection that it serves."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of the copies are not used
    server_pid = os.getpid()
    with listener:
        while True:
            starter, _ = listener.accept()
            if peer_uid(starter) != os.getuid():  # a process that connects can run code as this user
                starter.close()
                continue
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                die_with_starter(server_pid)
                return starter
            starter.close()


def peer_uid(stream: socket.socket) -> int:
    """User id of the peer of a Unix socket, as reported by the kernel (Linux)."""
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _listen(path: str) -> socket.socket:
    """Listen at `path`, which appears once it accepts connections, from this user only."""
    listener, unready = socket.socket(socket.AF_UNIX), f"{path}.unready"
    with private_files():
        listener.bind(unready)
    listener.listen()
    os.rename(unready, path)
    return listener


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Import the requested modules, then serve (see the module's docstring)."""
    parser = argparse.ArgumentParser(
        description="Fork the processes of a run from a process that has already imported their modules. The "
        "areal-like command starts this server."
    )
    parser.add_argument(
        "--starter",
        type=int,
        required=True,
        help="process ID of the parent process; the server exits when the parent exits",
    )
    parser.add_argument(
        "--listen",
        metavar="SOCKET",
        help="path of a Unix socket on which to serve several runs; a run uses it if AREAL_LIKE_FORKSERVER contains "
        "this path",
    )
    parser.add_argument("modules", nargs="*", help="modules to import")
    options = parser.parse_args(argv)
    die_with_starter(options.starter)
    try:
        listener = _listen(options.listen) if options.listen else None  # connections made during the imports wait
        for name in options.modules:
            importlib.import_module(name)
        # Exclude imported objects from garbage collection in children: a collection would copy all their pages.
        gc.collect()
        gc.freeze()
        starter = share(listener) if listener is not None else socket.socket(fileno=os.dup(0))
        server_pid = os.getpid()
        child = ForkServer(starter).serve()
    except Exception as error:  # the fault boundary of the process
        sys.exit(report_end(error))
    run_child(child, server_pid)


if __name__ == "__main__":
    main()
