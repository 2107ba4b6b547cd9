"""Claims about the text of reward models and the record of their tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.scored_text import NOTE, check_tokenizer, padding_id, scored_text, write_tokenizer_digest

MESSAGES = [{"role": "user", "content": "q"}]


def tokenizer(**fields: Any) -> Any:
    known = {"chat_template": None, "pad_token_id": None, "eos_token_id": None, "unk_token_id": None}
    return SimpleNamespace(**{**known, **fields}, apply_chat_template=lambda messages, tokenize: f"<{messages}>")


def test_a_chat_template_writes_the_text_and_its_special_tokens() -> None:
    assert scored_text(tokenizer(chat_template="t"), "plain", MESSAGES) == (f"<{MESSAGES}>", False)
    assert scored_text(tokenizer(chat_template="t"), "plain", None) == ("plain", True)
    assert scored_text(tokenizer(), "plain", MESSAGES) == ("plain", True)


def test_padding_is_the_first_of_pad_end_and_unknown() -> None:
    assert padding_id(tokenizer(pad_token_id=0, eos_token_id=2)) == 0
    assert padding_id(tokenizer(eos_token_id=2, unk_token_id=3)) == 2
    assert padding_id(tokenizer(unk_token_id=3)) == 3
    assert padding_id(tokenizer()) is None


def test_another_tokenizer_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    check_tokenizer(tmp_path)  # nothing is recorded
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"changed": 1}')
    check_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another")
    with pytest.raises(UserError, match="differs from the one that the reward model was trained with"):
        check_tokenizer(tmp_path)
    (tmp_path / NOTE).write_text("[]")
    with pytest.raises(UserError, match=r"reward_model.json: the file cannot be read"):
        check_tokenizer(tmp_path)
