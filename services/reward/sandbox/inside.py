"""The inside of a sandbox, first part: its first process, and the set-up of a program's process before the program
runs.

This file and the other `inside_*` share a sandbox with the program, which may read, replace or forge everything they
do. So processes outside assume only that a message comes from the program, and nothing is sent in that a program must
not know. These files import nothing of this project and run under the Python that runs the programs: their code is
passed to it as one piece, and executed in one namespace (inside_writing, inside_answering, inside_namespaces, inside).
Commands to the first process are Python expressions from the judge only; requests to a program are Python expressions
from its tests, which may do anything that the program may; replies are JSON. Tests that are code run in a separate
sandbox with the same first process (mode `tests`).

The first process waits for the judge's commands on its control socket, one run of the program each. When the program's
process exits, it kills all other processes (it is process 1 of its namespace) and reports the end.
"""

from __future__ import annotations

import _socket
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from services.reward.sandbox.inside_answering import Responder, keep_depth
    from services.reward.sandbox.inside_namespaces import fork_run, status_from, wait_for

MAX_COMMAND_BYTES = 1 << 16
FD_BYTES = 4
PARKED_FD = 100
MAX_FD = 256
CHANNEL_FD = 3
TESTS = "services.reward.judging.tests_process"
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
STDIN_NAME, STDIN_COPY = b"/dev/stdin", "/tmp/.stdin"
"""There is no /proc that the device could link to; bubblewrap makes it a link to this file."""


def first_process(control_fd: int) -> Callable[[], None]:
    """Run the first process, in which this never returns. In the process of a program it returns the function that runs
    the program."""
    import _signal

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # with a handler, process 1 could be interrupted from within
    control = _socket.socket(-1, -1, -1, control_fd)
    settings, fds = receive_command(control)
    source = read_all(fds[0])
    if settings["parent"]:
        die_with(settings["parent"])
    confine = confinement_of(settings)
    if TESTS in sys.modules:
        sys.modules[TESTS].prepare()
    control.send(b"ready")
    while True:
        command, fds = receive_command(control)
        pid, status_fd = fork_run(settings)
        if pid == 0:
            control.close()
            if settings["parent"]:
                die_with(os.getppid())
            return become_program(settings, confine, command["mode"], source, fds)
        for fd in fds:
            os.close(fd)
        status: int | None = wait_for(pid)
        if status_fd >= 0:
            status = status_from(status_fd)
        if os.getpid() == 1:
            end_everything_else()
        control.send(b"broke" if status is None else b"ended %d" % status)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` exits, where no namespace does it."""
    prctl(_SET_PARENT_DEATH_SIGNAL, 9)
    if os.getppid() != parent:
        os._exit(0)


def prctl(option: int, value: int) -> None:
    """Call prctl. Raises OSError."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def confinement_of(settings: dict[str, Any]) -> Callable[[], None] | None:
    """The function that confines a process of the program, compiled once; None if the outer sandbox does everything."""
    if not settings["confinement"]:
        return None
    space: dict[str, Any] = {}
    exec(compile(settings["confinement"].pop("code"), "<confine>", "exec"), space)
    return lambda: space["confine"](**settings["confinement"])


def receive_command(control: _socket.socket) -> tuple[Any, list[int]]:
    """Receive a command and its descriptors. Exits, and so ends the sandbox, if the judge has exited."""
    text, attached, _, _ = control.recvmsg(MAX_COMMAND_BYTES, _socket.CMSG_SPACE(8 * FD_BYTES))
    if not text:
        os._exit(0)
    fds = [
        int.from_bytes(data[start : start + FD_BYTES], sys.byteorder)
        for _, _, data in attached
        for start in range(0, len(data), FD_BYTES)
    ]
    return eval(text, {"__builtins__": {}}), fds


def read_all(fd: int) -> bytes:
    """The whole content of a file."""
    content = bytearray()
    while chunk := os.pread(fd, 1 << 20, len(content)):
        content += chunk
    os.close(fd)
    return bytes(content)


def end_everything_else() -> None:
    """Kill all other processes of the namespace; for process 1 only."""
    while True:
        try:
            os.kill(-1, 9)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def become_program(
    settings: dict[str, Any], confine: Callable[[], None] | None, mode: str, source: bytes, fds: list[int]
) -> Callable[[], None]:
    """Set up the program's process: `fds` become 0, 1, 2 and, in mode `calls`, 3. Returns the function that runs the
    program."""
    for number, fd in enumerate(fds):
        os.dup2(fd, PARKED_FD + number)
    for number in range(len(fds)):
        os.dup2(PARKED_FD + number, number, inheritable=number < CHANNEL_FD)
    os.closerange(len(fds), MAX_FD)
    for name, value in settings["limits"].items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        bound = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(kind, (bound, bound))
    if mode == "tests" and (confine is not None or settings["parent"]):  # otherwise the outer filter forbids the call,
        prctl(_SET_DUMPABLE, 0)  # and no process could read its memory, which contains expected results
    if confine is not None:
        confine()
    sys.path[:] = [path for path in sys.path if path and path != "/"] + settings["packages"]
    sys.argv[:] = ["program.py"]
    add_site_names()
    if mode == "tests":
        return lambda: sys.modules[TESTS].serve(CHANNEL_FD)
    main: Any = type(sys)("__main__")
    main.__builtins__ = sys.modules["builtins"]
    main.__file__ = "program.py"
    sys.modules["__main__"] = main
    if mode == "script":
        if STDIN_NAME in source:
            copy_input()
        return lambda: run_alone(source, main.__dict__)
    return lambda: Responder(CHANNEL_FD, main.__dict__).serve(source)


def run_alone(source: bytes, names: dict[str, Any]) -> None:
    """Run the program as a script: an exception ends the process in the usual way."""
    program = compile(source, "program.py", "exec", 0, True)
    keep_depth(2, 0)
    exec(program, names)


def copy_input() -> None:
    """Copy the input to a file, for programs that open it by name."""
    try:
        with open(STDIN_COPY, "wb") as file:
            while chunk := os.pread(0, 1 << 20, file.tell()):
                file.write(chunk)
    except OSError:  # too long for /tmp, or no writable /tmp: the program reports the error
        return


def add_site_names() -> None:
    """Define `exit` and `quit`, as the site module would."""
    import _sitebuiltins
    import builtins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")


if __name__ == "__main__":
    first_process(int(sys.argv[1]))()
