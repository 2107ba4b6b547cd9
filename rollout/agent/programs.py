"""Starts and ends the programs of agents: as new processes, or forked from a process that has their imports
(preload.py).

No descendant of a program outlives it, and no program outlives this process. What a program is given, and what its exit
means, is decided in workflow.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from areal_like import guard
from areal_like.errors import UserError
from areal_like.guard import SWEEP_S, guarded
from areal_like.guarded_process import MARGIN_S, end_guarded, end_guarded_child

OWN_PYTHON = ("python", "python3")
"""Names that stand for the interpreter of the run, which need not be the first of that name in PATH."""
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".rb")
"""Suffixes by which a command's second word is recognised as a file."""
IMPORT_S = 300.0
"""Time limit for the imports of `Preloaded`."""
SERVER = Path(__file__).with_name("preload.py")


class Program(Protocol):
    """A program that has been started."""

    @property
    def output(self) -> asyncio.StreamReader:
        """Its output."""
        ...

    async def wait(self) -> int:
        """Its exit status; negative: a signal."""
        ...

    async def end(self) -> None:
        """Kill it with all its descendants. Does nothing if it has exited."""
        ...


class Programs(Protocol):
    """Starts programs."""

    async def start(self, environment: Mapping[str, str]) -> Program:
        """Start a program with this environment and no standard input. Raises UserError, OSError."""
        ...


def command_of(words: Sequence[str]) -> list[str]:
    """The command with the interpreter of the run in place of `python`. Raises UserError if it cannot be started."""
    where = "rollout.workflow_options.command"
    command = [sys.executable if words[0] in OWN_PYTHON else words[0], *words[1:]]
    if shutil.which(command[0]) is None:
        raise UserError(
            f"there is no program {command[0]!r}", where=where, remedy="install the program, or write its full path"
        )
    script = command[1] if len(command) > 1 else ""
    if script.endswith(SCRIPTS) and not Path(script).is_file():
        raise UserError(
            f"there is no file {script!r} in {os.getcwd()}", where=where, remedy="write the full path of the file"
        )
    return command


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._process, self.output = process, process.stdout

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self) -> None:
        await end_guarded_child(self._process)


class Started:
    """Starts each program as a new process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def start(self, environment: Mapping[str, str]) -> Program:
        """See `Programs`."""
        process = await asyncio.create_subprocess_exec(
            *guarded(self._command), env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        return _Process(process)


class _Forked:
    """A program by its two descriptors: see preload.py."""

    def __init__(
        self, output: asyncio.StreamReader, pipe: asyncio.BaseTransport, control: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self.output, self._pipe, self._control, self._writer = output, pipe, control, writer
        self._status: int | None = None

    async def wait(self) -> int:
        if self._status is None:
            line = b""
            with contextlib.suppress(ConnectionError):
                line = await self._control.readline()
            self._status = int(line or -9)  # empty: its guard was killed, and the program with it
        return self._status

    async def end(self) -> None:
        if self._writer.can_write_eof() and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()  # its guard kills it, and then closes the connection
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(self._control.read(), SWEEP_S + MARGIN_S)
        self._writer.close()
        self._pipe.close()


class Preloaded:
    """Forks programs from a process that has imported their modules. That process is started with the first program."""

    def __init__(self, command: Sequence[str], modules: Sequence[str]) -> None:
        """
        Args:
            command: an interpreter of Python, and a script or `-m` and a module, with arguments.
            modules: to import once.

        Raises:
            UserError: the command has another form.
        """
        self._python, *self._words = command
        is_module = self._words[:1] == ["-m"] and len(self._words) > 1
        if not self._words or (self._words[0].startswith("-") and not is_module):
            raise UserError(
                "with `preload`, the command must be [python, SCRIPT, ...] or [python, -m, MODULE, ...]",
                where="rollout.workflow_options.preload",
                remedy="remove `preload`, so that every program is started as a new process",
            )
        self._folder = os.getcwd() if is_module else str(Path(self._words[0]).absolute().parent)
        self._modules = list(modules)
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._starting = asyncio.Lock()

    async def start(self, environment: Mapping[str, str]) -> Program:
        """See `Programs`."""
        async with self._starting:
            server = await self._running()
        ours, theirs = socket.socketpair()
        reads, writes = os.pipe()
        try:
            socket.send_fds(server, [b"+"], [theirs.fileno(), writes])
        except OSError:
            ours.close()
            os.close(reads)
            raise
        finally:
            theirs.close()
            os.close(writes)
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reads, "rb")
        )
        control, writer = await asyncio.open_connection(sock=ours)
        writer.write(json.dumps({"words": self._words, "environment": dict(environment)}).encode() + b"\n")
        return _Forked(output, pipe, control, writer)

    def close(self) -> None:
        """End the server; running programs continue until they are ended."""
        if self._server is not None:
            process, ours = self._server
            ours.close()
            end_guarded(process)
            self._server = None

    async def _running(self) -> socket.socket:
        """The socket of the server, which is started if it does not run. Raises UserError."""
        if self._server is not None and self._server[0].poll() is None:
            return self._server[1]
        if self._server is not None:
            self._server[1].close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [self._python, str(SERVER), guard.__file__, self._folder, *self._modules]
            process = await asyncio.to_thread(subprocess.Popen, guarded(command), stdin=theirs.fileno())
        self._server = process, ours
        weakref.finalize(self, ours.close)
        if fault := await asyncio.to_thread(_fault_of, ours):
            self.close()
            raise UserError(
                fault,
                where="rollout.workflow_options.preload",
                remedy=f"correct the list of modules in `preload`, or remove `preload`: {self._modules}",
            )
        return ours


def _fault_of(server: socket.socket) -> str:
    """The first line of a server; blocks until its imports are done."""
    server.settimeout(IMPORT_S)
    said = b""
    try:
        while not said.endswith(b"\n"):
            if not (more := server.recv(1 << 16)):
                return "the process that runs the imports has exited"
            said += more
    except TimeoutError:
        return f"the imports take longer than {IMPORT_S:g} s"
    server.settimeout(None)
    return said.decode(errors="replace").strip()
