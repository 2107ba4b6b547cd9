"""The process that draws recorded answers again (rollout/regenerate.py): its start, its orders, and its errors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from areal_like.errors import OperationError, UserError
from areal_like.regenerate_files import Regenerated, RegenerateSpec, VersionOrder
from controller.runs.replay.child import child_error, start_child
from controller.wiring.replay import REGENERATE

END_S = 30.0
"""Time for the process to exit after it has closed its output."""


class EngineProcess(Protocol):
    """What computes the results of orders. device: on which it computes."""

    device: str

    def run(self, order: VersionOrder) -> list[Regenerated]: ...


class _Process:
    """The process, started. Raises UserError, OperationError if it failed."""

    def __init__(self, process: subprocess.Popen[bytes], scratch: Path, log: Path) -> None:
        self._process, self._scratch, self._log = process, scratch, log
        self.device = str(self._answer()["device"])

    def run(self, order: VersionOrder) -> list[Regenerated]:
        """Results of the order's sequences. Raises UserError, OperationError."""
        source = self._scratch / f"version_{order.version}.order"
        source.write_bytes(msgspec.msgpack.encode(order))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its exit status says why
            self._process.stdin.write(f"{source}\n".encode())
            self._process.stdin.flush()
        self._answer()
        target = source.with_suffix(".out")
        found = msgspec.msgpack.decode(target.read_bytes(), type=list[Regenerated])
        source.unlink()
        target.unlink()
        return found

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            found: dict[str, object] = json.loads(line)
            return found
        try:
            raise self._error(self._process.wait(END_S))
        except subprocess.TimeoutExpired as error:
            raise OperationError(
                "the process that regenerates the answers closed its output, but did not exit within "
                f"{END_S:g} s; run the command again"
            ) from error

    def _error(self, status: int) -> UserError | OperationError:
        return child_error(status, self._log, "the process that regenerates the answers")


@contextmanager
def open_engine(spec: RegenerateSpec, home: Path, scratch: Path) -> Iterator[EngineProcess]:
    """Start the process; it is killed at the end. home: the folder in which the run was started."""
    spec_path, log = scratch / "regenerate.spec.json", scratch / "regenerate.log"
    spec.save(spec_path)
    with ExitStack() as stack:
        words = [REGENERATE, "--spec", str(spec_path)]
        yield _Process(start_child(words, spec.num_threads, home, log, stack, has_pipes=True), scratch, log)
