"""Helpers that the adapters share: finding an action in a text, and checks of required packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from areal_like.errors import UserError

OPTIONS = "reward.environment.options"
KIND = "reward.environment.kind"


def require(module: str, package: str, extra: str) -> None:
    """Raise UserError if a package is missing, with the extra that installs it."""
    if find_spec(module) is None:
        remedy = f"pip install 'areal-like[{extra}]'"
        raise UserError(f"the package {package} is not installed", where=KIND, remedy=remedy)


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """Check an option that is a dict of keyword arguments; None: an empty one. Raises UserError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        what = f"{name} must be a mapping, not {value!r}"
        raise UserError(
            what, where=f"{OPTIONS}.{name}", remedy="write a mapping of names to values, for example {size: 4}"
        )
    return dict(value)


class ActionPattern:
    """Finds the action in a policy's text of one turn: the last match of a pattern, or the whole text."""

    def __init__(self, pattern: str | None) -> None:
        """Args:
            pattern: a regular expression, whose first group is the action (without groups: the match); None: the action
                is the whole text.

        Raises:
            UserError: the pattern is not a regular expression.
        """
        self._pattern = None
        if pattern is None:
            return
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            what = f"{pattern!r} is not a valid regular expression ({error})"
            raise UserError(
                what, where=f"{OPTIONS}.pattern", remedy="use a pattern such as '<move>(.*?)</move>'"
            ) from error

    def find(self, text: str) -> str | None:
        """The action without surrounding white space; None: there is none.

        Example:
            >>> ActionPattern(r"\\[(.*?)\\]").find("Left [left] or [ right ]?")
            'right'
        """
        if self._pattern is None:
            return text.strip() or None
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        return (matches[-1].group(min(self._pattern.groups, 1)) or "").strip() or None
