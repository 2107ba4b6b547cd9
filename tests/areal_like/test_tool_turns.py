"""Conversations with tool calls: what is trained is what the model has to sample, by its family's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from call_templates import CHATML, DEEPSEEK_V3, QWEN2_5, QWEN3, TEMPLATES, CallTemplate, tokenizer_of

from areal_like.errors import UserError
from areal_like.prompts import PromptEncoder
from areal_like.tool_turns import FORMS, checked_messages, checked_tools, in_form
from areal_like.trajectory import Segment
from rollout.agent.store import TokenStore
from rollout.chat.calls import schemas_by_name
from rollout.chat.formats import FORMATS
from rollout.tokens import PromptTokens
from rollout.transcript import Answer

REPOSITORY = Path(__file__).resolve().parents[2]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["x", "y"],
        },
    },
}
NOTE = 'é "quoted"\n{7}'


def called(*calls: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    """An assistant message with calls of `add`; arguments as objects or texts."""
    written = [{"type": "function", "function": {"name": "add", "arguments": one}} for one in calls]
    return {"role": "assistant", "content": content, "tool_calls": written, **more}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


USER = {"role": "user", "content": "Add 3 and 4, then 5."}
CONVERSATION = [
    USER, called({"x": 3, "y": 4}), tool("7"), called('{"x": 7, "y": 5, "note": ' + json.dumps(NOTE) + "}"), tool("12"),
    {"role": "assistant", "content": "Twelve.", "tool_calls": None},
    {"role": "user", "content": "And 1?"}, called({"x": 12, "y": 1}), tool("13"),
    {"role": "assistant", "content": "13"},
]  # fmt: skip
CALLS = [[{"x": 3, "y": 4}], [{"x": 7, "y": 5, "note": NOTE}], [], [{"x": 12, "y": 1}], []]


def parts_of(
    template: CallTemplate, messages: list[dict[str, Any]], tools: Any = (ADD,), **chat_kwargs: Any
) -> list[tuple[str, bool]]:
    """Texts of a conversation, and whether each is trained."""
    tokenizer = tokenizer_of(template)
    encoder = PromptEncoder(tokenizer, template=None, add_bos="auto", chat_kwargs=chat_kwargs)
    parts = encoder.encode_turns(messages, template.stop, tools)
    assert [is_own for _, is_own in parts] == [False, True] * (len(parts) // 2)
    return [(tokenizer.decode(ids), is_own) for ids, is_own in parts]


def trained(template: CallTemplate, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    return [text for text, is_own in parts_of(template, messages, **options) if is_own]


def read(template: CallTemplate, text: str) -> tuple[str, list[Any]]:
    """Content and arguments of the calls of `add`, as the family's parser has them."""
    parsed = FORMATS[template.format].parse(text, schemas=schemas_by_name([ADD]))
    assert all((call.name, call.fault) == ("add", "") for call in parsed.calls)
    return parsed.content, [json.loads(call.arguments) for call in parsed.calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_turns_are_the_calls_of_the_row_in_the_notation_of_the_family(name: str) -> None:
    template = TEMPLATES[name]
    parts = parts_of(template, CONVERSATION)
    texts = [text for text, is_own in parts if is_own]
    assert [read(template, text) for text in texts] == list(zip(["", "", "Twelve.", "", "13"], CALLS, strict=True))
    assert all(text.count(template.stop) == 1 and text.endswith(template.stop) for text in texts)
    given = "".join(text for text, is_own in parts if not is_own)
    assert [given.count(word) for word in (USER["content"], "And 1?")] == [1, 1]
    assert '"x"' not in given.partition(USER["content"])[2].replace(json.dumps(ADD), ""), "a call is given"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_coder", "llama3_2", "mistral", "deepseek_v3_1"])
def test_demonstrations_have_the_tokens_of_an_episode_of_an_agent(name: str) -> None:
    template = TEMPLATES[name]
    chat, tokenizer = FORMATS[template.format], tokenizer_of(template)
    tokens = PromptTokens(
        tokenizer, template=None, add_bos="auto", max_context=1 << 20, stop_ids=(tokenizer.eos_token_id,)
    )
    store = TokenStore(tokens, stop_marks=chat.stop_marks, has_text_arguments=chat.has_text_arguments)
    encoder = PromptEncoder(tokenizer, template=None, add_bos="auto")
    parts = [np.array(ids, np.int32) for ids, _ in encoder.encode_turns(CONVERSATION, template.stop, [ADD])]
    of_agent = in_form(checked_messages(CONVERSATION), FORMS[1])  # arguments are texts there
    places = [place for place, one in enumerate(of_agent) if one["role"] == "assistant"]
    for number, place in enumerate(places):
        prompt = store.prompt(of_agent[:place], [ADD])
        whole = np.concatenate(parts[: 2 * number + 1])
        assert prompt.transcript.tokens_T.tolist() == whole.tolist()
        own = parts[2 * number + 1]
        segment = Segment(own, np.zeros(len(own), np.float32), np.zeros(len(own), np.int32))
        answer = Answer(
            segment=segment, finish_reason="stop", ended_by="end_of_sequence", stop_token=tokenizer.eos_token_id
        )
        store.record(prompt, answer, of_agent[place], stop=template.stop, closing="")
    assert store.num_rendered_again == 0


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("qwen2_5", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("qwen3_instruct_2507", "<|im_end|>"),
        ("qwen3_5_think", "<|im_end|>"), ("qwen3_5_nothink", "<|im_end|>"), ("llama3_2", "<|eot_id|>"),
        ("nemotron_3_nano", "<|im_end|>"),
    ],
)  # fmt: skip
def test_templates_of_trl_are_trained_on_as_they_are_read(name: str, stop: str) -> None:
    pattern = f".venv-ecosystem/trl/lib/python*/site-packages/trl/chat_templates/{name}.jinja"
    file = next(REPOSITORY.glob(pattern), None)
    if file is None:
        pytest.skip("there is no .venv-ecosystem/trl with this template: make ecosystem")
    text = file.read_text()
    kind = "qwen_xml" if "<function=" in text else "llama3_json" if "ipython" in text else "hermes"
    template = CallTemplate(text, kind, stop)
    texts = trained(template, CONVERSATION)
    assert [read(template, text) for text in texts] == list(zip(["", "", "Twelve.", "", "13"], CALLS, strict=True))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "llama3_2"])
