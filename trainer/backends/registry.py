"""The trainer backends that come with this program. Torch-free: a backend itself is imported by the ranks only.

Owns: from `trainer.backend` to a descriptor. Refuses: knowing anything else of a backend. A new one is a line in
BACKENDS.
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
"""By `trainer.backend`."""


def find_backend(name: str) -> BackendDescriptor:
    """The backend of that name, or the one at an import path. Raises UserError where there is none.

    Example:
        >>> find_backend("deepspeed").section
        'deepspeed'
    """
    return find_named(name, BACKENDS, BackendDescriptor, noun="trainer backend", where=KIND_KEY)


def ranks_fault(descriptor: BackendDescriptor, ranks: int) -> tuple[str, str] | None:
    """Why a backend cannot train with so many ranks, and what to do; None where it can."""
    if descriptor.max_ranks is None or ranks <= descriptor.max_ranks:
        return None
    most = "one process" if descriptor.max_ranks == 1 else f"at most {descriptor.max_ranks} processes"
    *others, last = [backend.name for backend in BACKENDS.values() if backend.max_ranks is None]
    what = f"backend {descriptor.name} trains in {most}, and trainer.ranks is {ranks}"
    return what, f"{KIND_KEY}: {', '.join(others)} or {last}"
