"""Fills prompts from several columns of a row with a Jinja template over the raw row.

Templates are in areal_like/templates.py; `rollout.prompt_template` adds the text around the prompt.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Template

from areal_like.errors import UserError
from areal_like.templates import FILLING_ERRORS


def fill(template: Template, raw: Any, where: str) -> str:
    """Make the prompt of one row (a mapping). Raises UserError for a row that lacks a column or does not fit the
    template.
    """
    try:
        return template.render(raw)
    except FILLING_ERRORS as error:
        remedy = f"use only the columns of the row: {', '.join(map(str, raw))}"
        raise UserError(f"the template cannot be filled in ({error})", where=where, remedy=remedy) from error
