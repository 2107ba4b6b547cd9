"""Python functions as tools that a policy may call.

A tool's JSON schema comes from the annotations and the docstring of its function. Tools run in
services/environment/tools.py; calls are parsed in rollout/chat.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

import msgspec

from areal_like.errors import UserError, first_line
from areal_like.import_path import import_object, is_import_path

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class WrongArguments(ValueError):
    """The tool does not accept the arguments of a call. The message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool.

    name: name for the policy. description: what the tool does. parameters: JSON schema of the arguments, an object.
    run: takes the arguments of a call as a JSON object and returns the result, or an awaitable of it; a result that is
    not text is shown as JSON. It raises WrongArguments for invalid arguments, and any other exception if it fails.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], Any]

    @property
    def declaration(self) -> dict[str, Any]:
        """The declaration of the tool for chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool_of(function: Callable[..., Any], *, where: str = "") -> Tool:
    """Create a tool from a function.

    Args:
        function: every parameter needs an annotation that JSON can express (numbers, str, bool, list, dict, Literal,
            Optional, TypedDict, dataclasses); defaults and a section `Args:` of its docstring are passed on. It may be
            `async`.
        where: the setting that contains it, for messages.

    Raises:
        UserError: the function cannot be called with named JSON values.

    Example:
        >>> def add(x: int, y: int = 1) -> int:
        ...     "Add two numbers."
        ...     return x + y
        >>> tool = tool_of(add)
        >>> tool.parameters["required"], tool.run({"x": 2})
        (['x'], 3)
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or isinstance(function, type) or _NAME.fullmatch(name) is None:
        what = f"{name} is not a named function"
        raise UserError(
            what,
            where=where,
            remedy="use a function defined with `def` or `async def`, or an instance of areal_like.tools.Tool",
        )
    fields = _fields(function, name, where)
    try:
        arguments = msgspec.defstruct(name, fields, forbid_unknown_fields=True, kw_only=True)
        (root,), definitions = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except (TypeError, NotImplementedError) as error:
        what = f"the annotations of tool {name} cannot be expressed in JSON ({first_line(error)})"
        raise UserError(
            what,
            where=where,
            remedy="annotate the parameters with int, float, str, bool, list, dict, Literal, Optional or dataclasses",
        ) from None
    summary, about = _documentation(function)
    schema = dict(definitions.pop(root["$ref"].rsplit("/", 1)[1]))
    schema.pop("title", None)
    schema["properties"] = {
        key: {**one, "description": about[key]} if key in about else one for key, one in schema["properties"].items()
    }
    if definitions:
        schema["$defs"] = definitions

    def run(given: Mapping[str, Any]) -> Any:
        try:
            checked = msgspec.convert(dict(given), arguments)
        except msgspec.ValidationError as error:
            raise WrongArguments(str(error)) from None
        return function(**{key: getattr(checked, key) for key in given})

    return Tool(name=name, description=summary, parameters=schema, run=run)


def load_tools(names: Sequence[str], built_in: Mapping[str, str], where: str) -> dict[str, Tool]:
    """Load tools by name.

    Args:
        names: each a built-in tool, or the import path `module:ATTRIBUTE` of a function, a `Tool`, or a list of these.
        built_in: import paths of the factories of built-in tools, by name.
        where: the setting that names them.

    Raises:
        UserError: one cannot be found or used, or two have the same name.
    """
    found: list[Tool] = []
    for name in names:
        if name in built_in:
            found.append(import_object(built_in[name], where)())
        elif is_import_path(name):
            made = import_object(name, where)
            found += [_as_tool(one, where) for one in (made if isinstance(made, list | tuple) else [made])]
        else:
            known = f"{', '.join(built_in)}, or module:FUNCTION"
            raise UserError(f"no tool `{name}`", where=where, remedy=known)
    return by_name(found, where)


def by_name(tools: Sequence[Tool], where: str) -> dict[str, Tool]:
    """Index tools by name. Raises UserError if two have the same name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise UserError(
                f"two tools have the name {tool.name}", where=where, remedy="rename or remove one of the two tools"
            )
        named[tool.name] = tool
    return named


def _as_tool(one: Any, where: str) -> Tool:
    return one if isinstance(one, Tool) else tool_of(one, where=where)


def _fields(function: Callable[..., Any], name: str, where: str) -> list[Any]:
    """Fields of the struct that validates the arguments."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are the user's code
        what = f"an annotation of tool {name} cannot be resolved ({error})"
        raise UserError(what, where=where, remedy="correct the annotation") from error
    fields: list[Any] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            what = f"parameter {one.name} of tool {name} cannot be passed by name"
            remedy = "use parameters that can be passed by name (no *args, **kwargs or positional-only parameters)"
            raise UserError(what, where=where, remedy=remedy)
        if one.name not in hints:
            remedy = f"add a type annotation, for example `{one.name}: str`"
            raise UserError(f"parameter {one.name} of tool {name} has no annotation", where=where, remedy=remedy)
        kind = hints[one.name]
        if one.default is one.empty:
            fields.append((one.name, kind))
        elif isinstance(one.default, list | dict | set) and one.default:  # msgspec does not allow such a default
            fields.append((one.name, kind, msgspec.field(default_factory=partial(_same, one.default))))
        else:
            fields.append((one.name, kind, one.default))
    return fields


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the descriptions of parameters in its section `Args:`."""
    text = inspect.getdoc(function) or ""
    summary = " ".join(re.split(r"\n\s*\n|\nArgs:", text, maxsplit=1)[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    about: dict[str, str] = {}
    if section is not None:
        body = inspect.cleandoc("\n" + section[1])
        for entry in re.split(r"\n(?=\S)", body):
            head = re.match(r"(\w+)[^:\n]*:\s*(.*)", entry, re.DOTALL)
            if head is not None:
                about[head[1]] = " ".join(head[2].split())
    return summary, about


def _same(value: Any) -> Any:
    return value
