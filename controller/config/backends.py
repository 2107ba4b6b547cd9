"""Access to the descriptor of the run's trainer backend (trainer/backends/*_descriptor.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from areal_like.errors import UserError
from controller.config.problems import Problem
from trainer.backends.descriptor import KIND_KEY, BackendDescriptor
from trainer.backends.descriptor import PassDemand as PassDemand
from trainer.backends.descriptor import Share as Share
from trainer.backends.descriptor import StateDemand as StateDemand
from trainer.backends.layout_faults import layout_faults as layout_faults
from trainer.backends.registry import BACKENDS
from trainer.backends.registry import find_backend as find_backend
from trainer.backends.registry import ranks_fault as ranks_fault
from trainer.backends.replicas import num_replicas as num_replicas
from trainer.backends.replicas import with_replicas as with_replicas

if TYPE_CHECKING:
    from controller.config.run_config import RunConfig

REGISTERED = BACKENDS
"""Backends that come with this program, by `trainer.backend`."""


def backend_of(config: RunConfig) -> BackendDescriptor:
    """The backend of `trainer.backend`. Raises UserError if there is none."""
    return find_backend(config.trainer.backend)


def backend_kind_problems(config: RunConfig) -> Iterator[Problem]:
    """Problem of an unknown backend. All other checks of a configuration depend on the backend."""
    try:
        backend_of(config)
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)
