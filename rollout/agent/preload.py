"""Forks Python programs from a process that has already imported their modules.

This is a script for the agent's own interpreter, which may be another one than ours: it uses the standard library only,
and imports nothing of this project except the guard, and quick_exit.py next to it, from their files.

    python preload.py GUARD FOLDER MODULE...   import the modules, then fork programs on request over standard input

When a program is started is decided in programs.py.

Over standard input, a socket, one line is sent first: empty once all modules are imported, otherwise the reason why
not, after which this process exits. Then one byte is received for each program, with two descriptors: a socket, over
which the request follows as a line of JSON, {"words", "environment"}, and over which the exit status is sent (a line; a
negative number is a signal); and the descriptor that the program's output is written to. The program and all its
descendants are killed when the other end of that socket is closed, and the status is sent only when no descendant is
left.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NoReturn


class ForkedChild(Exception):
    """Raised in a forked child that becomes a program, to leave all frames of the server."""


def serve(server: socket.socket, guard: Any) -> NoReturn:
    """Fork programs until the other end is closed. Raises ForkedChild in a program."""
    while True:
        byte, descriptors, _, _ = socket.recv_fds(server, 1, 2)
        if not byte:
            sys.exit(0)
        if os.fork() == 0:
            server.close()
            guard_program(guard, *descriptors)
        for one in descriptors:
            os.close(one)


def guard_program(guard: Any, control: int, output: int) -> NoReturn:
    """In a fork of the server: guard one program. Raises ForkedChild in the program."""
    os.dup2(control, 0)
    os.close(control)
    with os.fdopen(os.dup(0), "rb") as sent:
        request = json.loads(sent.readline() or "null")
    if request is None:  # it was cancelled before it began
        os._exit(0)

    def run(parent: int) -> NoReturn:
        guard.become_child(parent)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        raise ForkedChild(request)

    status = guard.guard_child(guard.STDIN, run)
    if status is not None:
        os.write(0, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def run_program(request: dict[str, Any]) -> None:
    """Run `python WORDS` in this process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    first, *rest = request["words"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def fault_of(modules: Sequence[str]) -> str:
    """Import the modules. Returns why programs cannot be forked, in one line; empty if they can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # third-party code
            traceback.print_exc()
            words = " ".join(str(error).split())
            return f"{name} cannot be imported ({type(error).__name__}: {words})"
    # A fork copies the memory of a thread, including locks that it holds, but not the thread.
    return f"importing {', '.join(modules)} starts a thread" if threading.active_count() > 1 else ""


def main(guard_file: str, folder: str, *modules: str) -> None:
    """Run the server (see the docstring of the module)."""
    guard = loaded("areal_like_guard", guard_file)
    quick_exit = loaded("areal_like_quick_exit", os.path.join(os.path.dirname(guard_file), "quick_exit.py"))
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with PYTHONSAFEPATH
        sys.path[0] = folder  # as for a program in that folder
    fault = fault_of(modules)
    os.write(0, fault.encode() + b"\n")
    if fault:
        sys.exit(1)
    gc.collect()
    gc.freeze()  # so that garbage collection in a program does not copy imported objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses of guards are not used
    server = socket.socket(fileno=os.dup(0))
    try:
        serve(server, guard)
    except ForkedChild as child:
        request = child.args[0]
    quick_exit.run(lambda: run_program(request))


def loaded(name: str, file: str) -> Any:
    """The module in `file`."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