def test_several_calls_of_one_message_are_trained_in_order(name: str) -> None:
    both = [{"x": 1, "y": 2}, {"x": 1, "y": 2}]
    messages = [USER, called(*both), tool("3"), tool("3"), {"role": "assistant", "content": "3"}]
    assert read(TEMPLATES[name], trained(TEMPLATES[name], messages)[0]) == ("", both)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_coder", "deepseek_v3", "deepseek_v3_1"])
def test_content_next_to_calls_is_trained_with_them(name: str) -> None:
    messages = [USER, called({"x": 3, "y": 4}, content="Let me add.")]
    assert read(TEMPLATES[name], trained(TEMPLATES[name], messages)[0]) == ("Let me add.", [{"x": 3, "y": 4}])


def test_calls_without_arguments_ids_or_types_are_completed() -> None:
    bare = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": None}, {"name": "add", "arguments": ""}]}
    for name in ("qwen2_5", "mistral", "deepseek_v3"):
        messages = [USER, bare, tool("3"), tool("4"), {"role": "assistant", "content": "3"}]
        assert read(TEMPLATES[name], trained(TEMPLATES[name], messages)[0]) == ("", [{}, {}])
    parts = parts_of(TEMPLATES["mistral"], [USER, bare, tool("3"), tool("4"), {"role": "assistant", "content": "3"}])
    assert parts[2][0] == (
        '[TOOL_RESULTS] {"content": 3, "call_id": "call00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": 4, "call_id": "call00001"}[/TOOL_RESULTS]'
    )


