"""Chat formats: what is written in a family's notation is read back, and nothing a policy writes makes them raise."""

from __future__ import annotations

import json
import keyword
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.errors import UserError
from rollout.chat.formats import FORMATS, find_format

Calls = list[tuple[str, dict[str, Any]]]


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def _qwen_xml(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"

    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(parameter(*item) for item in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _llama_json(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _pythonic(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(written)}]" if calls else ""


def _mistral(calls: Calls) -> str:
    items = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(items)}" if calls else ""


def _mistral_compact(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


def _deepseek_v31(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


WRITERS = [
    ("hermes", _hermes),
    ("qwen_xml", _qwen_xml),
    ("llama3_json", _llama_json),
    ("llama_pythonic", _pythonic),
    ("mistral", _mistral),
    ("mistral", _mistral_compact),
    ("deepseek_v3", _deepseek_v3),
    ("deepseek_v31", _deepseek_v31),
]
WITH_CONTENT = {"hermes", "qwen_xml", "mistral", "deepseek_v3", "deepseek_v31"}
MARKS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<|python_tag|>", "<think>", "</think>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    '{"name": "f", "arguments": {"x": 1}}', "{", "}", "[", "]", '"', "f(", ")", "\n", "\\ud800", "NaN", "<|im_end|>",
]  # fmt: skip

_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in ("null", "function"))
_keys = _names.filter(lambda name: not keyword.iskeyword(name))
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from(MARKS) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_calls = st.lists(st.tuples(_keys, st.dictionaries(_keys, _values, max_size=3)), max_size=3)


def _schemas(calls: Calls) -> dict[str, Any]:
    """One schema per tool. Several types of an argument: text, as a notation without types has it."""
    kinds = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object", type(None): "null"}
    return {
        name: {"properties": {key: {"type": kinds[type(value)]} for key, value in arguments.items()}}
        for name, arguments in calls
    }


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[write.__name__ for _, write in WRITERS])
@settings(max_examples=25, deadline=None)
@given(calls=_calls, reasoning=_words, content=_words)
def test_what_is_written_in_a_notation_is_read_back(
    name: str, write: Any, calls: Calls, reasoning: str, content: str
) -> None:
    if name == "qwen_xml":  # text in it has no quotes, so its own marks cannot stand in it; nor can two types
        calls = [(one, {k: v for k, v in args.items() if "</parameter>" not in str(v)}) for one, args in calls]
        calls = list(dict(calls).items())
    has_content = name in WITH_CONTENT or not calls
    content = content if has_content and not set(content) & set("<[{") else ""
    opens, closes = FORMATS[name].reasoning_marks
    reasoning = reasoning.replace(closes, "")  # which would end it
    text = f"{opens}\n{reasoning}\n{closes}\n\n{content}\n{write(calls)}{FORMATS[name].stop_marks[0]}"
    parsed = FORMATS[name].parse(text, schemas=_schemas(calls))
    found = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert [call.fault for call in parsed.calls] == [""] * len(calls)
    assert found == calls
    assert (parsed.reasoning, parsed.content) == (reasoning.strip(), content.strip())


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=num_examples(50), deadline=None)
@given(parts=st.lists(st.sampled_from(MARKS) | st.text(max_size=6), max_size=14), is_open=st.booleans())
def test_no_text_makes_a_format_raise(name: str, parts: list[str], is_open: bool) -> None:
    parsed = FORMATS[name].parse("".join(parts), is_reasoning_open=is_open)
    for call in parsed.calls:
        if not call.fault:
            assert call.name
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", FORMATS)
def test_deep_nesting_and_long_numbers_are_faults_or_text(name: str) -> None:
    for value in ("[" * 100_000, "9" * 10_000, "{" * 100_000):
        for before in (
            "",
            "<tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "[f(x=",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        ):
            parsed = FORMATS[name].parse(before + value)
            assert all(call.fault for call in parsed.calls)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("hermes", "<tool_call>add 1 2</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "does not end with </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ("qwen_xml", "<tool_call>\nadd\n</tool_call>", "<function=NAME>"),
        ("qwen_xml", "<tool_call><function=add><parameter=x>1</function></tool_call>", "parameter x"),
        ("qwen_xml", "<tool_call><function=add><parameter=x>1</parameter>", "</function></tool_call>"),
        ("llama3_json", '{"name": "add", "parameters": {"x": 1}', "not JSON"),
        ("llama_pythonic", "[add(1)]", "by name"),
        ("llama_pythonic", "[add(x=y)]", "literal value"),
        ("llama_pythonic", "[add(x=1]", "Python list"),
        ("mistral", "[TOOL_CALLS] [{]", "not JSON"),
        ("mistral", "[TOOL_CALLS] add", "NAME[ARGS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>"),
    ],
)
def test_malformed_call_is_a_call_with_a_fault(name: str, text: str, fault: str) -> None:
    (call,) = FORMATS[name].parse(text).calls
    assert fault in call.fault


def test_a_bad_call_leaves_the_calls_around_it() -> None:
    text = "<tool_call>{bad</tool_call>" + _hermes([("add", {"x": 1})]) + "<tool_call>" + _hermes([("mul", {})])
    assert [(call.name, bool(call.fault)) for call in FORMATS["hermes"].parse(text).calls] == [
        ("", True), ("add", False), ("", True), ("mul", False),
    ]  # fmt: skip


def test_call_inside_the_reasoning_is_none() -> None:
    text = f"I might write {_hermes([('add', {})])} here.</think>Three."
    parsed = FORMATS["hermes"].parse(text, is_reasoning_open=True)
    assert parsed.calls == ()
    assert parsed.content == "Three."
    unfinished = FORMATS["hermes"].parse("<think>" + _hermes([("add", {})]))
    assert unfinished.is_reasoning_open
    assert unfinished.calls == ()


def test_json_answer_without_a_name_is_no_call_of_llama() -> None:
    assert FORMATS["llama3_json"].parse('{"result": 3}').content == '{"result": 3}'


def test_xml_values_take_the_type_of_the_schema() -> None:
    types = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"anyOf": [{"type": "null"}, {"type": "string"}]},
             "d": {"type": "boolean"}, "e": {"enum": ["1", "2"]}}  # fmt: skip
    values = [("a", "3"), ("b", "3"), ("c", "null"), ("d", "True"), ("e", "1"), ("f", "7")]
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    (call,) = FORMATS["qwen_xml"].parse(text, schemas={"f": {"properties": types}}).calls
    assert json.loads(call.arguments) == {"a": 3, "b": "3", "c": None, "d": True, "e": "1", "f": "7"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|im_start|>...<tool_call>\\n{\"name\": <function-name>, \"arguments\": {}}\\n</tool_call>", "hermes"),
        ("<|im_start|>...<tool_call>\\n<function=example>\\n<parameter=x> ... arguments", "qwen_xml"),
        ("<|eot_id|> <|start_header_id|>ipython {\"name\": \"\", '\"parameters\": '", "llama3_json"),
        ("[INST] ... [TOOL_CALLS] ... [/INST]", "mistral"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜> ```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>name<｜tool▁sep｜>", "deepseek_v31"),
    ],
)  # fmt: skip
def test_template_shows_its_format(template: str, name: str) -> None:
    assert find_format(template, where="x").name == name
    assert find_format({"default": "", "tool_use": template}, where="x").name == name


def test_format_that_is_named_decides() -> None:
    assert find_format("<tool_call> arguments", name="mistral", where="x").name == "mistral"


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"x: .*format of tool calls in the tokenizer's chat template is unknown.*hermes.*deepseek_v31"
    ):
        find_format("<tool_call><arg_key> arguments", where="x")
    with pytest.raises(UserError, match="did you mean hermes"):
        find_format("", name="hermess", where="x")
    with pytest.raises(UserError, match="no chat template"):
        find_format(None, where="x")


def test_cut_answers_are_closed_with_their_reasoning() -> None:
    one = FORMATS["hermes"]
    assert one.closing(one.parse("Three")) == ""
    assert one.closing(one.parse("<think>Thr")) == "\n</think>\n\n"


def test_past_calls_have_the_shape_that_the_template_takes() -> None:
    assert FORMATS["llama3_json"].past_calls(["a", "b"])["tool_calls"][0]["function"] == {"name": "a", "arguments": {}}
    assert len(FORMATS["llama3_json"].past_calls(["a", "b"])["tool_calls"]) == 1
    deepseek = FORMATS["deepseek_v3"].past_calls([""])
    assert [one["function"] for one in deepseek["tool_calls"]] == [{"name": "unknown", "arguments": "{}"}] * 2


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think> a", False),
    ],
)
def test_prompt_that_ends_with_the_opening_mark_opens_the_reasoning(prompt: str, is_open: bool) -> None:
    assert FORMATS["hermes"].opens_reasoning(prompt) is is_open


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("7", False, "", "7"),
        (" \n<think> a </think> 7 ", False, "a", "7"),
        ("<think>a", True, "a", ""),
        ("a</think>7", True, "a", "7"),
        ("a</think>7", False, "a", "7"),
        ("a", True, "a", ""),
        ("</think>7", True, "", "7"),
    ],
)
def test_reasoning_is_what_stands_before_its_closing_mark(
    text: str, is_open: bool, reasoning: str, content: str
) -> None:
    parsed = FORMATS["hermes"].parse(text, is_reasoning_open=is_open)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert parsed.is_reasoning_open == (content == "")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("7<|im_end|>", "7"),
        ("7<|im_end|>\n", "7"),
        ("7<|endoftext|>", "7"),
        ("<|im_end|>7", "<|im_end|>7"),
        ("7<|im_end|><|im_end|>", "7<|im_end|>"),
    ],
)
def test_one_stop_mark_at_the_end_is_dropped(text: str, content: str) -> None:
    assert FORMATS["hermes"].parse(text).content == content


def test_message_with_past_calls_has_everything_that_templates_ask_for() -> None:
    assert FORMATS["hermes"].past_calls(["add", ""]) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}},
            {"id": "call00001", "type": "function", "function": {"name": "unknown", "arguments": {}}},
        ],
    }
    assert len(FORMATS["hermes"].past_calls([])["tool_calls"]) == 1
    assert len(FORMATS["hermes"].past_calls(["f"] * 70)["tool_calls"]) == 64
    assert len(FORMATS["deepseek_v3"].past_calls(["f"] * 70)["tool_calls"]) == 64
    assert [one["function"]["name"] for one in FORMATS["deepseek_v3"].past_calls(["a", "b", "c"])["tool_calls"]] == [
        "a", "b", "c",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "add", "parameters": {"x": 1}}',
        ' {"type" : "function", "function": {"name": "add", "parameters": {"x": 1}}}',
        '{"name": "add", "parameters": {"x": 1}, "type": "function"}',
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"x": 1}}',
    ],
)
def test_llama_call_may_name_its_type(text: str) -> None:
    (call,) = FORMATS["llama3_json"].parse(text).calls
    assert (call.name, json.loads(call.arguments), call.fault) == ("add", {"x": 1}, "")


def test_llama_calls_of_several_forms_follow_each_other_and_other_types_are_answers() -> None:
    text = '{"type": "function", "function": {"name": "a"}}; {"name": "b"} {"type": "function", "function": 3}'
    assert [(call.name, bool(call.fault)) for call in FORMATS["llama3_json"].parse(text).calls] == [
        ("a", False), ("b", False), ("", True),
    ]  # fmt: skip
    answer = '{"type": "circle", "name": "o"}'
    assert FORMATS["llama3_json"].parse(answer).content == answer


CALL = _hermes([("add", {})])
QUOTED = _hermes([("say", {"x": "a </think> b <think> c"})])


@pytest.mark.parametrize(
    ("text", "names", "reasoning", "content"),
    [
        (f"{CALL}<think>Wait.</think>Three.", [], f"{CALL}Wait.", "Three."),
        (f"Hm. {CALL} <think>Wait.</think>{QUOTED}", ["say"], f"Hm. {CALL} Wait.", ""),
        (f"<think>a</think>{CALL}<think>b</think>Four.", [], f"a\n{CALL}b", "Four."),
        (f"{CALL} so </think>Five.{CALL}", ["add"], f"{CALL} so", "Five."),
        (f"{QUOTED}Six.{QUOTED}", ["say", "say"], "", "Six."),
        (f"<tool_call>{{bad <think>b</think>{CALL}", ["add"], "<tool_call>{bad b", ""),
    ],
)
def test_what_stands_before_the_end_of_the_last_reasoning_is_reasoning(
    text: str, names: list[str], reasoning: str, content: str
) -> None:
    parsed = FORMATS["hermes"].parse(text)
    assert [call.name for call in parsed.calls] == names
    assert (parsed.reasoning, parsed.content, parsed.is_reasoning_open) == (reasoning, content, False)


def test_calls_before_a_reasoning_that_does_not_end_are_none() -> None:
    parsed = FORMATS["hermes"].parse(f"Seven. {CALL}<think>or {QUOTED}")
    assert parsed.is_reasoning_open
    assert (parsed.calls, parsed.content) == ((), "")
    assert parsed.reasoning == f"Seven. {CALL}or {QUOTED}".replace("</think>", "").replace("<think>", "")


def test_many_marks_inside_calls_are_passed_over_quickly() -> None:
    many = "<think></think>" * 20_000
    text = f"<think>a</think>Six.{_hermes([('say', {'x': many})] * 3)}"
    parsed = FORMATS["hermes"].parse(text)
    assert (len(parsed.calls), parsed.content) == (3, "Six.")
