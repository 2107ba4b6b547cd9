"""Prompts out of several columns of a row: a Jinja template over the raw row.

Owns: filling it in, and what is wrong with it. Refuses: everything around the prompt (`rollout.prompt_template`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from areal_like.errors import UserError


def compiled(text: str) -> Template:
    """Raises jinja2.TemplateError."""
    return SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)


def fault_of_template(text: str) -> str:
    """Why this template cannot be used; empty where it can."""
    try:
        compiled(text)
    except TemplateError as error:
        return f"is no Jinja template ({error})"
    return ""


def fill(template: Template, raw: Mapping[str, Any], where: str) -> str:
    """The prompt of one row. Raises UserError for a row that lacks a column or does not fit the template."""
    try:
        return template.render(raw)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        remedy = f"columns here: {', '.join(map(str, raw))}"
        raise UserError(f"the template cannot be filled in ({error})", where=where, remedy=remedy) from error
