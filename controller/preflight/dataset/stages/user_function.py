"""A stage of the user: a function of a row that returns why it is removed.

A subclass of RowStage or SetStage (port.py) can be named as well, for options and for stages that compare rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_like.errors import OperationError
from areal_like.import_path import check_arguments
from controller.preflight.dataset.port import Finding, NoOptions, Row, RowStage
from controller.preflight.dataset.text import excerpt


class UserFunction(RowStage[NoOptions]):
    """Calls `function(row, **options)` with a row's columns. It returns None or False to keep the row, and a text, the
    reason, to remove it."""

    def __init__(self, path: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        super().__init__(NoOptions())
        self.path, self._function, self._arguments = path, function, dict(options)
        check_arguments(path, function, {"row": None, **options}, path)

    def check(self, row: Row) -> Finding | None:
        if row.fault:
            return None
        found = self._function(dict(row.fields), **self._arguments)
        if found is None or found is False:
            return None
        if not isinstance(found, str) or not found.strip():
            raise OperationError(
                f"the function returned {excerpt(repr(found), 80)}, but it must return None or a reason as text"
            )
        return Finding(excerpt(found, 200))
