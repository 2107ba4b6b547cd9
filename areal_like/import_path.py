"""Finds the implementation that a setting names: a registered one, or a user's object by import path."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from areal_like.errors import UserError
from areal_like.import_check import PACKAGES, USER_PATH, check_own_module

T = TypeVar("T")
_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(name: str) -> bool:
    """Whether the name has the form `module:ATTRIBUTE`."""
    return _FORM.fullmatch(name) is not None


def import_object(name: str, where: str) -> Any:
    """Import `module:ATTRIBUTE`; the user's own modules are searched last, in the folder that the run was started in.

    Args:
        name: module and attribute, which may be dotted (`module:Class.method`).
        where: the setting that names it.

    Raises:
        UserError: it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    check_own_module(module_name, where)
    folder = os.environ.get(USER_PATH) or os.getcwd()
    is_ours = module_name.partition(".")[0] in PACKAGES
    if not is_ours and folder not in sys.path:  # a console script starts without the current folder
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        what = f"module {module_name} cannot be imported ({type(error).__name__}: {error})"
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        cause = None if is_missing else error  # only an error of the user's own module needs a traceback
        if is_missing:
            remedy = "put the module into the current folder, or install it"
        else:
            remedy = "correct the error that the module raises when it is imported"
        raise UserError(what, where=where, remedy=remedy) from cause
    found: Any = module
    parts = attribute.split(".")
    for index, part in enumerate(parts):
        names = [word for word in vars(found) if not word.startswith("_")] if hasattr(found, "__dict__") else []
        found = getattr(found, part, None)
        if found is None:
            near = difflib.get_close_matches(part, names, n=1)
            right = ".".join([*parts[:index], *near])
            remedy = f"did you mean {module_name}:{right}?" if near else "fix the name"
            raise UserError(f"module {module_name} has no attribute {attribute}", where=where, remedy=remedy)
    return found


def import_factory(name: str, where: str) -> Any:
    """Import the function or class that creates an implementation. Raises UserError; may import torch."""
    factory = import_object(name, where)
    if not callable(factory):
        raise UserError(f"{name} is not callable", where=where, remedy="specify a function or a class")
    return factory


def check_arguments(name: str, factory: Any, arguments: Mapping[str, Any], where: str) -> None:
    """Check the names of keyword arguments that a user's class or function will be called with.

    Args:
        name: its name in the configuration.
        factory: the callable; one without a signature is not checked.
        arguments: by name.
        where: the setting that contains them.

    Raises:
        UserError: an argument is unknown or missing.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # not callable, or a built-in without a signature
        return
    parameters = [one for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    known = [one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    unknown = [option for option in arguments if option not in known and not takes_all]
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in arguments]
    faults = [
        f"{what}: {', '.join(sorted(names))}" for what, names in (("unknown", unknown), ("missing", missing)) if names
    ]
    if faults:
        remedy = f"use these options: {', '.join(known)}" if known else f"remove all options; {name} has none"
        raise UserError(f"the options of {name} are not valid ({'; '.join(faults)})", where=where, remedy=remedy)


def find_named(name: str, registered: Mapping[str, T], base: type[T], *, noun: str, where: str) -> T:
    """Find the registered object of that name, or the object at an import path.

    Args:
        name: a key of `registered`, or `module:ATTRIBUTE` of an instance of `base` or of a subclass that can be created
            without arguments. registered: the built-in objects by name.
        base: their base class.
        noun: the kind of object, for messages.
        where: the setting that names it.

    Raises:
        UserError: there is none; the message suggests the most similar name.
    """
    if name in registered:
        return registered[name]
    if not is_import_path(name):
        near = difflib.get_close_matches(name.lower(), registered, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"{', '.join(registered)}, or module:ATTRIBUTE"
        raise UserError(f"no {noun} `{name}`", where=where, remedy=remedy)
    found = import_object(name, where)
    if isinstance(found, type) and issubclass(found, base):
        try:
            found = found()
        except Exception as error:  # the user's own code
            what = f"{name} cannot be created without arguments ({error})"
            raise UserError(
                what, where=where, remedy=f"change {name}, so that it can be created without arguments"
            ) from error
    if not isinstance(found, base):
        raise UserError(
            f"{name} is neither an instance nor a subclass of {base.__name__}",
            where=where,
            remedy=f"specify a subclass of {base.__module__}.{base.__name__}",
        )
    return found
