"""Determines by trial which layers of the sandbox work on this machine, and prepares the strongest one.

It defines the layers' names and order, and their descriptions for log, doctor and verdict.

    namespaces  bubblewrap: user, process, network, mount, ipc and host-name namespaces, a read-only root that shows
                Python and its libraries only, private /tmp, no capabilities; with a seccomp filter and resource limits
    landlock    no namespaces: Landlock shows the same files and none to write; the seccomp filter also forbids
                processes, sockets and signals to others; resource limits
    seccomp     as landlock, but programs can read every file that this user can read
    limits resource limits, and the process tree is killed; nothing else

If the service is root, programs run with a separate user id, and tests that are code with another one, if possible.
Otherwise layers that do not hide files are refused, because root may read everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from areal_like.guarded_process import run_guarded
from services.reward.sandbox import seccomp
from services.reward.sandbox.cell import Cell, SandboxFailed
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.interpreter import NoInterpreter, find_interpreter
from services.reward.sandbox.launch import Setup, compile_inside, file_of
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Run, Stopped
from services.reward.sandbox.staging import stage

LAYERS = ("namespaces", "landlock", "seccomp", "limits")
"""Strongest first."""
FIRST_UID, NUM_UIDS = 61_184, 2_000
"""User ids that systems do not assign (systemd's range for dynamic users): some for programs, the next ones for tests.
"""
HIDES_FILES = ("namespaces", "landlock")
TESTS_LIMITS = Limits(time_s=3600.0, memory_bytes=1536 << 20)
"""Limits of a process of tests. Its time is bounded per program, by the waiting judge (judging/judge.py)."""
TRIAL_TIMEOUT_S = 180.0
_LANDLOCK_VERSION_CALL = 444
_REPLACED = ("/tmp/", "/dev/")
"""Folders that are new and empty in the namespaces of a program."""

_TRIAL = """
import os, sys
held = []
if "namespaces" in {promises!r}:
    held.append(os.getpid() < 1000 and os.getppid() == 1)
if "files" in {promises!r}:
    for path in ("/etc/passwd", "/proc/1/environ", "/home"):
        try:
            seen = os.listdir(path) if path == "/home" else open(path).read(1)
            held.append(set(seen) <= {homes!r})
        except OSError:
            pass
if "fresh" in {promises!r}:
    held.append((os.getpid(), os.listdir("/tmp"), os.listdir("/dev/shm"), os.getcwd()) == (2, [], [], "/tmp"))
    open("/tmp/left", "w").close()
    open("/dev/shm/left", "w").close()
if "calls" in {promises!r}:
    import _socket
    try:
        _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        held.append(False)
    except OSError:
        pass
os.write(1, b"holds" if all(held) else b"does not hold")
"""
_PROMISES = {"namespaces": "namespaces files calls", "landlock": "files calls", "seccomp": "calls", "limits": ""}


class LayerMissing(Exception):
    """No layer of the required strength works here; the message says why, for each layer."""


@dataclass(frozen=True)
class SandboxLayers:
    """chosen: the layer that programs run in (empty: none works). parts: for each layer, whether it works here, as
    text."""

    chosen: str
    words: str
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sandbox:
    """A layer that works, ready for use: cells for programs, and for the tests that are code."""

    setup: Setup
    code_fd: int
    tests_setup: Setup
    tests_code_fd: int
    layers: SandboxLayers
    has_fresh_runs: bool
    """Whether one cell may run a program several times with isolated runs."""

    def open(self, source: bytes, limits: Limits, *, is_repeated: bool = False) -> Cell:
        """Start a new cell with this program, without waiting for it. `is_repeated`: it will run more than once.

        Raises SandboxFailed.
        """
        setup = replace(self.setup, is_fresh=True) if is_repeated and self.has_fresh_runs else self.setup
        return Cell.start(setup, limits, self.code_fd, source)

    def open_tests(self) -> Cell:
        """Start a new cell that runs tests, any number of times, each in a separate process. Raises SandboxFailed."""
        setup = replace(self.tests_setup, is_fresh=self.has_fresh_runs, is_read_only=not self.has_fresh_runs)
        return Cell.start(setup, TESTS_LIMITS, self.tests_code_fd, b"")

    def close(self) -> None:
        """Close the descriptors; open cells are not affected."""
        os.close(self.code_fd)
        os.close(self.tests_code_fd)


def sandbox_layers(python: str = "") -> SandboxLayers:
    """Try every layer, strongest first, for `doctor`; takes a second, in a separate process.

    Never raises: if the trial itself fails, `chosen` is empty and `words` says why.
    """
    return _tried([python])


def sandbox_problem(required: str, layer: str | None, python: str = "") -> str:
    """Why no sandbox as strong as `required` (or only this `layer`) is available here; empty if one works.

    It is tried in a separate process. Never raises.
    """
    found = _tried([python, required, *([layer] if layer else [])])
    return "" if found.chosen else found.words


def _tried(arguments: list[str]) -> SandboxLayers:
    isolation = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *isolation, "-m", "services.reward.sandbox.layers", *arguments]
    try:
        done = run_guarded(command, timeout_s=TRIAL_TIMEOUT_S)
        done.check_returncode()
        return SandboxLayers(**json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        return SandboxLayers("", f"the trial failed: {error.stderr.strip()[-300:]}")
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        return SandboxLayers("", f"the trial failed: {error}")


def _try_all(python: str) -> SandboxLayers:
    """Try each layer. As root this moves the process into a new mount namespace."""
    parts: dict[str, str] = {}
    chosen = words = ""
    for layer in LAYERS:
        try:
            sandbox = find_sandbox(layer, (layer,), python)
        except LayerMissing as error:
            parts[layer] = str(error).removeprefix(f"{layer}: ")  # the reader of `parts` adds the name
            continue
        sandbox.close()
        parts[layer] = f"works: {sandbox.layers.words}"
        chosen, words = (chosen, words) if chosen else (layer, sandbox.layers.words)
    return SandboxLayers(chosen, words, parts)


def find_sandbox(required: str, allowed: tuple[str, ...] = LAYERS, python: str = "") -> Sandbox:
    """The strongest working one of the `allowed` layers, at least as strong as `required`. Raises LayerMissing."""
    faults: dict[str, str] = {}
    try:
        code = compile_inside(find_interpreter(python))
        tests_code = compile_inside(find_interpreter(sys.executable), with_tests=True)
    except NoInterpreter as error:
        raise LayerMissing(str(error)) from error
    for layer in LAYERS[: LAYERS.index(required) + 1]:
        if layer not in allowed:
            continue
        missing = _missing_part(layer)
        if missing:
            faults[layer] = missing
            continue
        for uid in _users():
            if uid is None and os.getuid() == 0 and layer not in HIDES_FILES:
                faults[layer] = _words_for_root(faults.get(layer, ""))
                continue
            try:
                return _ready(layer, uid, python, code, tests_code, faults)
            except (SandboxFailed, Stopped, OSError) as error:
                faults[layer] = str(error)
    message = "; ".join(f"{layer}: {fault}" for layer, fault in faults.items())
    raise LayerMissing(message or f"{required} is not among {', '.join(allowed)}")


def _words_for_root(fault: str) -> str:
    why = f" ({fault})" if fault else ""
    return (
        f"programs would run as root, and this layer does not hide files: no separate user is available{why}; "
        "run as an ordinary user, or use a Python that every user can read"
    )


def _ready(layer: str, uid: int | None, python: str, code: bytes, tests_code: bytes, faults: dict[str, str]) -> Sandbox:
    """Prepare and try this layer. Raises SandboxFailed, Stopped, OSError."""
    setup, tests_setup = _make_setups(layer, uid, python)
    for path in (*setup.interpreter.shown, *tests_setup.interpreter.shown) if layer == "namespaces" else ():
        if path.startswith(_REPLACED):  # the trial below may not detect it, because it runs no tests
            raise SandboxFailed(f"programs get an empty /tmp, which hides {path}: install Python in another folder")
    code_fd = file_of(code)
    try:
        _try_out(setup, code_fd, _PROMISES[layer])
        has_fresh_runs = _has_fresh_runs(setup, code_fd)
    except BaseException:
        os.close(code_fd)
        raise
    words = _words(setup)
    layers = SandboxLayers(layer, words, {**faults, layer: words})
    return Sandbox(setup, code_fd, tests_setup, file_of(tests_code), layers, has_fresh_runs)


def _has_fresh_runs(setup: Setup, code_fd: int) -> bool:
    """Whether each run can have separate namespaces here. Some systems do not allow nested namespaces in bubblewrap
    (AppArmor)."""
    if setup.layer != "namespaces" or not setup.has_filter:
        return False
    try:
        _try_out(replace(setup, is_fresh=True), code_fd, f"{_PROMISES['namespaces']} fresh", num_runs=2)
    except (SandboxFailed, Stopped, OSError):
        return False
    return True


def _missing_part(layer: str) -> str:
    """A missing requirement of a layer, before any trial; empty if it may work."""
    if layer == "limits":
        return ""
    if platform.system() != "Linux":
        return f"is Linux only, and this is {platform.system()}"
    if layer == "namespaces":
        return "" if shutil.which("bwrap") else "bubblewrap is not installed (apt install bubblewrap)"
    if not seccomp.machine():
        return f"there is no table of system calls for {platform.machine()}"
    if layer == "landlock" and not landlock_version():
        return "this kernel has no Landlock, or a container forbids it"
    return ""


def landlock_version() -> int:
    """Version of Landlock in this kernel, 0 without it."""
    with contextlib.suppress(OSError, AttributeError):
        return max(int(ctypes.CDLL(None, use_errno=True).syscall(_LANDLOCK_VERSION_CALL, None, 0, 1)), 0)
    return 0


def _users() -> Iterator[int | None]:
    """Users to run programs as, best first; None is this process's own user."""
    if os.getuid() == 0:
        yield FIRST_UID + os.getpid() % NUM_UIDS
    yield None


def _make_setups(layer: str, uid: int | None, python: str) -> tuple[Setup, Setup]:
    """Setups for programs, and for tests that are code. Raises OSError if folders cannot be staged."""
    programs, tests = find_interpreter(python), find_interpreter(sys.executable)
    needed = [path for one in (programs, tests) for path in (*one.shown, one.executable)]
    staged = {} if uid is None else stage(tuple(dict.fromkeys(needed)))
    setup = Setup(
        layer=layer,
        interpreter=programs,
        uid=uid,
        bubblewrap=shutil.which("bwrap") or "",
        landlock=landlock_version() if layer == "landlock" else 0,
        staged=staged,
    )
    return setup, replace(setup, interpreter=tests, uid=None if uid is None else uid + NUM_UIDS)


def _try_out(setup: Setup, code_fd: int, promises: str, num_runs: int = 1) -> None:
    """Run a program in it that checks the layer's guarantees. Raises SandboxFailed and Stopped."""
    limits = Limits(time_s=5.0)
    source = _TRIAL.format(promises=promises, homes=_homes_shown(setup)).encode()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        cell = Cell.start(setup, limits, code_fd, source, errors.fileno())
        try:
            cell.wait_ready()
            with open(os.devnull, "r+b") as nothing:
                for _ in range(num_runs):
                    run = Run(cell, limits, Deadline(limits.time_s))
                    cell.begin("script", [nothing.fileno(), output.fileno(), errors.fileno()])
                    run.wait({})
        except (SandboxFailed, Stopped) as error:
            raise SandboxFailed(f"{error} {_last_line(errors.fileno())}".strip()) from error
        finally:
            cell.close()
        answer = os.pread(output.fileno(), 100, 0).decode()
        if answer != "holds" * num_runs:
            raise SandboxFailed(answer or f"its trial failed: {_last_line(errors.fileno())}")


def _homes_shown(setup: Setup) -> set[str]:
    """Folders below /home that a program sees because its Python is installed there."""
    return {path.split("/")[2] for path in setup.interpreter.shown if path.startswith("/home/")}


def _last_line(fd: int) -> str:
    lines = os.pread(fd, 10_000, 0).decode(errors="replace").strip().splitlines()
    return f"({lines[-1][:200]})" if lines else ""


def _words(setup: Setup) -> str:
    """A description of the layer with all its parts, short enough for a verdict."""
    parts = {
        "namespaces": ["bubblewrap", "namespaces"],
        "landlock": [f"landlock {setup.landlock}", "no namespaces"],
        "seccomp": ["no namespaces", "files readable"],
        "limits": ["no namespaces", "no filter", "files readable"],
    }[setup.layer]
    if setup.has_filter:
        parts.insert(1 if setup.layer != "seccomp" else 0, "seccomp")
    elif setup.layer == "namespaces":
        parts.append(f"no seccomp filter for {platform.machine()}")
    own_user = [f"user {setup.uid}"] if setup.uid is not None else []
    return " + ".join([*parts, "limits", *own_user])


def _try_one(python: str, required: str, allowed: tuple[str, ...]) -> SandboxLayers:
    try:
        sandbox = find_sandbox(required, allowed or LAYERS, python)
    except LayerMissing as error:
        return SandboxLayers("", str(error))
    sandbox.close()
    return sandbox.layers


def main() -> None:
    """`python -m services.reward.sandbox.layers PYTHON [REQUIRED [LAYER]]`: print SandboxLayers as JSON."""
    python, required, *allowed = [*sys.argv[1:], "", ""][: max(len(sys.argv) - 1, 2)]
    found = _try_one(python, required, tuple(allowed)) if required else _try_all(python)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
