"""Claims about prompts that need no real tokenizer; templates and BOS rules are claimed where they are used."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.errors import UserError
from areal_like.prompts import PromptEncoder, TurnEnd, encode_text


class Digits:
    """Knows digits; everything else is an error without a class of its own, as in the tokenizers library."""

    bos_token_id: int | None = 10
    chat_template: str | None = None
    num_calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_calls += 1
        if not all(character in "0123456789" for character in text):
            raise Exception("missing [UNK] token\nand a trace")
        return [10] * add_special_tokens + [int(character) for character in text]


def encoder(tokenizer: Any, **changes: Any) -> PromptEncoder:
    return PromptEncoder(tokenizer, **{"template": None, "add_bos": "auto", **changes})


def test_characters_without_a_token_are_named_once_each_and_at_most_five() -> None:
    with pytest.raises(UserError, match=r"no token for 'x', 'y' -> correct the row"):
        encoder(Digits()).encode({"prompt": "1x2yx"})
    with pytest.raises(UserError, match=r"no token for 'a', 'b', 'c', 'd', 'e' ->"):
        encoder(Digits()).encode({"prompt": "abcdefgh"})


def test_half_a_character_is_shown_escaped() -> None:
    with pytest.raises(UserError, match=r"'\\ud800'") as caught:
        encode_text(Digits(), "1\ud800", what="the prompt")
    str(caught.value).encode()


def test_error_that_is_no_single_characters_fault_keeps_its_first_line() -> None:
    class TooLong(Digits):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if len(text) > 3:
                raise Exception("too long\nand a trace")
            return super().encode(text, add_special_tokens)

    with pytest.raises(UserError, match=r"cannot encode the response: too long ->"):
        encode_text(TooLong(), "1111", what="the response")


def test_good_text_is_encoded_once() -> None:
    tokenizer = Digits()
    made = encoder(tokenizer)
    tokenizer.num_calls = 0
    assert made.encode({"prompt": "12"}) == [10, 1, 2]
    assert tokenizer.num_calls == 1


def test_row_may_hold_both_forms_and_messages_win() -> None:
    with pytest.raises(UserError, match="require a chat template"):
        encoder(Digits()).encode({"prompt": "1", "messages": [{"role": "user", "content": "1"}]})


# ---------------------------------------------------------------- templates and the BOS rule

BOS = 1


class Letters:
    """A token per letter; a chat template `[role]content;`, at the end `[assistant]` or what the assistant wrote."""

    bos_token_id: int | None = BOS
    chat_template: str | None = "set"

    def __init__(self, *, adds_bos: bool = True, writes_bos: bool = False) -> None:
        self.adds_bos, self.writes_bos = adds_bos, writes_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (add_special_tokens and self.adds_bos) + [BOS if one == "^" else ord(one) for one in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options["tokenize"] is False
        text = ";".join(f"[{one['role'][0]}]{one['content']}" for one in messages)
        end = ";[a]" if options["add_generation_prompt"] else "" if options["continue_final_message"] else ";"
        return "^" * self.writes_bos + text + end


def text_of(tokens: list[int]) -> str:
    return "".join("^" if one == BOS else chr(one) for one in tokens)


@pytest.mark.parametrize(
    ("facts", "add_bos", "text", "chat"),
    [
        ({}, "auto", "^hi", "[u]hi;[a]"), ({}, "always", "^hi", "^[u]hi;[a]"), ({}, "never", "hi", "[u]hi;[a]"),
        ({"adds_bos": False}, "auto", "hi", "[u]hi;[a]"), ({"adds_bos": False}, "always", "^hi", "^[u]hi;[a]"),
        ({"writes_bos": True}, "auto", "^hi", "^[u]hi;[a]"), ({"writes_bos": True}, "never", "hi", "[u]hi;[a]"),
        ({"writes_bos": True}, "always", "^hi", "^[u]hi;[a]"),
    ],
)  # fmt: skip
def test_a_prompt_has_one_bos_where_the_tokenizer_or_the_setting_wants_one(
    facts: dict[str, bool], add_bos: Any, text: str, chat: str
) -> None:
    tokenizer = Letters(**facts)
    assert text_of(encoder(tokenizer, add_bos=add_bos).encode({"prompt": "hi"})) == chat
    templated = encoder(tokenizer, add_bos=add_bos, template="{prompt}")
    assert text_of(templated.encode({"prompt": "hi"})) == text, "the text of a template is plain text"
    tokenizer.chat_template = None
    assert text_of(encoder(tokenizer, add_bos=add_bos).encode({"prompt": "hi"})) == text


def test_a_tokenizer_without_a_bos_adds_none() -> None:
    tokenizer = Letters()
    tokenizer.bos_token_id = None
    assert text_of(encoder(tokenizer).encode({"prompt": "hi"})) == "[u]hi;[a]"
    with pytest.raises(UserError, match="no BOS token"):
        encoder(tokenizer, add_bos="always")


def test_a_template_takes_the_prompt_at_its_place() -> None:
    made = encoder(Letters(), template="Q: {prompt} A:", add_bos="never")
    assert text_of(made.encode({"prompt": "hi"})) == "Q: hi A:"
    with pytest.raises(UserError, match=r"does not contain \{prompt\}"):
        encoder(Letters(), template="Q")


def test_messages_that_end_with_the_assistant_go_on_there() -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ha"}]
    assert text_of(encoder(Letters()).encode({"messages": said})) == "[u]hi;[a]ha"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "this row has "), ({"prompt": 5}, "this row has "), ({"prompt": " "}, "the prompt is empty"),
        ({"messages": []}, "must be a non-empty list"), ({"messages": "hi"}, "must be a non-empty list"),
        ({"messages": [{"role": "user"}]}, "`role` and `content`"),
        ({"messages": [{"content": "x"}]}, "`role` and `content`"),
        ({"messages": ["hi"]}, "`role` and `content`"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_prompt_is_refused_in_words(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        encoder(Letters()).encode(row)


def turns(*said: str) -> list[dict[str, Any]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(said)]


def test_a_conversation_is_what_was_given_and_what_the_assistant_wrote_in_turns() -> None:
    made = encoder(Letters(writes_bos=True)).encode_turns(turns("a", "b", "c", "d", "e", "f"), ";")
    assert [(text_of(tokens), is_own) for tokens, is_own in made] == [
        ("^[u]a;[a]", False), ("b;", True), ("[u]c;[a]", False), ("d;", True), ("[u]e;[a]", False), ("f;", True),
    ]  # fmt: skip
    assert text_of([token for tokens, _ in made for token in tokens]) == "^[u]a;[a]b;[u]c;[a]d;[u]e;[a]f;"


@pytest.mark.parametrize(
    ("messages", "stop", "words"),
    [
        ([], ";", "begin with an assistant message"), (turns("a"), ";", "end with one"),
        (turns("a", "b", "c"), ";", "end with one"), (turns("a", "b", "c", "d")[1:], ";", "begin with"),
        (turns("a", ""), ";", "must be non-empty text"), (turns("a", "b", "c", "d"), "<end>", "does not end"),
        ([*turns("a"), {"role": "assistant", "content": "b", "tool_calls": [1]}], ";", "`tool_calls` must be a list"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_trained_on_is_refused_in_words(
    messages: list[dict[str, Any]], stop: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        encoder(Letters()).encode_turns(messages, stop)


def test_a_template_that_raises_is_the_rows_mistake() -> None:
    class Strict(Letters):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
            raise ValueError("no system role\nand a trace")

    with pytest.raises(UserError, match=r"rejected the messages \(no system role\)"):
        encoder(Strict()).encode({"prompt": "hi"})


@pytest.mark.parametrize(("chat_template", "template"), [(None, None), (None, "{prompt}"), ("{{ 1 / 0 }}", "{prompt}")])
def test_text_between_turns_has_no_tokens_of_its_own_where_prompts_have_no_chat_template(
    chat_template: str | None, template: str | None
) -> None:
    tokenizer = Digits()
    tokenizer.chat_template = chat_template
    assert encoder(tokenizer, template=template).between_turns("1", "2") is None


CHAT = {"system_prompt": "Be brief.", "kwargs": {"enable_thinking": False}}


def test_a_system_prompt_of_the_source_comes_first_and_needs_a_chat_template() -> None:
    made = encoder(Letters())
    assert text_of(made.encode({"prompt": "hi", "_chat": CHAT})) == "[s]Be brief.;[u]hi;[a]"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}, {"role": "user", "content": "a"}]
    text = text_of(made.encode({"messages": said, "_chat": CHAT}))
    assert text == "[s]Be brief.;[u]hi;[a]so;[u]a;[a]"
    plain = Letters()
    plain.chat_template = None
    with pytest.raises(UserError, match="require a chat template, but the tokenizer has none"):
        encoder(plain).encode({"prompt": "hi", "_chat": CHAT})


def test_arguments_of_the_source_reach_the_template_in_every_turn() -> None:
    seen = []

    class Thinking(Letters):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
            seen.append(options.get("enable_thinking"))
            return super().apply_chat_template(messages, **options)

    made = encoder(Thinking())
    made.encode({"prompt": "hi"})
    made.for_row({"prompt": "hi"}).encode({"prompt": "hi"})
    assert seen == [None, None]
    of_row = made.for_row({"prompt": "hi", "_chat": CHAT})
    of_row.encode({"prompt": "hi", "_chat": CHAT})
    said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}, {"role": "user", "content": "1"}]
    assert of_row.continuation(said, 2, [";"])
    assert seen[2:] == [False, False, False]


USER, SO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}
TOOL = {"role": "tool", "content": "7"}
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ASK = "<|assistant|>"
BEGINS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + ASKS
"""No marker at the end of a turn, as in GLM's: the next message's ends it."""
RETURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    + ASKS
)
"""Another marker at the end of the last turn than of earlier ones, as in gpt-oss."""
CLOSES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else '<|im_end|>' }}"
)
"""An end of sequence after the whole conversation, as in Phi-3's; it is the tokenizer's."""


@pytest.mark.parametrize(
    ("template", "messages", "stops", "mark", "tail", "begins_next"),
    [
        (BEGINS, [USER, SO, USER], ["<|user|>", "<|tool|>"], "<|user|>", "hi<|assistant|>", True),
        (BEGINS, [USER, SO, TOOL], ["<|user|>", "<|tool|>"], "<|tool|>", "7<|assistant|>", True),
        (BEGINS, [USER, SO, USER, SO, USER], ["<|tool|>", "<|user|>"], "<|user|>", "hi<|assistant|>", True),
        (RETURNS, [USER, SO, USER], ["<|return|>", "<|end|>"], "<|end|>", "<|start|>user:hi<|end|>" + ASK, False),
        (CLOSES, [USER, SO, USER], ["<|im_end|>", "<|end|>"], "<|end|>", "<|user|>hi<|end|><|assistant|>", False),
        (CLOSES, [USER, SO, USER], ["<|end|>"], "<|end|>", "<|user|>hi<|end|><|assistant|>", False),
    ],
)  # fmt: skip
def test_the_end_of_a_turn_is_found_in_each_kind_of_template(
    template: str, messages: list[dict[str, str]], stops: list[str], mark: str, tail: str, begins_next: bool
) -> None:
    made = PromptEncoder(byte_tokenizer(template), template=None, add_bos="auto")
    assert made.turn_end(messages, len(messages) - 1, stops) == TurnEnd(mark, tail, begins_next)


def test_what_follows_a_turn_depends_on_how_it_was_ended() -> None:
    ends = TurnEnd("<|end|>", "\nnext")
    assert [ends.after(stop) for stop in ("<|end|>", "<|return|>", "")] == ["\nnext", "\nnext", "<|end|>\nnext"]
    begins = TurnEnd("<|user|>", "hi", begins_next=True)
    assert [begins.after(stop) for stop in ("<|user|>", "<|tool|>", "")] == ["hi", "<|user|>hi", "<|user|>hi"]


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (BEGINS, ["<|system|>"]), (RETURNS, ["<|return|>"]), (CLOSES, ["<|user|>"]),
        # The next message has changed what was written before it.
        ("{{ messages | length }}" + BEGINS, ["<|user|>"]),
        ("{{ messages | length }}" + RETURNS, ["<|return|>", "<|end|>"]),
        # An earlier answer is closed, this one is not, as with one call of a tool in DeepSeek's.
        ("{% for m in messages %}{{ m.content }}{{ '<|end|>' if loop.first }}{% endfor %}", ["<|end|>"]),
    ],
)  # fmt: skip
def test_an_end_that_the_text_does_not_show_is_refused(template: str, stops: list[str]) -> None:
    made = PromptEncoder(byte_tokenizer(template), template=None, add_bos="auto")
    with pytest.raises(UserError, match=f"does not end the assistant's turns with '{re.escape(stops[0])}'"):
        made.turn_end([USER, SO, USER], 2, stops)
