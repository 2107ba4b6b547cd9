"""Programs in Python without their imports: a process that has made them, and is forked for each program.

A script for the agent's own interpreter, which may be another one than ours: standard library only, and it imports
nothing of this project but the guard, from its file.

    python preload.py GUARD FOLDER MODULE...     import the modules, then fork programs as asked over the standard input

Owns: the imports, a program's birth (guard, environment, output, `__main__`). Refuses: deciding what is started, and
when (programs.py).

Over the standard input, a socket, goes first one line: empty once all is imported, else why not, and this ends. Then
comes one byte for each program, with two descriptors: a socket, over which the request
follows as a line of JSON, {"words", "environment"}, and where the exit status goes (a line; a negative number is a
signal); and where the program writes. The program and everything it started end when the other end of that socket is
closed, and its status is sent only when nothing of it is left.
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


class Born(Exception):
    """Raised in a process that is to be a program, up to where there is nothing of the server on the stack."""


def serve(server: socket.socket, guard: Any) -> NoReturn:
    """Fork until the other end hangs up. Raises Born in a program."""
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
    """In a fork of the server: guard one program. Raises Born in the program."""
    os.dup2(control, 0)
    os.close(control)
    with os.fdopen(os.dup(0), "rb") as sent:
        request = json.loads(sent.readline() or "null")
    if request is None:  # it was given up before it began
        os._exit(0)

    def run(parent: int) -> NoReturn:
        guard.become_child(parent)
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
        raise Born(request)

    status = guard.guard_child(guard.STDIN, run)
    if status is not None:
        os.write(0, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """This process is from here on `python WORDS`."""
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
    """Import the modules; why programs cannot be forked now, in one line, empty: they can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # somebody else's code
            traceback.print_exc()
            words = " ".join(str(error).split())
            return f"{name} cannot be imported ({type(error).__name__}: {words})"
    # A fork has the memory of a thread, with its locks as they were, and not the thread.
    return f"importing {', '.join(modules)} starts a thread" if threading.active_count() > 1 else ""


def main(guard_file: str, folder: str, *modules: str) -> None:
    """See the module."""
    spec = spec_from_file_location("areal_like_guard", guard_file)
    assert spec is not None
    assert spec.loader is not None
    guard = module_from_spec(spec)
    spec.loader.exec_module(guard)
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # not with PYTHONSAFEPATH
        sys.path[0] = folder  # as for a program that lies there
    fault = fault_of(modules)
    os.write(0, fault.encode() + b"\n")
    if fault:
        sys.exit(1)
    gc.collect()
    gc.freeze()  # no collection of a program copies what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a guard ended
    server = socket.socket(fileno=os.dup(0))
    try:
        serve(server, guard)
    except Born as born:
        request = born.args[0]
    become(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
