"""Runs one start of a trainer on recorded batches: its processes, in a scratch folder, and the events they report.

What a start does is in trainer/replay/player.py. The other ranks are ordinary ranks of a trainer, which follow rank 0
and have no other connection.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError
from areal_like.wire.batch_stream import write_batch
from areal_like.wire.messages import Batch
from controller.runs.replay.child import child_error, start_child
from controller.wiring.process_specs import MODULES
from controller.wiring.replay import REPLAY, ReplaySpec, in_scratch

END_S = 30.0
"""Time for a process to exit after its last event."""
Event = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """One start of a trainer. specs: the recorded ones, by rank. checkpoint: where it starts; None: the starting model.
    home: the folder in which the run was started. The rest as in ReplaySpec.
    """

    specs: tuple[ProcessSpec, ...]
    num_threads: int
    home: Path
    checkpoint: Path | None
    last_step: int
    saves_at: tuple[int, ...] = ()
    policies_at: tuple[int, ...] = ()
    has_export: bool = False
    has_gradients: bool = False
    min_ess: float | None = None


def play(order: Order, scratch: Path, batch_of: Callable[[int], Batch]) -> Iterator[Event]:
    """Run the start and yield its events, until it has ended. Closing the iterator kills its processes.

    Args:
        order: what to run.
        scratch: a new folder for its files.
        batch_of: the recorded batch of a step.

    Raises:
        UserError: the trainer reports a user's mistake, such as a model that is gone.
        OperationError: it failed.
        LedgerError: a batch cannot be read.
    """
    scratch.mkdir(parents=True)
    address = f"file://{scratch / secrets.token_hex(4)}"
    specs = [in_scratch(spec, scratch, order.checkpoint, address) for spec in order.specs]
    with ExitStack() as stack:
        for rank, spec in enumerate(specs[1:], start=1):
            spec.save(scratch / f"trainer-{rank}.spec.json")
            words = [MODULES["trainer"], "--spec", str(scratch / f"trainer-{rank}.spec.json")]
            start_child(words, order.num_threads, order.home, scratch / f"trainer-{rank}.log", stack)
        spec_path, log = scratch / "replay.spec.json", scratch / "replay.log"
        _replay_spec(order, specs[0]).save(spec_path)
        words = [REPLAY, "--spec", str(spec_path)]
        leader = start_child(words, order.num_threads, order.home, log, stack, has_pipes=True)
        yield from _events(leader, batch_of)
        try:
            status = leader.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise OperationError(
                f"the replay process closed its output, but did not exit within {END_S:g} s; run the command again"
            ) from error
        if status:
            raise child_error(status, log, "the trainer of the replay")


def _replay_spec(order: Order, spec: ProcessSpec) -> ReplaySpec:
    return ReplaySpec(
        run_id=spec.run_id,
        parent_pid=spec.parent_pid,
        seed=spec.seed,
        num_threads=order.num_threads,
        trainer=spec,
        last_step=order.last_step,
        saves_at=order.saves_at,
        policies_at=order.policies_at,
        has_export=order.has_export,
        has_gradients=order.has_gradients,
        min_ess=order.min_ess,
    )


def _events(process: subprocess.Popen[bytes], batch_of: Callable[[int], Batch]) -> Iterator[Event]:
    """Yield the events, and answer each `want` with a batch."""
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["kind"] == "want":
            _send(process.stdin, batch_of(event["step"]))
        else:
            yield event


def _send(stream: IO[bytes], batch: Batch) -> None:
    with suppress(BrokenPipeError):  # it has ended: its exit status says why
        write_batch(stream, batch)  # type: ignore[arg-type]
