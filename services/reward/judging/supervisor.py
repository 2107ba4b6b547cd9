"""The process that judges programs for one scoring process: it forks a judge for each, and outlives them.

    python -m services.reward.judging.supervisor --fd N

Owns: the sandbox's choice at the start, one judge at a time, what a judge's death means. Refuses: everything that needs
more than the standard library: it stays small, so that forking it costs little, and single-threaded, so that forking it
is safe. Messages are length-prefixed JSON; the scoring process sends, this process answers, one for one.

Nothing outlives an answer: judges are killed with their sandboxes (the kernel sees to it through parent-death signals
and process namespaces), and what is orphaned meanwhile becomes a child of this process, is ended and reaped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from services.reward.judging.judge import judge
from services.reward.judging.problem import Task
from services.reward.sandbox.cell import END_TIMEOUT_S, START_TIMEOUT_S
from services.reward.sandbox.inside_answering import PLAIN_MODULES
from services.reward.sandbox.layers import LAYERS, LayerMissing, Sandbox, find_sandbox
from services.reward.sandbox.usage import children_of

LENGTH_BYTES = 4
MAX_RESULT_BYTES = 1 << 20
ROOM_S = 2 * START_TIMEOUT_S + END_TIMEOUT_S
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SUBREAPER = 1, 4, 36
_OVERPOWERED = {
    signal.SIGALRM: "its tests computed without end with what it answered",
    signal.SIGSEGV: "its tests broke over what it answered",
    signal.SIGABRT: "its tests broke over what it answered",
    signal.SIGBUS: "its tests broke over what it answered",
}
"""Deaths of a judge that only a program's answers bring about."""


def send(stream: socket.socket, message: dict[str, Any]) -> None:
    """One message. Text of any kind survives: JSON in ASCII."""
    body = json.dumps(message).encode()
    stream.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def receive(stream: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    prefix = _exactly(stream, LENGTH_BYTES)
    body = _exactly(stream, int.from_bytes(prefix, "big")) if prefix is not None else None
    message: dict[str, Any] | None = json.loads(body) if body is not None else None
    return message


def _exactly(stream: socket.socket, num_bytes: int) -> bytes | None:
    content = bytearray()
    while len(content) < num_bytes:
        chunk = stream.recv(min(num_bytes - len(content), 1 << 20))
        if not chunk:
            return None
        content += chunk
    return bytes(content)


def protect_process() -> None:
    """Die with the parent; nobody of our user reads our memory (tests and expected results lie in it)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getppid()
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def judge_apart(task: Task, sandbox: Sandbox) -> dict[str, Any]:
    """Fork a judge and wait for its answer, and for the end of all it started."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _be_judge(task, sandbox, write_fd)
    os.close(write_fd)
    told = _read_until_end(read_fd, time.monotonic() + task.total_limit_s + ROOM_S)
    os.close(read_fd)
    if told is None:
        _kill(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _end_orphans()
    if told and status == 0:
        findings: dict[str, Any] = json.loads(told)
        return findings
    if status < 0 and signal.Signals(-status) in _OVERPOWERED:
        return {"num_tests": 1, "num_passed": 0, "failures": [_OVERPOWERED[signal.Signals(-status)]], "weaker": []}
    return {"failed": "the judge hung" if told is None else f"the judge ended with status {status}"}


def _be_judge(task: Task, sandbox: Sandbox, write_fd: int) -> None:
    status = 1
    try:
        protect_process()
        answer = json.dumps(judge(task, sandbox)).encode()
        while answer:
            answer = answer[os.write(write_fd, answer) :]
        status = 0
    except BaseException as error:  # told on stderr, and as a status
        print(f"error: a judge failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _read_until_end(fd: int, until_s: float) -> bytes | None:
    """All that comes until the other end closes; None when it does not."""
    content = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(content) < MAX_RESULT_BYTES:
        if not poll.poll(max(until_s - time.monotonic(), 0.0) * 1000):
            return None
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return bytes(content)
        content += chunk
    return None


def _end_orphans() -> None:
    """Whatever a judge left is ours now, and goes."""
    give_up_s = time.monotonic() + END_TIMEOUT_S
    while (orphans := children_of(os.getpid())) and time.monotonic() < give_up_s:
        for pid in orphans:
            _kill(pid)
        time.sleep(0.002)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def serve(stream: socket.socket) -> int:
    """Choose a sandbox, then judge until the stream ends. Returns the exit status."""
    wanted = receive(stream)
    if wanted is None:
        return 1
    try:
        sandbox = find_sandbox(wanted["required"], tuple(wanted.get("allowed") or LAYERS), wanted["python"])
    except LayerMissing as error:
        send(stream, {"missing": str(error)})
        return 2
    send(stream, {"layer": sandbox.layers.chosen, "words": sandbox.layers.words})
    for name in PLAIN_MODULES:  # tests lean on these; imported once, not in every judge
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while (message := receive(stream)) is not None:
        send(stream, judge_apart(Task.of(message), sandbox))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="services.reward.judging.supervisor")
    parser.add_argument("--fd", type=int, required=True)
    stream = socket.socket(fileno=parser.parse_args().fd)
    stream.setblocking(True)
    os.set_inheritable(stream.fileno(), False)
    protect_process()
    try:
        sys.exit(serve(stream))
    except ConnectionError:  # the scoring process is gone
        sys.exit(1)


if __name__ == "__main__":
    main()
