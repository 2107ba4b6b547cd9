"""Finds the class that `reward.environment.kind` names, and checks it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_like.environment import Environment
from areal_like.errors import UserError
from areal_like.import_path import check_arguments, import_object, is_import_path
from services.environment.config import BUILT_IN_ENVIRONMENTS

WHERE = "reward.environment.kind"
OPTIONS = "reward.environment.options"
EXPECTED = "a class with reset(self, row, seed) and step(self, action)"


def name_fault(kind: str) -> tuple[str, str] | None:
    """The fault of a kind and its remedy, as far as its name shows; None: no fault."""
    if kind in BUILT_IN_ENVIRONMENTS or is_import_path(kind):
        return None
    near = difflib.get_close_matches(kind, BUILT_IN_ENVIRONMENTS, n=1)
    known = f"{', '.join(BUILT_IN_ENVIRONMENTS)}, or module:Class"
    return f"there is no environment `{kind}`", f"did you mean {near[0]}?" if near else known


def find_environment(kind: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """The callable that creates an environment for each episode.

    Args:
        kind: a built-in environment, or `module:Class`.
        options: keyword arguments of its constructor.

    Raises:
        UserError: it cannot be imported, or does not have the interface of an environment.
    """
    if fault := name_fault(kind):
        raise UserError(fault[0], where=WHERE, remedy=fault[1])
    made = import_object(BUILT_IN_ENVIRONMENTS.get(kind, kind), WHERE)
    if not callable(made):
        raise UserError(f"{kind} is not callable", where=WHERE, remedy=f"use {EXPECTED}")
    check_arguments(kind, made, options, OPTIONS)
    return lambda: made(**options)


def check_environment(kind: str, options: dict[str, Any]) -> None:
    """Import and create an environment, as an environment process does first. Raises UserError."""
    make = find_environment(kind, options)
    try:
        environment = make()
    except UserError:
        raise
    except Exception as error:  # the user's own code
        raise UserError(f"{kind} cannot be created with these options ({type(error).__name__}: {error})",
                        where=OPTIONS) from error  # fmt: skip
    _check_methods(kind, environment)


def _check_methods(kind: str, environment: Any) -> None:
    for name, arguments in (("reset", ({}, 0)), ("step", ("",))):
        method = getattr(environment, name, None)
        if not callable(method):
            raise UserError(f"{kind} has no method `{name}`", where=WHERE, remedy=f"use {EXPECTED}")
        try:
            signature = inspect.signature(method)
            signature.bind(*arguments)
        except TypeError as error:
            what = (
                f"`{name}` of {kind} cannot be called with the required arguments ({error}); its signature is "
                f"{signature}"
            )
            raise UserError(what, where=WHERE, remedy=f"use {EXPECTED}") from None
        except ValueError:  # some built-in callables have no signature: the first episode checks them
            continue
