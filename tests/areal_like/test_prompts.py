"""Claims about prompts that need no real tokenizer; templates and BOS rules are claimed where they are used."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.prompts import PromptEncoder, encode_text


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
    with pytest.raises(UserError, match=r"no token for 'x', 'y' -> fix"):
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

    with pytest.raises(UserError, match=r"cannot express the response: too long ->"):
        encode_text(TooLong(), "1111", what="the response")


def test_good_text_is_encoded_once() -> None:
    tokenizer = Digits()
    made = encoder(tokenizer)
    tokenizer.num_calls = 0
    assert made.encode({"prompt": "12"}) == [10, 1, 2]
    assert tokenizer.num_calls == 1


def test_row_may_hold_both_forms_and_messages_win() -> None:
    with pytest.raises(UserError, match="no chat template"):
        encoder(Digits()).encode({"prompt": "1", "messages": [{"role": "user", "content": "1"}]})
