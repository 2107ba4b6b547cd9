"""The scoring process's end of a supervisor: starts it, sends it programs, and replaces it when it is lost."""

from __future__ import annotations

import atexit
import contextlib
import socket
import subprocess
import sys
from typing import Any

from services.reward.judging.problem import Task
from services.reward.judging.supervisor import ROOM_S, receive, send
from services.reward.sandbox.deadline import Deadline

START_TIMEOUT_S = 180.0
ANSWER_ROOM_S = ROOM_S + 15.0


class NoSandbox(Exception):
    """No layer of the required strength works on this machine."""


class JudgeLost(Exception):
    """The supervisor exited or hung; a new one is started for the next program."""


class Judges:
    """Judges one program at a time. `start` before the first."""

    def __init__(self, required: str, python: str = "", allowed: tuple[str, ...] = ()) -> None:
        """`allowed`: the only layers to try; empty for all."""
        self._wanted = {"required": required, "python": python, "allowed": list(allowed)}
        self._child: subprocess.Popen[bytes] | None = None
        self._stream: socket.socket | None = None
        self.layer, self.words = "", ""
        """The layer that programs run in, and a description of its parts."""

    def start(self) -> None:
        """Start the supervisor and let it choose a sandbox. Raises NoSandbox, JudgeLost."""
        ours, theirs = socket.socketpair()
        isolation = ["-P"] if sys.flags.safe_path else []
        try:
            self._child = subprocess.Popen(
                [sys.executable, *isolation, "-m", "services.reward.judging.supervisor", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            ours.close()
            raise JudgeLost(f"the code sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
        self._stream = ours
        atexit.register(self.close)
        reply = self._exchange(self._wanted, START_TIMEOUT_S)
        if "missing" in reply:
            self.close()
            raise NoSandbox(str(reply["missing"]))
        self.layer, self.words = str(reply["layer"]), str(reply["words"])

    def judge(self, task: Task) -> dict[str, Any]:
        """The result of `judging.judge.Judge.judge`. Raises JudgeLost."""
        if self._stream is None:
            self.start()
        return self._exchange(task.as_dict(), Deadline(task.total_limit_s).wall_s + ANSWER_ROOM_S)

    def close(self) -> None:
        """End the supervisor and the program that it judges."""
        atexit.unregister(self.close)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            self._child.wait()
            self._child = None

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._stream is not None, "start comes first"
        self._stream.settimeout(timeout_s)
        try:
            send(self._stream, message)
            answer = receive(self._stream)
        except (OSError, ValueError) as error:
            self.close()
            raise JudgeLost(f"the connection to the code sandbox failed ({type(error).__name__}: {error})") from error
        if answer is None:
            self.close()
            raise JudgeLost("the code sandbox closed its connection unexpectedly")
        return answer
