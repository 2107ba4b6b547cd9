"""What the controller asks of the trainer backend that a run has, through its descriptor.

Owns: which descriptor, that there is one. Refuses: knowing anything of a backend (trainer/backends/*_descriptor.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from areal_like.errors import UserError
from controller.config.problems import Problem
from trainer.backends.descriptor import KIND_KEY, BackendDescriptor
from trainer.backends.descriptor import PassDemand as PassDemand
from trainer.backends.descriptor import StateDemand as StateDemand
from trainer.backends.registry import BACKENDS, find_backend
from trainer.backends.registry import ranks_fault as ranks_fault

if TYPE_CHECKING:
    from controller.config.run_config import RunConfig

REGISTERED = BACKENDS
"""Backends that come with this program, by `trainer.backend`."""


def backend_of(config: RunConfig) -> BackendDescriptor:
    """The backend of `trainer.backend`. Raises UserError where there is none."""
    return find_backend(config.trainer.backend)


def backend_kind_problems(config: RunConfig) -> Iterator[Problem]:
    """That there is no such backend. Everything else about a configuration asks for it."""
    try:
        backend_of(config)
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)