def test_ids_of_the_row_are_kept_where_the_template_takes_them() -> None:
    def messages(one_id: str) -> list[dict[str, Any]]:
        message = called({"x": 1, "y": 2})
        message["tool_calls"][0]["id"] = one_id
        return [USER, message, {**tool("3"), "tool_call_id": one_id}, {"role": "assistant", "content": "3"}]

    kept = parts_of(TEMPLATES["mistral"], messages("abc123def"))
    assert ['"id": "abc123def"' in kept[1][0], '"call_id": "abc123def"' in kept[2][0]] == [True, True]
    long = parts_of(TEMPLATES["mistral"], messages("call_0123456789abcdef"))
    assert ['"id": "call00000"' in long[1][0], '"call_id": "call00000"' in long[2][0]] == [True, True]


def test_reasoning_is_trained_where_the_template_writes_it() -> None:
    answer = {"role": "assistant", "content": "7", "reasoning_content": "Done."}
    messages = [USER, called({"x": 3, "y": 4}, reasoning_content="I add."), tool("7"), answer]
    first, last = trained(TEMPLATES["qwen3"], messages)
    assert first.startswith("<think>\nI add.\n</think>\n\n<tool_call>")
    assert last == "<think>\nDone.\n</think>\n\n7<|im_end|>"
    assert trained(TEMPLATES["qwen2_5"], messages)[1] == "7<|im_end|>"
    assert read(TEMPLATES["qwen2_5"], trained(TEMPLATES["qwen2_5"], messages)[0]) == ("", [{"x": 3, "y": 4}])


def test_reasoning_that_the_row_does_not_have_is_not_trained() -> None:
    messages = [USER, called({"x": 3, "y": 4}), tool("7"), {"role": "assistant", "content": "7"}]
    for kwargs in ({}, {"enable_thinking": False}):
        first, last = trained(TEMPLATES["qwen3"], messages, **kwargs)
        assert first.startswith("<tool_call>")
        assert last == "7<|im_end|>"


OPENS = QWEN2_5.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
"""The prompt opens the reasoning, as in QwQ's template."""


def test_calls_inside_reasoning_that_the_prompt_opens_are_refused() -> None:
    template = CallTemplate(OPENS, "hermes")
    with pytest.raises(UserError, match=r"an opening reasoning marker.* begin its `content` with the reasoning"):
        parts_of(template, [USER, called({"x": 3, "y": 4})])
    message = called({"x": 3, "y": 4}, content="I add.\n</think>\n")
    parsed = FORMATS["hermes"].parse(trained(template, [USER, message])[0], is_reasoning_open=True)
    assert (parsed.reasoning, len(parsed.calls)) == ("I add.", 1)


def test_reasoning_that_the_prompt_opens_is_closed_as_the_template_closes_it() -> None:
    role = "{{- '<|im_start|>' + message.role }}"
    closes = OPENS.replace(role, "{{- '<|im_start|>' + message.role + '\n<think></think>' }}")
    (text,) = trained(CallTemplate(closes, "hermes"), [USER, called({"x": 3, "y": 4})])
    assert text.startswith("</think>\n<tool_call>")
    assert len(FORMATS["hermes"].parse(text, is_reasoning_open=True).calls) == 1


