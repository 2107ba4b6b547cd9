"""The built-in trainer backends. Imports no torch: a backend is imported by the ranks only.

To add a backend, add a line to BACKENDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from areal_like.import_path import find_named
from trainer.backends.auto_descriptor import AUTO
from trainer.backends.descriptor import KIND_KEY, BackendDescriptor
from trainer.backends.fsdp_descriptor import FSDP
from trainer.backends.torch_descriptor import TORCH
from trainer.backends.zero_descriptor import ZERO
from trainer.config import TrainerSettings

BACKENDS: Mapping[str, BackendDescriptor] = {
    backend.name: backend
    for backend in (
        TORCH,
        FSDP,
        ZERO,
        AUTO,
    )
}
"""Built-in backends by `trainer.backend`."""


def find_backend(name: str) -> BackendDescriptor:
    """Return the backend of that name, or the one at an import path. Raises UserError if there is none.

    Example:
        >>> find_backend("deepspeed").section
        'deepspeed'
    """
    return find_named(name, BACKENDS, BackendDescriptor, noun="trainer backend", where=KIND_KEY)


class SequenceFault(NamedTuple):
    """Why ranks cannot share sequences. key: the other key that contradicts."""

    key: str
    what: str
    remedy: str


def sequence_fault(descriptor: BackendDescriptor, settings: TrainerSettings) -> SequenceFault | None:
    """Return why `sequence_parallel` cannot be used with a backend and its number of ranks; None if it can."""
    size, ranks = settings.sequence_parallel, settings.ranks
    if size == 1:
        return None
    if not descriptor.splits_sequences:
        able = [backend.name for backend in BACKENDS.values() if backend.splits_sequences]
        what = f"the backend {descriptor.name} cannot split a sequence over ranks"
        return SequenceFault(KIND_KEY, what, f"{KIND_KEY}: {' or '.join(able)}, or sequence_parallel: 1")
    if ranks % size:
        divisors = ", ".join(str(one) for one in range(1, ranks + 1) if ranks % one == 0)
        what = f"{ranks} ranks cannot form groups of {size}"
        return SequenceFault("trainer.ranks", what, f"use a multiple of {size} ranks, or sequence_parallel: {divisors}")
    return None


def ranks_fault(descriptor: BackendDescriptor, ranks: int) -> tuple[str, str] | None:
    """Return why a backend cannot train with this number of ranks, and the remedy; None if it can."""
    if descriptor.max_ranks is None or ranks <= descriptor.max_ranks:
        return None
    most = "one process" if descriptor.max_ranks == 1 else f"at most {descriptor.max_ranks} processes"
    *others, last = [backend.name for backend in BACKENDS.values() if backend.max_ranks is None]
    what = f"the backend {descriptor.name} supports {most}, but trainer.ranks is {ranks}"
    return what, f"set {KIND_KEY} to {', '.join(others)} or {last}"
