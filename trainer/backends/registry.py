"""The built-in trainer backends. Imports no torch: a backend is imported by the ranks only.

To add a backend, add a line to BACKENDS.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_like.import_path import find_named
from trainer.backends.auto_descriptor import AUTO
from trainer.backends.descriptor import KIND_KEY, BackendDescriptor
from trainer.backends.fsdp_descriptor import FSDP
from trainer.backends.torch_descriptor import TORCH
from trainer.backends.zero_descriptor import ZERO

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


def ranks_fault(descriptor: BackendDescriptor, ranks: int) -> tuple[str, str] | None:
    """Return why a backend cannot train with this number of ranks, and the remedy; None if it can."""
    if descriptor.max_ranks is None or ranks <= descriptor.max_ranks:
        return None
    most = "one process" if descriptor.max_ranks == 1 else f"at most {descriptor.max_ranks} processes"
    *others, last = [backend.name for backend in BACKENDS.values() if backend.max_ranks is None]
    what = f"the backend {descriptor.name} supports {most}, but trainer.ranks is {ranks}"
    return what, f"set {KIND_KEY} to {', '.join(others)} or {last}"
