"""`python -m areal_like.forkserver`: imports once what several processes of a run need, and forks them from that.

Owns: the preloaded process, its children's birth (session, log, environment, title), the word of their end. Refuses:
deciding what is forked and when (controller/launch/forked.py), and what a child does.

A child is what `python -P -m MODULE ...` would be, less the time and memory of the imports: a session, environment,
log and program name of its own, the module run as `__main__`. It ends with this process, and this process ends with
its starter, so that a whole run still goes when its controller is killed. Nothing here may start a thread, a pool or a
device before the fork: a child inherits the memory of those, but not the things themselves.

One server may serve many runs (`--listen`): each connection gets a copy of it to itself.

Over stdin or the connection (a socket), one JSON object a line. To here: {"module", "arguments", "environment",
"folder", "log", "title"}, answered in order by {"pid"} or {"error"}. From here besides: {"ready": true} when all is
imported ("server": our own process id), {"ended": pid, "status": n} when a child has ended (n negative: a signal).
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import setproctitle

from areal_like.process import die_with_starter, private_files, report_end

LINE_BYTES = 1 << 20
"""A request is an environment and a few words; what is longer is none."""


@dataclass(frozen=True)
class Birth:
    """What one child is to be; held by the child alone."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    """Its current one."""
    log: str
    title: str


@dataclass
class ForkServer:
    """Serves one starter until it hangs up. `serve` returns in a child, with what it is to be, and never elsewhere."""

    starter: socket.socket
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _children: dict[int, int] = field(default_factory=dict)
    """pid by pidfd."""
    _unread: bytes = b""

    def serve(self) -> Birth:
        """Fork on request and tell who has ended; exits when the starter is gone."""
        self._selector.register(self.starter, selectors.EVENT_READ)
        self._say(ready=True, server=os.getpid())
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self.starter:
                    self._tell_end(key.fd)
                elif birth := self._on_request():
                    return birth

    def _on_request(self) -> Birth | None:
        data = self.starter.recv(1 << 16)
        if not data or len(self._unread) > LINE_BYTES:
            sys.exit(0)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            birth = Birth(**json.loads(line))
            if self._fork() == 0:
                is_last = line is lines[-1] and not self._unread
                assert is_last, "a request was sent before the last one was answered"
                self._forget_all()
                return birth
        return None

    def _fork(self) -> int:
        """0 in the child."""
        try:
            pid = os.fork()
        except OSError as error:
            self._say(error=str(error))
            return -1
        if pid:
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = pid
            self._selector.register(pidfd, selectors.EVENT_READ)
            self._say(pid=pid)
        return pid

    def _tell_end(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._say(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _forget_all(self) -> None:
        """What belongs to the server alone, in a child."""
        self._selector.close()
        for pidfd in self._children:
            os.close(pidfd)
        self.starter.close()

    def _say(self, **words: Any) -> None:
        try:
            self.starter.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            sys.exit(0)  # the starter is gone


def become(birth: Birth, server_pid: int) -> NoReturn:
    """This process, a child of `server_pid`, is from here on `python -P -m <module> <arguments>`."""
    os.setsid()
    die_with_starter(server_pid)
    os.chdir(birth.folder)
    log = os.open(birth.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    setproctitle.setproctitle(birth.title)  # finds its place by the environment we were born with
    os.environ.clear()
    os.environ.update(birth.environment)
    sys.argv = [birth.module, *birth.arguments]
    if numpy := sys.modules.get("numpy"):  # Python's own generator is seeded again at every fork, NumPy's is not
        numpy.random.seed()
    runpy.run_module(birth.module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def share(listener: socket.socket) -> socket.socket:
    """Accept indefinitely. Returns in a child of this process, with the connection that it is to serve."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a copy ended
    server_pid = os.getpid()
    with listener:
        while True:
            starter, _ = listener.accept()
            if peer_uid(starter) != os.getuid():  # a process that connects has code run as this user
                starter.close()
                continue
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                die_with_starter(server_pid)
                return starter
            starter.close()


def peer_uid(stream: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it (Linux)."""
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _listen(path: str) -> socket.socket:
    """`path` appears once it can be connected to, by this user alone."""
    listener, unready = socket.socket(socket.AF_UNIX), f"{path}.unready"
    with private_files():
        listener.bind(unready)
    listener.listen()
    os.rename(unready, path)
    return listener


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Import what is asked for, then serve: see the module."""
    parser = argparse.ArgumentParser(description="Forks processes that need not import; started by areal-like.")
    parser.add_argument("--starter", type=int, required=True, help="process id of the starter; this ends with it")
    parser.add_argument("--listen", metavar="SOCKET", help="serve any number of runs (AREAL_LIKE_FORKSERVER=SOCKET)")
    parser.add_argument("modules", nargs="*", help="what to import")
    options = parser.parse_args(argv)
    die_with_starter(options.starter)
    try:
        listener = _listen(options.listen) if options.listen else None  # who comes while we import waits
        for name in options.modules:
            importlib.import_module(name)
        # No collection of a child looks through what is imported: it would copy every page of it.
        gc.collect()
        gc.freeze()
        starter = share(listener) if listener is not None else socket.socket(fileno=os.dup(0))
        server_pid = os.getpid()
        birth = ForkServer(starter).serve()
    except Exception as error:  # the fault boundary of the process
        sys.exit(report_end(error))
    become(birth, server_pid)


if __name__ == "__main__":
    main()
