"""Parsers of tool calls, one for each notation of the model families.

Reasoning, stop tokens and the notation of each family are in formats.py. Whether a tool exists, and takes the
arguments, is not checked here.

A parser never raises. A call that cannot be parsed is a `ToolCall` with a `fault`. JSON is parsed by a decoder from its
beginning, and not cut at the next closing marker, since a string in it may contain that marker.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_like.tool_call import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, by name of the tool."""


class Read(NamedTuple):
    """The result of parsing a text.

    content: the text outside calls. calls: in order. spans: positions in the text of calls without a fault, [begin,
    end) in characters; text within them is an argument, even if it looks like a marker.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


Reader = Callable[[str, Schemas], Read]

_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""Beginning of a call without a marker before it; other answers in JSON may have a `type` with another value."""
_UNREADABLE = (ValueError, TypeError, RecursionError, MemoryError)
"""Exceptions that json and ast raise for a text, except SyntaxError."""
_MAX_SHOWN = 120


def read_hermes(text: str, _: Schemas) -> Read:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call."""
    return _scan(text, "<tool_call>", lambda at: _json_call(text, at, "<tool_call>", "</tool_call>"))


def read_qwen_xml(text: str, schemas: Schemas) -> Read:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    A value is text; if the tool's schema has another type for it, it is parsed as JSON.
    """
    return _scan(text, "<tool_call>", lambda at: _xml_call(text, at, schemas))


def read_mistral(text: str, _: Schemas) -> Read:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    return _scan(text, "[TOOL_CALLS]", lambda at: _mistral_calls(text, at))


