"""Base of every settings class."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import pydantic
from pydantic import ConfigDict

DType = Literal["float32", "bfloat16"]


class Settings(pydantic.BaseModel):
    """Base class that rejects unknown keys and non-finite numbers. Instances are validated on construction and
    immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


@functools.cache
def field_docstrings(settings: type[Settings]) -> Mapping[str, str]:
    """Docstring of each field (the string below it), on one line, by field name; including inherited fields.

    Read from the source on demand: pydantic's own `use_attribute_docstrings` reads the source of every class in every
    process, which is a fifth of the time that a process takes to import its settings. Fields of classes whose source
    cannot be read have none.
    """
    found: dict[str, str] = {}
    for parent in reversed(settings.__mro__):
        if issubclass(parent, Settings) and parent is not Settings:
            found |= _below_fields(parent)
    return found


def _below_fields(settings: type[Settings]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(settings)))
    except (OSError, TypeError, SyntaxError):  # defined at run time or in an interpreter
        return {}
    statement = tree.body[0]
    assert isinstance(statement, ast.ClassDef)
    texts = {}
    for field, below in pairwise(statement.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts
