"""Parses YAML text to values, with the line of every key.

The dialect of configs: numbers as people write them (1e-4 is a number, 010 is ten), only true and false are booleans
(`on`, `off`, `yes` are text), no dates, no tags, no duplicate keys.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from areal_like.errors import UserError

SHOWN_CHARS = 100
"""Maximum characters of an invalid value in an error message."""
_MAX_DEPTH = 50
_MAX_KEYS = 100_000
"""Limit of the number of entries: nested aliases can expand to billions."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with custom resolvers."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    if text.endswith(".inf"):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text == ".nan" else float(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


@dataclass
class Document:
    """A YAML mapping, and for each dotted path the line of its key (1-based)."""

    data: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    source: str = ""

    def line(self, path: str) -> int | None:
        """The line of a key, or of the nearest key above it; 0: the command line; None: not given."""
        parts = path.split(".")
        while parts:
            line = self.lines.get(".".join(parts))
            if line is not None:
                return line
            parts.pop()
        return None

    def where(self, path: str) -> str:
        """`file:line` of a key, or of the nearest key above it."""
        line = self.line(path)
        if line is None:
            return self.source
        return f"{self.source}:{line}" if line else "command line"

    def mark_override(self, path: str) -> None:
        """Record that this key, all keys below it, and the sections above it that the file lacks come from the command
        line (line 0).
        """
        for known in [known for known in self.lines if known.startswith(f"{path}.")]:
            del self.lines[known]
        self.lines[path] = 0
        parts = path.split(".")
        for end in range(1, len(parts)):
            self.lines.setdefault(".".join(parts[:end]), 0)


def parse_value(text: str) -> Any:
    """Parse one YAML value, as written after `key=`. Raises UserError."""
    try:
        node = _compose(text)
        return None if node is None else _construct(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        short = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
        raise UserError(
            f"`{short}` is not a valid YAML value ({_problem(error)})",
            remedy="quote the value, for example 'key=\"text: with special characters\"'",
        ) from error


def parse_document(text: str, source: str) -> Document:
    """Parse a whole config file. Raises UserError with the line of a syntax error."""
    try:
        node = _compose(text)
        if node is None:
            raise UserError("the file is empty", where=source, remedy="see configs/quickstart.yaml for an example")
        if not isinstance(node, yaml.MappingNode):
            raise UserError(
                "a config must be a mapping of keys to values", where=f"{source}:{node.start_mark.line + 1}"
            )
        document = Document(data={}, source=source)
        _note_lines(node, "", document)
        document.data = _construct(node)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(
            f"the file is not valid YAML ({_problem(error)})", where=where, remedy=_yaml_remedy(text, error)
        ) from error
    except RecursionError as error:
        raise UserError("the config is nested too deeply", where=source) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"the file is not valid YAML ({_problem(error)})", where=source) from error
    return document


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return _text_keys(loader.construct_document(node))
    finally:
        loader.dispose()


def _text_keys(value: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return {str(key): _text_keys(item, depth + 1) for key, item in value.items()}
    if isinstance(value, str) and "\0" in value:  # no file, host or name can have one; the system's calls raise
        raise ValueError("a string contains a NUL character")
    return [_text_keys(item, depth + 1) for item in value] if isinstance(value, list) else value


def _note_lines(node: yaml.Node, prefix: str, document: Document, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise RecursionError
    if len(document.lines) > _MAX_KEYS:
        what = f"the config contains more than {_MAX_KEYS:,} entries"
        raise UserError(what, where=document.source, remedy="move data rows to separate files")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be text, not a list or a mapping"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            path = f"{prefix}{key.value}"
            if path in document.lines:
                raise UserError(
                    f"`{path}` is set twice (first on line {document.lines[path]})",
                    where=f"{document.source}:{key.start_mark.line + 1}",
                    remedy="keep only one of the two lines",
                )
            document.lines[path] = key.start_mark.line + 1
            _note_lines(value, f"{path}.", document, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[f"{prefix}{index}"] = item.start_mark.line + 1
            _note_lines(item, f"{prefix}{index}.", document, depth + 1)


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    return " ".join(str(error).split()) or "nested too deeply"


def _yaml_remedy(text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    if mark is not None and mark.line < len(lines):
        line = lines[mark.line]
        if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error.problem):
            return "indent with spaces, not with tabs"
        if line.strip():
            return f"see: {line.strip()[:80]}"
    return "check the preceding lines"
