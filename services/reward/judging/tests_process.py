"""The process that runs tests that are code: in a separate sandbox, apart from the program and from the service.

Code of a row (tests, set-up, prompt) is executed here, so this process is not trusted: it gets nothing except the row's
tests, and can request nothing except runs of the program.

Messages have one letter as a prefix: from the judge `t` the tests (JSON), `m` a message of the program, `x` why the
program no longer replies, `n` no program (the time has passed). To the judge `o` a new process of the program, `a` a
request to it, `f` the findings (JSON).
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
    """The connection of the tests to the judge outside."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def tests(self) -> dict[str, Any]:
        """Receive the tests."""
        fields: dict[str, Any] = json.loads(self._receive()[1])
        return fields

    def open_program(self) -> bytes:
        """Start a new process of the program; returns its first message. Raises ProgramOver, LateProgram."""
        return self._answer_to(b"o")

    def ask_program(self, request: bytes) -> bytes:
        """Send a request to the program and return its reply. Raises ProgramOver."""
        return self._answer_to(b"a" + request)

    def report(self, findings: dict[str, Any]) -> None:
        """Send the findings."""
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
    """Import the modules that tests use, once, in the process from which all processes of tests are forked."""
    for name in PLAIN_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(channel_fd: int) -> None:
    """Receive the tests of one program, and run them."""
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
    os._exit(0)  # skips threads and exit handlers of the tests
