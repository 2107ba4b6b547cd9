"""What a way to transfer weights declares: the port between trainer, rollout workers and the controller.

Owns: `TransferDescriptor` and the facts it judges. Refuses: which transfers there are (registry.py, transfers/),
sending (trainer/weights/port.py), receiving (rollout/weights/port.py).

The trainer writes every version into its weight store first (trainer/weights/version_writer.py). The sender makes it
available and names its location, which the controller announces to the workers; the receiver of a worker turns the
location into a complete, verified version on its own host. Neither package imports the other: both find their half
here, by an import path that is followed only in the process that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_like.setting_problem import SettingProblem
from areal_like.weights.weight_store import StoreKind

KIND_KEY = "trainer.weights.kind"


class Limit(NamedTuple):
    """Something a transfer cannot do: the reason, and which settings to use instead."""

    reason: str
    remedy: str


class TransferUse(NamedTuple):
    """The job that a transfer is to serve. settings: `trainer.weights`. devices: of all workers and ranks."""

    settings: Any
    devices: frozenset[str]
    is_across_hosts: bool


def _no_problems(use: TransferUse) -> Iterable[SettingProblem]:
    return ()


@dataclass(frozen=True, kw_only=True)
class TransferDescriptor:
    """One way to transfer weights. Its module imports no torch: the controller asks it as well.

    Limits are None where there is none.
    """

    name: str
    sender: str = ""
    """Import path of the trainer's half, called as `make(spec, settings)` for a trainer.weights.port.Sender; empty: the
    weight store's files are all there is, and a version's location is the path of its manifest."""
    receiver: str = "rollout.weights.receiver:make_receiver"
    """Import path of the worker's half, called as `make(spec, make_wire)` for a rollout.weights.port.Receiver."""
    scheme: str = ""
    """What every location begins with, such as `tcp://`; empty: locations are paths of manifests. A receiver is asked
    for locations of its scheme only: an evaluation announces the path of a manifest whatever the transfer."""
    place: StoreKind = "shm"
    """Where the weight store is: in shared memory where it has room, or on disk."""
    layout: StoreKind = "disk"
    """Format of a full version's payload; with deltas always safetensors (`disk`)."""
    is_store_on_trainer_node: bool = False
    """On a cluster the store is in the memory of the trainer's node, where only the trainer reads it, not in the run
    folder."""
    needs_shared_dir: bool = False
    """Between hosts `trainer.weights.shared_dir` has to name a folder that all of them see."""
    needs_process_group: bool = False
    """Engines take part in a process group of torch, each with a rank for every device."""
    own_keys: tuple[str, ...] = ()
    """Keys of `trainer.weights` that it reads and not every transfer does: with others they have no effect."""
    cannot_cross_hosts: Limit | None = None
    """Trainer and workers have to be on one host."""
    cannot_send_deltas: Limit | None = None
    """It does not combine with `delta`."""
    cannot_swap_rolling: Limit | None = None
    """It does not combine with `swap: rolling`."""
    cannot_drain: Limit | None = None
    """It does not combine with `rollout.interruption: drain`."""
    cannot_share_devices: Limit | None = None
    """It does not combine with `placement: colocated`."""
    problems: Callable[[TransferUse], Iterable[SettingProblem]] = _no_problems
    """What else is wrong with a job that is to use it."""
