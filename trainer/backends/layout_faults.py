"""What is wrong with an arrangement of ranks: replicas, ranks that share sequences, ranks that split matrices. Pure.

Attention heads, which depend on the model, are checked in trainer/model/sequence_group.py and tensor_split.py, and by
the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainer.backends.descriptor import KIND_KEY, REPLICAS_KEY, SEQUENCE_KEY, TENSOR_KEY, BackendDescriptor
from trainer.backends.registry import BACKENDS
from trainer.config import TrainerSettings

RANKS_KEY = "trainer.ranks"
LORA_KEY = "trainer.lora"


class LayoutFault(NamedTuple):
    """Why ranks cannot be arranged. keys: the setting, and the one that contradicts."""

    keys: tuple[str, str]
    what: str
    remedy: str


def layout_faults(descriptor: BackendDescriptor, settings: TrainerSettings) -> Iterator[LayoutFault]:
    """Yield why `sequence_parallel`, `tensor_parallel` and `fsdp.replicas` cannot be used with a backend, its number of
    ranks, and each other."""
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
    yield from _tensor_faults(descriptor, settings)


def _tensor_faults(descriptor: BackendDescriptor, settings: TrainerSettings) -> Iterator[LayoutFault]:
    tensor, replicas, ranks = settings.tensor_parallel, settings.fsdp.replicas, settings.ranks
    if tensor == 1:
        return
    if not descriptor.splits_matrices:
        able = [backend.name for backend in BACKENDS.values() if backend.splits_matrices]
        what = f"the backend {descriptor.name} cannot split matrices over ranks"
        yield LayoutFault((TENSOR_KEY, KIND_KEY), what, f"{KIND_KEY}: {' or '.join(able)}, or tensor_parallel: 1")
    elif ranks % tensor:
        what = f"{ranks} rank{'s' * (ranks > 1)} cannot form groups of {tensor} that split matrices"
        remedy = f"use a multiple of {tensor} ranks, or tensor_parallel: {_divisors(ranks)}"
        yield LayoutFault((TENSOR_KEY, RANKS_KEY), what, remedy)
    elif ranks % replicas == 0 and ranks // replicas % tensor:
        own = ranks // replicas
        what = f"a replica of {own} rank{'s' * (own > 1)} cannot form groups of {tensor} that split matrices"
        remedy = f"use a multiple of {tensor * replicas} ranks, or tensor_parallel: {_divisors(own)}"
        yield LayoutFault((TENSOR_KEY, REPLICAS_KEY), what, remedy)
    if settings.sequence_parallel > 1:
        what = "ranks that split matrices already share each micro-batch"
        yield LayoutFault((TENSOR_KEY, SEQUENCE_KEY), what, "set tensor_parallel: 1 or sequence_parallel: 1")
    if settings.lora is not None:
        what = "an adapter cannot be trained by ranks that split matrices"
        yield LayoutFault((TENSOR_KEY, LORA_KEY), what, "set tensor_parallel: 1 or lora: null")
    if settings.router_replay:
        what = "a mixture of experts cannot be trained by ranks that split matrices"
        yield LayoutFault((TENSOR_KEY, "trainer.router_replay"), what, "set tensor_parallel: 1")


def _divisors(ranks: int) -> str:
    return ", ".join(str(one) for one in range(1, ranks + 1) if ranks % one == 0)
