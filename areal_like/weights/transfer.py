"""The descriptor of a weight transfer: the interface between trainer, rollout workers and the controller.

The transfers are listed in registry.py. The sender's interface is trainer/weights/port.py, the receiver's
rollout/weights/port.py.

The trainer writes every version into its weight store first (trainer/weights/version_writer.py). The sender makes it
available and names its location, which the controller announces to the workers; the receiver of a worker turns the
location into a complete, verified version on its own host. Neither package imports the other: each finds its
implementation by an import path, which is imported only in the process that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_like.setting_problem import SettingProblem
from areal_like.weights.payload_layout import StoreKind

KIND_KEY = "trainer.weights.kind"


class Limit(NamedTuple):
    """A combination that a transfer does not support: the reason, and the settings to use instead."""

    reason: str
    remedy: str


class TransferUse(NamedTuple):
    """The configuration in which a transfer is used. settings: `trainer.weights`. devices: of all workers and ranks."""

    settings: Any
    devices: frozenset[str]
    is_across_hosts: bool


def _no_problems(use: TransferUse) -> Iterable[SettingProblem]:
    return ()


@dataclass(frozen=True, kw_only=True)
class TransferDescriptor:
    """Describes one weight transfer. Its module must not import torch, because the controller uses it too.

    Limits are None if there is none.
    """

    name: str
    sender: str = ""
    """Import path of the sender's factory, called as `make(spec, settings)`, which returns a
    trainer.weights.port.Sender; empty: versions are only files of the weight store, and a version's location is the
    path of its manifest."""
    receiver: str = "rollout.weights.receiver:make_receiver"
    """Import path of the receiver's factory, called as `make(spec, make_wire)`, which returns a
    rollout.weights.port.Receiver."""
    scheme: str = ""
    """Prefix of every location, such as `tcp://`; empty: locations are paths of manifests. A receiver gets locations of
    its scheme only: an evaluation announces the path of a manifest whatever the transfer."""
    place: StoreKind = "shm"
    """Kind of weight store: in shared memory if there is room, or on disk."""
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
    """Keys of `trainer.weights` that this transfer uses but not every transfer does; with other transfers they have no
    effect."""
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
    """Returns further problems of a configuration that uses this transfer."""
