"""Implementations of one kind by name: the ones that come with this program, and a user's own by import path.

Owns: `Registry`, `load_object`, the error for a name that nothing has. Refuses: what an implementation declares (its
kind's descriptor class), calling it.

Importing this module, or making a registry, imports no implementation: `find` imports the one that is named. So a
descriptor is imported by every process that asks it, the controller among them, and its factories only where they run.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from areal_like.errors import UserError
from areal_like.import_check import USER_PATH, check_own_module

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:ATTRIBUTE`"""
Entry = TypeVar("Entry")


def load_object(path: str, where: str) -> Any:
    """Import what `module:ATTRIBUTE` names.

    Args:
        path: dotted module, colon, attribute. A module of the user's is looked for in the user's folder last of all.
        where: the configuration key that named it, for messages.

    Returns:
        The attribute.

    Raises:
        UserError: the module cannot be imported or lacks the attribute.
    """
    module_name, _, attribute = path.partition(":")
    folder = os.environ.get(USER_PATH) or str(Path.cwd())
    if folder not in sys.path:  # the console script starts without the current folder
        sys.path.append(folder)
    check_own_module(module_name, where)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        what = f"module {module_name} cannot be imported ({type(error).__name__}: {error})"
        raise UserError(what, where=where, remedy="fix the module, or the name") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, [name for name in vars(module) if name[0] != "_"], n=1)
        remedy = f"did you mean {module_name}:{near[0]}?" if near else "fix the name"
        raise UserError(f"module {module_name} has no {attribute}", where=where, remedy=remedy)
    return getattr(module, attribute)


class Registry(Generic[Entry]):
    """Descriptors of one kind of implementation."""

    def __init__(self, entry: type[Entry], *, noun: str, where: str, built_in: Mapping[str, str]) -> None:
        """`noun` and `where`: what an entry is called in messages, and the key of the configuration that names one.
        `built_in`: the import path of each descriptor that comes with this program, by name.
        """
        self._entry, self._noun, self._where = entry, noun, where
        self._built_in = dict(built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the implementations that come with this program."""
        return tuple(self._built_in)

    def __contains__(self, name: str) -> bool:
        """True for the name of an implementation that comes with this program."""
        return name in self._built_in

    def __iter__(self) -> Iterator[Entry]:
        """The descriptors of the implementations that come with this program."""
        return map(self.find, self._built_in)

    def find(self, name: str) -> Entry:
        """The descriptor of a name, or of an import path. Raises UserError."""
        if name not in self._built_in and IMPORT_PATH.fullmatch(name) is None:
            near = difflib.get_close_matches(name.lower(), self._built_in, n=1)
            every = f"{', '.join(self._built_in)}, or the import path of a descriptor, module:ATTRIBUTE"
            remedy = f"did you mean {near[0]}?" if near else every
            raise UserError(f"no {self._noun} `{name}`", where=self._where, remedy=remedy)
        found = load_object(self._built_in.get(name, name), self._where)
        if not isinstance(found, self._entry):
            what = f"{name} is of type {type(found).__name__}"
            raise UserError(what, where=self._where, remedy=f"name an instance of {self._entry.__name__}")
        return found
