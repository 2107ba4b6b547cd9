"""Jinja templates over rows: sandboxed, and an undefined name is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

FILLING_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""Exceptions that rendering a template can raise because of the data."""


class _Environment(SandboxedEnvironment):
    """`row.items` is the column `items`, not the method of a dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


_environment = _Environment(undefined=StrictUndefined, keep_trailing_newline=True)


def compiled(text: str) -> Template:
    """Compile a template. Raises jinja2.TemplateError. Values are inserted as data and never parsed as templates."""
    return _environment.from_string(text)


def names_in(text: str) -> set[str]:
    """Names that a template uses. Raises jinja2.TemplateError."""
    return meta.find_undeclared_variables(_environment.parse(text))


def fault_of(text: str) -> str:
    """Reason why the text is not a template, as a clause that follows its name; empty if it is one."""
    try:
        compiled(text)
    except TemplateError as error:
        return f"is not a valid Jinja template ({error})"
    return ""
