"""The process in which tests that are code run: in a sandbox of its own, apart from the program and from the service.

Owns: the connection to the judge, the answer. Refuses: everything that needs trust: what a row supplies (tests, set-up,
prompt) is executed here, so this process is given nothing but the row's tests, and may ask for nothing but runs of the
one program.

Messages, each with one letter in front: from the judge `t` the tests (JSON), `m` a message of the program, `x` why the
program answers no more, `n` no program (the time is over). To the judge `o` a new process of the program, `a` a request
to it, `f` what was found (JSON).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from typing import Any

from services.reward.judging.assertions import Conditions, judge_asserts
from services.reward.judging.problem import Asserts, Unjudgeable
from services.reward.judging.program import LateProgram, ProgramOver
from services.reward.sandbox.inside_answering import PLAIN_MODULES

LENGTH_BYTES = 4


class Judge:
    """The judge outside, as the tests see it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def tests(self) -> dict[str, Any]:
        """What is to be judged."""
        fields: dict[str, Any] = json.loads(self._receive()[1])
        return fields

    def open_program(self) -> bytes:
        """Start a new process of the program: its first message. Raises ProgramOver, LateProgram."""
        return self._answer_to(b"o")

    def ask_program(self, request: bytes) -> bytes:
        """Send a request to the program: its answer. Raises ProgramOver."""
        return self._answer_to(b"a" + request)

    def report(self, findings: dict[str, Any]) -> None:
        """The end."""
        self._send(b"f" + json.dumps(findings).encode())

    def _answer_to(self, message: bytes) -> bytes:
        self._send(message)
        kind, body = self._receive()
        if kind == b"x":
            raise ProgramOver(body.decode())
        if kind == b"n":
            raise LateProgram
        return body

    def _send(self, message: bytes) -> None:
        self._channel.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)

    def _receive(self) -> tuple[bytes, bytes]:
        message = self._exactly(int.from_bytes(self._exactly(LENGTH_BYTES), "big"))
        return message[:1], message[1:]

    def _exactly(self, num_bytes: int) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            chunk = self._channel.recv(min(num_bytes - len(content), 1 << 20))
            if not chunk:
                os._exit(1)
            content += chunk
        return bytes(content)


def prepare() -> None:
    """Import once what tests lean on, in the process that those of all programs are forked from."""
    for name in PLAIN_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(channel_fd: int) -> None:
    """Judge one program by the tests that come first."""
    judge = Judge(socket.socket(fileno=channel_fd))
    sys.argv[:] = ["tests.py"]
    fields = judge.tests()
    problem = Asserts(**{**fields["problem"], "tests": tuple(fields["problem"]["tests"])})
    conditions = Conditions(judge, fields["partial_credit"], fields["float_tolerance"])
    try:
        findings = judge_asserts(problem, conditions).as_dict()
    except Unjudgeable as error:
        findings = {"unjudgeable": str(error)}
    judge.report(findings)
    os._exit(0)  # threads and exit handlers of the tests have no more say
