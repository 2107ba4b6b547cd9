"""The one way texts are made out of rows: Jinja, sandboxed, where a missing name is an error.

Owns: the environment, what a template names. Refuses: which names there are, and what a fault means to whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

FILLING_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""What filling in a template can raise over the data it is given."""


class _Environment(SandboxedEnvironment):
    """`row.items` is the column `items`, not the method of a dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


_environment = _Environment(undefined=StrictUndefined, keep_trailing_newline=True)


def compiled(text: str) -> Template:
    """Raises jinja2.TemplateError. What the template is filled with is data: it is never read as a template."""
    return _environment.from_string(text)


def names_in(text: str) -> set[str]:
    """Names that a template wants to be given. Raises jinja2.TemplateError."""
    return meta.find_undeclared_variables(_environment.parse(text))


def fault_of(text: str) -> str:
    """Why this text is no template, in words that follow its name; empty where it is one."""
    try:
        compiled(text)
    except TemplateError as error:
        return f"is not a valid Jinja template ({error})"
    return ""
