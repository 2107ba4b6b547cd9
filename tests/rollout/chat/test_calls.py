"""Each notation of tool calls, read exactly: what is a call, what stays text, and what a fault says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_like.tool_call import ToolCall
from rollout.chat.calls import (
    Reader,
    read_deepseek,
    read_hermes,
    read_llama_json,
    read_mistral,
    read_pythonic,
    read_qwen_xml,
    schemas_by_name,
)

ADD = ToolCall("add", '{"x": 1}')
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def fault(body: str, words: str, name: str = "") -> ToolCall:
    return ToolCall(name, body, words)


NEVER_CLOSED = "the tool calls are not a valid Python list of calls ('[' was never closed (<unknown>, line 1))"


@pytest.mark.parametrize(
    ("read", "text", "content", "calls"),
    [
        # Hermes: text around calls is content, one line for each piece of it.
        (read_hermes, " 7 ", "7", ()),
        (read_hermes, 'a <tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call> b', "a\nb", (ADD,)),
        (
            read_hermes,
            '<tool_call>{"name":"add","arguments":{"x":1}}</tool_call>\n<tool_call>{"name":"f"}</tool_call>',
            "",
            (ADD, ToolCall("f", "{}")),
        ),
        (read_hermes, '<tool_call>{"name": "add", "parameters": {"x": 1}}</tool_call>', "", (ADD,)),
        # XML
        (
            read_qwen_xml,
            "a<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>b",
            "a\nb",
            (ToolCall("add", '{"x": "1"}'),),
        ),
        (read_qwen_xml, "<tool_call><function= f ></function></tool_call>", "", (ToolCall("f", "{}"),)),
        (
            read_qwen_xml,
            "<tool_call><function=f><parameter= k >\n\n two\nlines\n\n</parameter></function></tool_call>",
            "",
            (ToolCall("f", json.dumps({"k": "\n two\nlines\n"})),),
        ),
        # Mistral: a list, one object, or a name with arguments, each of them with or without an id
        (read_mistral, 'a[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}, {"name": "f"}]b', "a\nb",
         (ADD, ToolCall("f", "{}"))),
        (read_mistral, '[TOOL_CALLS]{"name": "add", "arguments": {"x": 1}}', "", (ADD,)),
        (read_mistral, '[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS] f {}', "", (ADD, ToolCall("f", "{}"))),
        (read_mistral, '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS] {"x": 1} done', "done", (ADD,)),
        # DeepSeek: the marks around all calls are dropped where there is a call
        (read_deepseek, f"a{ALL_BEGIN}{BEGIN}add{SEP}{{\"x\": 1}}{END}{ALL_END}b", "a\nb", (ADD,)),
        (
            read_deepseek,
            f'{ALL_BEGIN}{BEGIN}function{SEP}add\n```json\n{{"x": 1}}\n```{END}\n{BEGIN}function{SEP}f\n```json\n{{}}\n'
            f"```{END}{ALL_END}",
            "",
            (ADD, ToolCall("f", "{}")),
        ),
        (read_deepseek, f" {ALL_BEGIN}7 ", f"{ALL_BEGIN}7", ()),
        # Llama: the whole answer, or what follows the tag
        (read_llama_json, ' {"name": "add", "parameters": {"x": 1}} ', "", (ADD,)),
        (read_llama_json, '{"name": "add", "parameters": {"x": 1}} ; {"name": "f"};', "", (ADD, ToolCall("f", "{}"))),
        (read_llama_json, 'Now. <|python_tag|> {"name": "add", "parameters": {"x": 1}}', "Now.", (ADD,)),
        (read_llama_json, ' Say {"name": "add"} ', 'Say {"name": "add"}', ()),
        (read_llama_json, "a <|python_tag|>", "a", ()),
        (read_llama_json, '{"name": "f"}<|python_tag|>', "",
         (ToolCall("f", "{}"),
          fault("<|python_tag|>", "the call is not JSON (Expecting value: line 1 column 14 (char 13))"))),
        # Python
        (read_pythonic, " [add(x=1), a.f()] ", "", (ADD, ToolCall("a.f", "{}"))),
        (read_pythonic, "<|python_start|> [add(x=1)] <|python_end|>", "", (ADD,)),
        (read_pythonic, " [1, 2] ", "[1, 2]", ()),
        (read_pythonic, " add(x=1) ", "add(x=1)", ()),
        (read_pythonic, '[f(a="\\d", b=None, c=[1.5, True], d={"k": -1})]', "",
         (ToolCall("f", json.dumps({"a": "\\d", "b": None, "c": [1.5, True], "d": {"k": -1}})),)),
    ],
)  # fmt: skip
def test_calls_and_the_text_around_them(read: Reader, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert read(text, {})[:2] == (content, calls)


def words_of_infinity() -> str:
    """What this version of Python says of a number that JSON does not have."""
    with pytest.raises(ValueError, match="JSON") as error:
        json.dumps(float("inf"), allow_nan=False)
    return str(error.value)


NOT_JSON = "Expecting property name enclosed in double quotes: line 1 column {0} (char {1})"
NO_OBJECT = 'the call is not an object with "name" and "arguments"'


@pytest.mark.parametrize(
    ("read", "text", "content", "calls"),
    [
        # What is shown of a call that cannot be read ends at its closing mark, or where the next call begins.
        (read_hermes, "<tool_call> {x} </tool_call> b", "b",
         (fault("{x}", f"the call is not JSON ({NOT_JSON.format(14, 13)})"),)),
        (read_hermes, "<tool_call>{x}<tool_call>{y}</tool_call>", "",
         (fault("{x}", f"the call is not JSON ({NOT_JSON.format(13, 12)})"),
          fault("{y}", f"the call is not JSON ({NOT_JSON.format(27, 26)})"))),
        (read_hermes, '<tool_call>{"name": "add"} x</tool_call>b', "b",
         (fault('{"name": "add"} x', "the call does not end with </tool_call> after its JSON"),)),
        (read_hermes, '<tool_call>{"name": "add"}', "",
         (fault('{"name": "add"}', "the call does not end with </tool_call> after its JSON"),)),
        (read_hermes, "<tool_call>[]</tool_call>", "", (fault("[]", NO_OBJECT),)),
        (read_hermes, '<tool_call>{"name": ""}</tool_call>', "", (fault('{"name": ""}', NO_OBJECT),)),
        (read_hermes, '<tool_call>{"name": 3}</tool_call>', "", (fault('{"name": 3}', NO_OBJECT),)),
        (read_hermes, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "",
         (fault('{"name": "f", "arguments": "x"}', "the arguments are not a JSON object", "f"),)),
        (read_hermes, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "",
         (fault('{"name": "f", "arguments": {"x": 1e999}}', "the call is not JSON (1e999 is not valid JSON)"),)),
        (read_hermes, '<tool_call>{"name": "f", "arguments": {"x": -Infinity}}</tool_call>', "",
         (fault('{"name": "f", "arguments": {"x": -Infinity}}',
                "the call is not JSON (-Infinity is not valid JSON)"),)),
        # XML
        (read_qwen_xml, "<tool_call> f() </tool_call>b", "b",
         (fault("f()", "the call does not begin with <function=NAME>"),)),
        (read_qwen_xml, "<tool_call><function=f><parameter=k>1</tool_call>b", "b",
         (fault("<function=f><parameter=k>1", "parameter k does not end with </parameter>", "f"),)),
        (read_qwen_xml, "<tool_call><function=f>x</function></tool_call>b", "b",
         (fault("<function=f>x</function>", "the call does not end with </function></tool_call> after its parameters",
                "f"),)),
        # Mistral: there is no closing mark, so all up to the next call is shown
        (read_mistral, "[TOOL_CALLS] [{x}] y [TOOL_CALLS]f{}", "",
         (fault("[{x}] y", f"the calls are not JSON ({NOT_JSON.format(16, 15)})"), ToolCall("f", "{}"))),
        (read_mistral, "[TOOL_CALLS] f x", "", (fault("f x", "the call does not have the form NAME[ARGS]{...}"),)),
        (read_mistral, "[TOOL_CALLS]f[ARGS]{x}", "",
         (fault("f[ARGS]{x}", f"the arguments are not JSON ({NOT_JSON.format(21, 20)})", "f"),)),
        (read_mistral, '[TOOL_CALLS][{"name": "f"}, 3]', "",
         (ToolCall("f", "{}"), fault('[{"name": "f"}, 3]', NO_OBJECT))),
        # DeepSeek
        (read_deepseek, f"{BEGIN}add {{}}{END}b", "b",
         (fault("add {}", "the call does not begin with its name and arguments"),)),
        (read_deepseek, f"{BEGIN}add{SEP}{{x}}{END}b", "b",
         (fault(f"add{SEP}{{x}}", f"the arguments are not JSON ({NOT_JSON.format(36, 35)})", "add"),)),
        (read_deepseek, f"{BEGIN}add{SEP}{{}} x{END}b", "b",
         (fault(f"add{SEP}{{}} x", f"the call does not end with {END} after its arguments", "add"),)),
        # Llama: nothing behind a call that cannot be read can be found
        (read_llama_json, '{"name": "f"}; {x}; {"name": "f"}', "",
         (ToolCall("f", "{}"), fault('{x}; {"name": "f"}', f"the call is not JSON ({NOT_JSON.format(17, 16)})"))),
        # Python
        (
            read_pythonic, "[f(), 3]", "",
            (ToolCall("f", "{}"), fault("3", "the list contains an item that is not a call")),
        ),
        (read_pythonic, "[f()()]", "", (fault("f()()", "the function is not given by name, as in f(x=1)"),)),
        (read_pythonic, "[f()[0].g()]", "", (fault("f()[0].g()", "the function is not given by name, as in f(x=1)"),)),
        (read_pythonic, "[f(1)]", "", (fault("f(1)", "arguments must be given by name, as in f(x=1)", "f"),)),
        (read_pythonic, "[f(x=1, **y)]", "",
         (fault("f(x=1, **y)", "arguments must be given by name, as in f(x=1)", "f"),)),
        (read_pythonic, "[f(x=b'1')]", "",
         (fault("f(x=b'1')", "an argument is not a literal value (Object of type bytes is not JSON serializable)",
                "f"),)),
        (read_pythonic, "[f(x=1e999)]", "",
         (fault("f(x=1e999)", f"an argument is not a literal value ({words_of_infinity()})", "f"),)),
        (read_pythonic, "[f(x=1)", "",
         (fault("[f(x=1)", NEVER_CLOSED),)),
    ],
)  # fmt: skip
def test_call_that_cannot_be_read_is_shown_with_its_fault(
    read: Reader, text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    assert read(text, {})[:2] == (content, calls)


def test_fault_quotes_no_more_of_an_error_than_a_line() -> None:
    (call,) = read_hermes(f'<tool_call>{{"name": "f", "arguments": {{"x": 1{"0" * 500}e999}}}}</tool_call>', {})[1]
    assert call.fault == f"the call is not JSON (1{'0' * 119})"


def test_halves_of_surrogate_pairs_are_written_so_that_they_can_be_sent() -> None:
    (call,) = read_hermes('<tool_call>{"name": "f\\ud83d", "arguments": {"é": "\\ud83d"}}</tool_call>', {})[1]
    assert call == ToolCall("f?", '{"\\u00e9": "\\ud83d"}')
    (call,) = read_hermes('<tool_call>{"name": "f", "arguments": {"é": "\\ud83d\\ude00"}}</tool_call>', {})[1]
    assert call == ToolCall("f", '{"é": "\U0001f600"}')


def value_read_as(schema: Any, written: str) -> Any:
    text = f"<tool_call><function=f><parameter=k>{written}</parameter></function></tool_call>"
    (call,) = read_qwen_xml(text, {"f": {"properties": {"k": schema}}})[1]
    assert not call.fault
    return json.loads(call.arguments)["k"]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3 4", "3 4"),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({"type": "array"}, '["A"]', ["A"]),
        ({"type": "integer"}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"type": "integer", "enum": ["1"]}, "1", 1),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": 3}, "3", "3"),
    ],
)
def test_xml_value_is_read_as_its_schema_says(schema: Any, written: str, value: Any) -> None:
    found = value_read_as(schema, written)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("schema", [{"properties": [1]}, {"properties": {"k": {"type": 3}}}, [], {}])
def test_schema_that_cannot_be_read_leaves_values_text(schema: Any) -> None:
    text = "<tool_call><function=f><parameter=k>3</parameter></function></tool_call>"
    assert read_qwen_xml(text, {"f": schema})[1] == (ToolCall("f", '{"k": "3"}'),)
    assert read_qwen_xml(text, {})[1] == (ToolCall("f", '{"k": "3"}'),)


def test_closing_mark_in_a_string_does_not_end_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert read_hermes(text, {})[:2] == ("", (ToolCall("f", '{"x": "</tool_call>"}'),))


def test_schemas_of_declared_tools_are_found_by_name() -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"name": "g", "parameters": None},
        {"type": "function", "function": "h"},
    ]
    assert schemas_by_name(tools) == {"f": {"type": "object"}, "g": {}}
