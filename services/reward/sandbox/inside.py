"""The inside of a sandbox, first part: its first process, and what a program's process does before the program runs.

Owns: starting runs of one program, the limits of its process. Refuses: judging.

This file and the other `inside_*` share a sandbox with the program, which may read, replace or forge all they do. So
nothing outside believes more than "this is what the program answers", and nothing is sent in that a program may not
know. They import nothing of this project and run under whatever Python runs the programs: their code is handed to it
as one piece, executed in one namespace (inside_writing, inside_answering, inside_namespaces, inside). Commands to the
first process are Python expressions, and come from the judge alone; questions to a program are, too, and come from its
tests, which may do what the program may; what goes back is JSON. Tests that are code run in a sandbox of their own,
whose first process is the same (mode `tests`).

The first process waits for the judge's commands on its control socket, one run of the program each; when the program's
process ends it ends everything else (it is process 1 of its world) and says so.
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

    from services.reward.sandbox.inside_answering import Respondent, keep_depth
    from services.reward.sandbox.inside_namespaces import fork_run, status_from, wait_for

MAX_COMMAND_BYTES = 1 << 16
FD_BYTES = 4
PARKED_FD = 100
MAX_FD = 256
CHANNEL_FD = 3
TESTS = "services.reward.judging.tests_process"
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
STDIN_NAME, STDIN_COPY = b"/dev/stdin", "/tmp/.stdin"
"""There is no /proc for the device to lead to; bubblewrap makes it a link to this file."""


def first_process(control_fd: int) -> Callable[[], None]:
    """Never returns in the first process. In the process of a program it returns what is left to be done."""
    import _signal

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # a handler is what lets a process 1 be interrupted from within
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
    """Have the kernel end this process when `parent` ends: no namespace does it here."""
    prctl(_SET_PARENT_DEATH_SIGNAL, 9)
    if os.getppid() != parent:
        os._exit(0)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def confinement_of(settings: dict[str, Any]) -> Callable[[], None] | None:
    """What confines a process of the program, compiled once; None where the sandbox around it does all."""
    if not settings["confinement"]:
        return None
    space: dict[str, Any] = {}
    exec(compile(settings["confinement"].pop("code"), "<confine>", "exec"), space)
    return lambda: space["confine"](**settings["confinement"])


def receive_command(control: _socket.socket) -> tuple[Any, list[int]]:
    """A command and the descriptors that came with it. Ends the process, and so its world, at the judge's end."""
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
    """For process 1 only: no other process of its world is left."""
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
    """Set up the program's process: `fds` become 0, 1, 2 and, with questions to answer, 3. Returns what runs it."""
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
    if mode == "tests" and (confine is not None or settings["parent"]):  # else a filter around it forbids the call,
        prctl(_SET_DUMPABLE, 0)  # and nobody is there to read its memory, which holds expected results
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
    return lambda: Respondent(CHANNEL_FD, main.__dict__).serve(source)


def run_alone(source: bytes, names: dict[str, Any]) -> None:
    """The program as it would run by itself: what it raises ends the process as it does everywhere."""
    program = compile(source, "program.py", "exec", 0, True)
    keep_depth(2, 0)
    exec(program, names)


def copy_input() -> None:
    """For programs that open their input by its name."""
    try:
        with open(STDIN_COPY, "wb") as file:
            while chunk := os.pread(0, 1 << 20, file.tell()):
                file.write(chunk)
    except OSError:  # too long for /tmp, or no /tmp to write to: the program will say so
        return


def add_site_names() -> None:
    """`exit` and `quit`, which the site module would have made."""
    import _sitebuiltins
    import builtins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")


if __name__ == "__main__":
    first_process(int(sys.argv[1]))()