ONLY_FIRST = QWEN2_5.replace("in message.tool_calls %}", "in message.tool_calls[:1] %}")
QUOTED = QWEN2_5.replace("tool_call.arguments | tojson", "tool_call.arguments")
"""It writes an object in Python's notation, and text as it is."""
SPLITS = QWEN3.replace("{%- if (loop.first and content) or (not loop.first) %}", "{%- if not loop.first %}<|im_end|>")


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (CHATML, [USER, called({"x": 3})], "does not render the tool calls .* `tool_calls`"),
        (CHATML, [USER, called({"x": 3}, content='{"name": "add", "x": 3}')], "does not render the tool calls"),
        (ONLY_FIRST, [USER, called({"x": 3}, {"x": 4})], "does not render the tool calls"),
        (SPLITS, [USER, called({"x": 3}, {"x": 4})], "middle of an assistant message with 2 tool calls"),
        (QWEN2_5.replace("}}{%- endfor %}{{- '<|im_end|>\n' }}", "}}{%- endfor %}"), [USER, called({"x": 3})],
         "does not end an assistant message with '<|im_end|>' if it has tool calls".replace("|", r"\|")),
        (QWEN2_5, [USER, called({"x": 3}, content="a<|im_end|>b")], "in the middle of an assistant message"),
    ],
)  # fmt: skip
def test_templates_that_cannot_write_calls_are_refused(
    template: str, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        parts_of(CallTemplate(template, "hermes"), messages)


@pytest.mark.parametrize(
    ("name", "message", "words"),
    [
        ("llama3_2", called({"x": 3}, {"x": 4}), "only supports single tool-calls at once.* -> correct the row"),
        ("llama3_2", called({"x": 3}, content="I add."), "leaves out the `content`"),
        ("mistral", called({"x": 3}, content="I add."), "leaves out the `content`"),
        (
            "deepseek_v3",
            called({"x": 3}, {"x": 4}, {"x": 5}),
            "in the middle of an assistant message with 3 tool calls",
        ),
    ],
)
def test_messages_that_a_template_cannot_write_are_refused(name: str, message: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parts_of(TEMPLATES[name], [USER, message])


def test_arguments_are_written_in_the_form_that_the_template_takes() -> None:
    assert '"arguments": {"x": 3}}' in trained(CallTemplate(QUOTED, "hermes"), [USER, called({"x": 3})])[0]
    assert "```json\n{}\n```" in trained(CallTemplate(DEEPSEEK_V3, "", "<｜end▁of▁sentence｜>"), [USER, called({})])[0]


@pytest.mark.parametrize(
    "calls",
    [
        3, [3], [{}], [{"function": {}}], [{"function": "add"}], [{"function": {"name": ""}}],
        [{"function": {"name": "add", "arguments": "{"}}], [{"function": {"name": "add", "arguments": "[1]"}}],
        [{"function": {"name": "add", "arguments": [1]}}], [{"function": {"name": "add", "arguments": '{"x": NaN}'}}],
    ],
)  # fmt: skip
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(UserError, match=r"tool_calls|not a JSON object"):
        checked_messages([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_results_are_of_the_call_that_they_name_else_of_the_next_one() -> None:
    two = {"role": "assistant", "tool_calls": [{"id": "a", "name": "f"}, {"id": "b", "name": "g"}, {"name": "h"}]}
    named = {"role": "tool", "content": "1", "tool_call_id": "b"}
    unknown = {"role": "tool", "content": "4", "tool_call_id": "z"}
    made = checked_messages([tool("0"), two, named, tool("2"), tool("3"), unknown, tool("5")])
    assert [(one.get("tool_call_id"), one.get("name")) for one in made if one["role"] == "tool"] == [
        (None, None), ("b", "g"), ("a", "f"), ("call00002", "h"), ("z", None), (None, None),
    ]  # fmt: skip


def test_tools_are_a_list_or_its_json_text() -> None:
    assert checked_tools(None) == []
    assert checked_tools([ADD]) == checked_tools(json.dumps([ADD])) == [ADD]
    assert checked_tools([ADD["function"]]) == [ADD["function"]]
    for wrong in ("add", "[", [3], [{}], [{"function": {}}], {"name": "add"}, [{"name": 3}]):
        with pytest.raises(UserError, match="`tools` must be a list of JSON schemas"):
            checked_tools(wrong)