def read_deepseek(text: str, _: Schemas) -> Read:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

    Or `function` instead of the name, followed by the name and a fenced block of JSON. Two more markers enclose all
    calls.
    """
    found = _scan(text, "<｜tool▁call▁begin｜>", lambda at: _deepseek_call(text, at))
    content = found.content
    for mark in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>") if found.calls else ():
        content = content.replace(mark, "")
    return found._replace(content=content.strip())


def read_llama_json(text: str, _: Schemas) -> Read:
    """`{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`, or after `<|python_tag|>`.

    Also `{"type": "function", "name": ...}`, and the object that a declaration has: `{"type": "function", "function":
    {"name": ..., "parameters": ...}}`.
    """
    at = 0
    if not _LLAMA_CALL.match(text):
        at = text.find(_PYTHON_TAG)
        if at < 0:
            return Read(text.strip())
    before, calls, spans = text[:at].strip(), [], []
    at = _skip(text, at + len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG, at) else at)
    while at < len(text):
        value, end = _decoded(text, at)
        if end is None:
            calls.append(ToolCall("", text[at:].strip(), f"the call is not JSON ({value})"))
            break
        calls.append(_call_of(_unwrapped(value), text[at:end]))
        if not calls[-1].fault:
            spans.append((at, end))
        at = _skip(text, end, also=";")
    return Read(before, tuple(calls), tuple(spans))


def read_pythonic(text: str, _: Schemas) -> Read:
    """`[NAME(KEY=VALUE, ...), ...]` as the whole answer, values being Python literals."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", body):
        return Read(text.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the model's strings
            tree = ast.parse(body, mode="eval").body
    except (SyntaxError, *_UNREADABLE) as error:
        return Read("", (ToolCall("", body, f"the tool calls are not a valid Python list of calls ({_words(error)})"),))
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return Read("", tuple(_pythonic_call(node, body) for node in nodes), ((0, len(text)),))


# ------------------------------------------------------------ parts


def _scan(text: str, mark: str, read: Callable[[int], tuple[list[ToolCall], int]]) -> Read:
    """Find the calls and the text between them. `read` gets the position after a marker and returns where the call
    ends."""
    at, kept, calls, spans = 0, [], [], []
    while (start := text.find(mark, at)) >= 0:
        kept.append(text[at:start].strip())
        found, at = read(start + len(mark))
        calls += found
        if not any(call.fault for call in found):
            spans.append((start, at))
    kept.append(text[at:].strip())
    return Read("\n".join(part for part in kept if part), tuple(calls), tuple(spans))


def _unwrapped(value: Any) -> Any:
    """The value of `function` in an object with a `type`, as in declarations."""
    is_wrapped = isinstance(value, dict) and value.get("type") == "function" and "name" not in value
    return value.get("function") if is_wrapped else value


def _json_call(text: str, at: int, opens: str, closes: str) -> tuple[list[ToolCall], int]:
    start = _skip(text, at)
    value, end = _decoded(text, start)
    if end is None:
        body, end = _rest(text, at, opens, closes)
        return [ToolCall("", body, f"the call is not JSON ({value})")], end
    closed = _skip(text, end)
    if not text.startswith(closes, closed):
        body, end = _rest(text, at, opens, closes)
        return [ToolCall("", body, f"the call does not end with {closes} after its JSON")], end
    return [_call_of(value, text[start:end])], closed + len(closes)


def _xml_call(text: str, at: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    def fault(what: str) -> tuple[list[ToolCall], int]:
        body, end = _rest(text, at, "<tool_call>", "</tool_call>")
        return [ToolCall(name, body, what)], end

    name = ""
    head = re.compile(r"\s*<function=([^<>\n]+)>").match(text, at)
    if head is None:
        return fault("the call does not begin with <function=NAME>")
    name, place, arguments = head[1].strip(), head.end(), {}
    types = _types_of(schemas.get(name))
    while parameter := re.compile(r"\s*<parameter=([^<>\n]+)>\n?").match(text, place):
        key, start = parameter[1].strip(), parameter.end()
        end = text.find("</parameter>", start)  # not by a regular expression: many unclosed tags took minutes
        if end < 0:
            return fault(f"parameter {key} does not end with </parameter>")
        arguments[key] = _typed(text[start:end].removesuffix("\n"), types.get(key, frozenset()))
        place = end + len("</parameter>")
    tail = re.compile(r"\s*</function>\s*</tool_call>").match(text, place)
    if tail is None:
        return fault("the call does not end with </function></tool_call> after its parameters")
    return [ToolCall(name, json_text(arguments))], tail.end()


def _types_of(schema: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """The JSON types of each argument."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    try:
        return {key: _types_in(one) for key, one in properties.items()}
    except _UNREADABLE:  # a server's schema may be invalid; values are then text
        return {}


def _types_in(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    own = {kind} if isinstance(kind, str) else {str(one) for one in kind or ()}
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    of_values = {"string" if isinstance(one, str) else "" for one in schema.get("enum") or ()} if not own else set()
    return frozenset(own.union(of_values, *map(_types_in, choices)))


def _typed(value: str, types: frozenset[str]) -> Any:
    if value == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return value
    for form in (value, value.lower()):  # a template may have written Python's True
        found, end = _decoded(form, _skip(form, 0))
        if end is not None and not form[end:].strip():
            return found
    return value


def _mistral_calls(text: str, at: int) -> tuple[list[ToolCall], int]:
    start = _skip(text, at)
    if text.startswith(("[", "{"), start):
        value, end = _decoded(text, start)
        if end is None:
            body, end = _rest(text, at, "[TOOL_CALLS]", "")
            return [ToolCall("", body, f"the calls are not JSON ({value})")], end
        items = value if isinstance(value, list) else [value]
        return [_call_of(one, text[start:end]) for one in items], end
    name = re.compile(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)").match(text, start)
    if name is None:
        body, end = _rest(text, at, "[TOOL_CALLS]", "")
        return [ToolCall("", body, "the call does not have the form NAME[ARGS]{...}")], end
    value, end = _decoded(text, name.end())
    if end is None:
        body, end = _rest(text, at, "[TOOL_CALLS]", "")
        return [ToolCall(name[1], body, f"the arguments are not JSON ({value})")], end
    return [_call_of({"name": name[1], "arguments": value}, text[start:end])], end


def _deepseek_call(text: str, at: int) -> tuple[list[ToolCall], int]:
    opens, closes = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    body, stop = _rest(text, at, opens, closes)
    head = re.compile(
        r"\s*(?:function<｜tool▁sep｜>([^\s<>{}]+)\s*```json|([^\s<>{}]+)<｜tool▁sep｜>)\s*(?=\{)"
    ).match(text, at)  # fmt: skip
    if head is None:
        return [ToolCall("", body, "the call does not begin with its name and arguments")], stop
    name, start = head[1] or head[2], head.end()
    value, end = _decoded(text, start)
    if end is None:
        return [ToolCall(name, body, f"the arguments are not JSON ({value})")], stop
    tail = re.compile(rf"\s*(?:```)?\s*{re.escape(closes)}").match(text, end)
    if tail is None:
        return [ToolCall(name, body, f"the call does not end with {closes} after its arguments")], stop
    return [_call_of({"name": name, "arguments": value}, text[start:end])], tail.end()


def _pythonic_call(node: ast.expr, body: str) -> ToolCall:
    written = ast.get_source_segment(body, node) or body
    if not isinstance(node, ast.Call):
        return ToolCall("", written, "the list contains an item that is not a call")
    try:
        name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    except RecursionError:  # a.a.a. and so on
        name = ""
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return ToolCall("", written, "the function is not given by name, as in f(x=1)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, written, "arguments must be given by name, as in f(x=1)")
    try:
        return ToolCall(name, json_text({str(one.arg): ast.literal_eval(one.value) for one in node.keywords}))
    except _UNREADABLE as error:
        return ToolCall(name, written, f"an argument is not a literal value ({_words(error)})")


def _call_of(value: Any, written: str) -> ToolCall:
    """Convert a JSON value to a call: {name, arguments} or {name, parameters}."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", written, 'the call is not an object with "name" and "arguments"')
    name = name.encode("utf-8", "replace").decode()  # JSON may escape half of a surrogate pair
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(name, written, "the arguments are not a JSON object")
    try:
        return ToolCall(name, json_text(arguments))
    except _UNREADABLE as error:
        return ToolCall(name, written, f"the arguments cannot be written as JSON ({_words(error)})")


def json_text(value: Any) -> str:
    """A value as JSON that can be encoded as UTF-8. Raises ValueError: a number is not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(digits)


_decoder = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _decoded(text: str, at: int) -> tuple[Any, int] | tuple[str, None]:
    """The JSON value that begins at a position and its end, or an error message."""
    try:
        return _decoder.raw_decode(text, at)
    except _UNREADABLE as error:
        return _words(error), None


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__).encode("utf-8", "replace").decode()[:_MAX_SHOWN]


def _skip(text: str, at: int, *, also: str = "") -> int:
    """The next position that is not white space."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _rest(text: str, at: int, opens: str, closes: str) -> tuple[str, int]:
    """The text of a call that cannot be parsed, and the position after it."""
    end = text.find(closes, at) if closes else -1
    following = text.find(opens, at)
    if end >= 0 and not 0 <= following < end:
        return text[at:end].strip(), end + len(closes)
    end = following if following >= 0 else len(text)
    return text[at:end].strip(), end


def schemas_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of tools in the form that chat templates take: `{"type": "function", "function": {name, parameters}}`."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(one.get("name")): one.get("parameters") or {} for one in functions if isinstance(one, Mapping)}
