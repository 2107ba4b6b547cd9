"""The process that judges programs for one scoring process, apart from its memory and its threads.

    python -m services.reward.judging.supervisor --fd N

It chooses the sandbox at the start, then judges one program at a time and ensures that no process of it is left. It
uses the standard library only, and executes nothing that a row or a model supplies. Messages are length-prefixed JSON:
a request of the scoring process, a reply of this process. Messages are length-prefixed JSON; the scoring process sends,
this process answers, one for one.

After a reply only the idle cell for tests is left: the judge ends the sandboxes (if this process dies, the kernel does,
through parent-death signals and process namespaces), and orphans become children of this process, which kills and reaps
them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from services.reward.judging.judge import Judge
from services.reward.judging.problem import Task
from services.reward.sandbox.cell import END_TIMEOUT_S, START_TIMEOUT_S, SandboxFailed
from services.reward.sandbox.layers import LAYERS, LayerMissing, find_sandbox
from services.reward.sandbox.usage import children_of

LENGTH_BYTES = 4
ROOM_S = 2 * START_TIMEOUT_S + END_TIMEOUT_S
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SUBREAPER = 1, 4, 36


def send(stream: socket.socket, message: dict[str, Any]) -> None:
    """Send one message, as JSON in ASCII, which can represent any text."""
    body = json.dumps(message).encode()
    stream.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def receive(stream: socket.socket) -> dict[str, Any] | None:
    """Receive the next message; None at the end of the stream."""
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
    """Have this process killed with its parent, and protect its memory, which contains tests and expected results, from
    other processes of this user."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getppid()
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _end_orphans(known: set[int]) -> None:
    """Kill and reap every child that is not `known`: orphans of a program or its tests."""
    give_up_s = time.monotonic() + END_TIMEOUT_S
    while (orphans := set(children_of(os.getpid())) - known) and time.monotonic() < give_up_s:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


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
    judge = Judge(sandbox)
    with contextlib.suppress(SandboxFailed):  # the first program reports it
        judge.warm_up()
    gc.collect()
    gc.freeze()
    while (message := receive(stream)) is not None:
        answer = judge.judge(Task.of(message))
        _end_orphans(judge.pids)
        send(stream, answer)
    judge.close()
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
    except ConnectionError:  # the scoring process has exited
        sys.exit(1)


if __name__ == "__main__":
    main()
