"""Keys of a settings class as plain data: path, type, default, bounds, meaning.

Used for error messages and for the reference page, so that both agree.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from areal_like.settings import Settings, field_docstrings

_BASIC = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping", Any: "anything"}
_BOUNDS = (("gt", "> {}"), ("ge", ">= {}"), ("lt", "< {}"), ("le", "<= {}"), ("min_length", "at least {} long"))


@dataclass(frozen=True)
class Knob:
    """One key of a settings class. `path` is dotted from the top; `[]` stands for the index into a list."""

    path: str
    kind: str
    default: Any
    is_required: bool
    bounds: str
    meaning: str
    section: type[Settings] | None
    """The settings class below this key, if it is a section."""

    @property
    def leaf(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def section_of(annotation: Any) -> type[Settings] | None:
    """The settings class in `Settings`, `Settings | None` or `tuple[Settings, ...]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    if get_origin(annotation) is dict:  # see mapped_section
        return None
    for part in get_args(annotation):
        found = section_of(part)
        if found is not None:
            return found
    return None


def is_union(annotation: Any) -> bool:
    """True for `A | B` and Optional."""
    return get_origin(annotation) in (Union, types.UnionType)


def is_list(annotation: Any) -> bool:
    """True for list and tuple annotations."""
    return get_origin(annotation) in (tuple, list)


def mapped_section(annotation: Any) -> type[Settings] | None:
    """The settings class of a mapping of names to sections, if any."""
    parts = get_args(annotation) if get_origin(annotation) is dict else ()
    return section_of(parts[1]) if parts else None


def allows_null(annotation: Any) -> bool:
    """Return whether null is a valid value."""
    return is_union(annotation) and type(None) in get_args(annotation)


def describe(annotation: Any) -> str:
    """Description of a type for users of YAML."""
    if section_of(annotation) is not None:
        if is_list(annotation):
            return "list of sections"
        return "section or `null`" if allows_null(annotation) else "section"
    if annotation in _BASIC:
        return _BASIC[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in parts)
    if is_union(annotation):
        return " | ".join("`null`" if part is type(None) else describe(part) for part in parts)
    if origin in (tuple, list):
        return f"list of {describe(parts[0])}"
    if origin is dict:
        return "mapping"
    if origin is typing.Annotated:
        return describe(parts[0])
    return str(annotation)


def bounds_of(field: FieldInfo) -> str:
    """Bounds of a field, such as `> 0, <= 1`; empty if there are none."""
    found = []
    for item in (*field.metadata, *_inner_metadata(field.annotation)):
        for name, text in _BOUNDS:
            value = getattr(item, name, None)
            if value is not None:
                found.append(text.format(int(value) if float(value).is_integer() else value))
    return ", ".join(found)


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    """Metadata of the parts of a union or list: `Annotated[int, Field(gt=0)] | Literal["auto"]`."""
    for part in get_args(annotation):
        if isinstance(part, FieldInfo):
            yield from part.metadata
        else:
            yield from _inner_metadata(part)


@lru_cache(maxsize=8)
def knobs(root: type[Settings], prefix: str = "") -> tuple[Knob, ...]:
    """Every key below a settings class, depth first, in declaration order."""
    return tuple(_walk(root, prefix))


def _walk(root: type[Settings], prefix: str) -> Iterator[Knob]:
    for name, field in root.model_fields.items():
        path = f"{prefix}{name}"
        section = section_of(field.annotation)
        yield Knob(
            path=path,
            kind=describe(field.annotation),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            is_required=field.is_required(),
            bounds=bounds_of(field),
            meaning=field_docstrings(root).get(name, ""),
            section=section,
        )
        if section is not None:
            yield from _walk(section, f"{path}.[]." if is_list(field.annotation) else f"{path}.")


def field_at(root: type[Settings], path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field that a concrete path refers to (list indices included); None if the path is not in the schema."""
    if (found := _place_of(root, path)) is None:
        return None
    section, name = found
    return section.model_fields[name]


def meaning_at(root: type[Settings], path: tuple[str | int, ...]) -> str:
    """Docstring of the field; empty if there is none."""
    if (found := _place_of(root, path)) is None:
        return ""
    section, name = found
    return field_docstrings(section).get(name, "")


def _place_of(root: type[Settings], path: tuple[str | int, ...]) -> tuple[type[Settings], str] | None:
    """The section that declares the field, and its name there."""
    current: type[Settings] | None = root
    place = None
    is_name = False
    for part in path:
        if is_name:  # of a section among several of a mapping
            is_name = False
            continue
        if isinstance(part, int) or (isinstance(part, str) and part.isdigit()):
            continue
        if current is None or part not in current.model_fields:
            return None
        place = current, part
        annotation = current.model_fields[part].annotation
        current = section_of(annotation) or mapped_section(annotation)  # the one or the other
        is_name = mapped_section(annotation) is not None
    return place
