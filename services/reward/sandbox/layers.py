"""Which layers can confine a program on this machine, by trial; and the strongest of them, ready for use.

Owns: the layers' names and order, the trials, the choice, the words for log, doctor and verdict. Refuses: running
anybody's program.

    namespaces  bubblewrap: user, process, network, mount, ipc and host-name namespaces, a read-only root that shows
                Python and its libraries only, private /tmp, no capabilities; with a seccomp filter and resource limits
    landlock    no namespaces: Landlock shows the same files and none to write; the seccomp filter also forbids
                processes, sockets and signals to others; resource limits
    seccomp     as landlock, but every file this user can read can be read
    limits      resource limits and a killed process tree, nothing else

Where the service is root, a program runs under a user id of its own, if that is possible.
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
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from services.reward.sandbox import seccomp
from services.reward.sandbox.cell import Cell, SandboxFailed
from services.reward.sandbox.interpreter import NoInterpreter, find_interpreter
from services.reward.sandbox.launch import Setup, compile_inside, file_of
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Run, Stopped
from services.reward.sandbox.staging import stage

LAYERS = ("namespaces", "landlock", "seccomp", "limits")
"""Strongest first."""
FIRST_UID, NUM_UIDS = 61_184, 4_000
"""Users that no system gives to anybody (systemd's range for dynamic users)."""
TRIAL_TIMEOUT_S = 60.0
_LANDLOCK_VERSION_CALL = 444

_TRIAL = """
import os, sys
held = []
if "namespaces" in {promises!r}:
    held.append(os.getpid() < 1000 and os.getppid() == 1)
if "files" in {promises!r}:
    for path in ("/etc/passwd", "/proc/1/environ", "/home"):
        try:
            held.append(not (os.listdir(path) if path == "/home" else open(path).read(1)))
        except OSError:
            pass
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
    """No layer of the demanded strength works here; says why, per layer."""


@dataclass(frozen=True)
class SandboxLayers:
    """chosen: the layer programs run in (empty: none works). parts: per layer how it fares here, in words."""

    chosen: str
    words: str
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sandbox:
    """A layer that works, ready for use: `open` gives a cell for one program."""

    setup: Setup
    code_fd: int
    layers: SandboxLayers

    def open(self, source: bytes, limits: Limits) -> Cell:
        """A new cell with this program in it, not waited for. Raises SandboxFailed."""
        return Cell.start(self.setup, limits, self.code_fd, source)


def sandbox_layers(python: str = "") -> SandboxLayers:
    """What this machine has, strongest first, every layer tried. For doctor; takes a second, in a process of its own.

    Never raises: where the trial itself fails, `chosen` is empty and `words` says why.
    """
    isolation = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *isolation, "-m", "services.reward.sandbox.layers", python]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=True)
        return SandboxLayers(**json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        return SandboxLayers("", f"the trial failed: {error.stderr.strip()[-300:]}")
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        return SandboxLayers("", f"the trial failed: {error}")


def _try_all(python: str) -> SandboxLayers:
    """Each layer for itself. As root this moves the process into a mount namespace of its own."""
    parts: dict[str, str] = {}
    chosen = words = ""
    for layer in LAYERS:
        try:
            sandbox = find_sandbox(layer, (layer,), python)
        except LayerMissing as error:
            parts[layer] = str(error)
            continue
        os.close(sandbox.code_fd)
        parts[layer] = f"works: {sandbox.layers.words}"
        chosen, words = (chosen, words) if chosen else (layer, sandbox.layers.words)
    return SandboxLayers(chosen, words, parts)


def find_sandbox(required: str, allowed: tuple[str, ...] = LAYERS, python: str = "") -> Sandbox:
    """The strongest working one of the `allowed` layers, at least as strong as `required`. Raises LayerMissing."""
    faults: dict[str, str] = {}
    try:
        interpreter = find_interpreter(python)
        code = compile_inside(interpreter)
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
            try:
                setup = _make_setup(layer, uid, python)
                code_fd = file_of(code)
                _try_out(setup, code_fd)
            except (SandboxFailed, Stopped, OSError) as error:
                faults[layer] = str(error)
                continue
            words = _words(setup)
            return Sandbox(setup, code_fd, SandboxLayers(layer, words, {**faults, layer: words}))
    told = "; ".join(f"{layer}: {fault}" for layer, fault in faults.items())
    raise LayerMissing(told or f"{required} is not among {', '.join(allowed)}")


def _missing_part(layer: str) -> str:
    """What a layer lacks here, before any trial; empty where it may work."""
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
    """Whom to run programs as, best first; None is this process's own user."""
    if os.getuid() == 0:
        yield FIRST_UID + os.getpid() % NUM_UIDS
    yield None


def _make_setup(layer: str, uid: int | None, python: str) -> Setup:
    interpreter = find_interpreter(python)
    staged = {} if uid is None else stage((*interpreter.shown, interpreter.executable))
    return Setup(
        layer=layer,
        interpreter=interpreter,
        uid=uid,
        bubblewrap=shutil.which("bwrap") or "",
        landlock=landlock_version() if layer == "landlock" else 0,
        staged=staged,
    )


def _try_out(setup: Setup, code_fd: int) -> None:
    """Run a program of ours in it, which looks whether the layer holds. Raises SandboxFailed and Stopped."""
    limits = Limits(time_s=5.0)
    source = _TRIAL.format(promises=_PROMISES[setup.layer]).encode()
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        cell = Cell.start(setup, limits, code_fd, source, errors.fileno())
        try:
            cell.wait_ready()
            with open(os.devnull, "r+b") as nothing:
                run = Run(cell, limits, time.monotonic() + limits.time_s)
                cell.begin("script", [nothing.fileno(), told.fileno(), errors.fileno()])
                run.wait({})
        except (SandboxFailed, Stopped) as error:
            raise SandboxFailed(f"{error} {_last_line(errors.fileno())}".strip()) from error
        finally:
            cell.close()
        answer = os.pread(told.fileno(), 100, 0).decode()
        if answer != "holds":
            raise SandboxFailed(answer or f"its trial failed: {_last_line(errors.fileno())}")


def _last_line(fd: int) -> str:
    lines = os.pread(fd, 10_000, 0).decode(errors="replace").strip().splitlines()
    return f"({lines[-1][:200]})" if lines else ""


def _words(setup: Setup) -> str:
    """The layer with all its parts, short enough for a verdict."""
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


if __name__ == "__main__":
    print(json.dumps(asdict(_try_all(sys.argv[1] if len(sys.argv) > 1 else ""))))
