"""What is wrong with an arrangement of ranks: how many replicas, and how many ranks that share sequences. Pure.

Attention heads, which depend on the model, are checked in trainer/model/sequence_group.py and by the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainer.backends.descriptor import KIND_KEY, REPLICAS_KEY, SEQUENCE_KEY, BackendDescriptor
from trainer.backends.registry import BACKENDS
from trainer.config import TrainerSettings

RANKS_KEY = "trainer.ranks"


class LayoutFault(NamedTuple):
    """Why ranks cannot be arranged. keys: the setting, and the one that contradicts."""

    keys: tuple[str, str]
    what: str
    remedy: str


def layout_faults(descriptor: BackendDescriptor, settings: TrainerSettings) -> Iterator[LayoutFault]:
    """Yield why `fsdp.replicas` and `sequence_parallel` cannot be used with a backend and its number of ranks."""
    size, replicas, ranks = settings.sequence_parallel, settings.fsdp.replicas, settings.ranks
    if size > 1 and not descriptor.splits_sequences:
        able = [backend.name for backend in BACKENDS.values() if backend.splits_sequences]
        what = f"the backend {descriptor.name} cannot split a sequence over ranks"
        yield LayoutFault((SEQUENCE_KEY, KIND_KEY), what, f"{KIND_KEY}: {' or '.join(able)}, or sequence_parallel: 1")
    elif ranks % size:
        what = f"{ranks} ranks cannot form groups of {size}"
        remedy = f"use a multiple of {size} ranks, or sequence_parallel: {_divisors(ranks)}"
        yield LayoutFault((SEQUENCE_KEY, RANKS_KEY), what, remedy)
    if replicas > 1 and not descriptor.replicates_shards:
        able = [backend.name for backend in BACKENDS.values() if backend.replicates_shards]
        what = f"the backend {descriptor.name} cannot keep {replicas} sharded copies of the model"
        yield LayoutFault((REPLICAS_KEY, KIND_KEY), what, f"{KIND_KEY}: {' or '.join(able)}, or replicas: 1")
    elif ranks % replicas:
        what = f"{ranks} rank{'s' * (ranks > 1)} cannot form {replicas} groups of equal size"
        remedy = f"use a multiple of {replicas} ranks, or replicas: {_divisors(ranks)}"
        yield LayoutFault((REPLICAS_KEY, RANKS_KEY), what, remedy)


def _divisors(ranks: int) -> str:
    return ", ".join(str(one) for one in range(1, ranks + 1) if ranks % one == 0)
