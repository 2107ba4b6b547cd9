"""Claims about the tokenizers built in code, after a round trip through their saved folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_like.errors import UserError
from areal_like.tasks import guess_number, running_sum, tool_sum
from trainer.model import tokenizers
from trainer.model.tokenizers import build_tokenizer


def saved_and_loaded(name: str, folder: Path) -> PreTrainedTokenizerBase:
    build_tokenizer(name, None).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_running_sum_is_one_token_a_character_after_the_specials(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("characters:running_sum", tmp_path)
    assert len(tokenizer) == 18
    assert tokenizer("3+8=", add_special_tokens=False).input_ids == [6, 13, 11, 14]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_built_in_characters_are_those_of_their_tasks() -> None:
    assert tokenizers.RUNNING_SUM_CHARACTERS == running_sum.CHARACTERS
    assert tokenizers.TOOL_SUM_CHARACTERS == tool_sum.CHARACTERS
    assert tokenizers.GUESS_NUMBER_CHARACTERS == guess_number.CHARACTERS
    assert len(build_tokenizer("characters:tool_sum", None)) == 3 + len(tool_sum.CHARACTERS)


@pytest.mark.parametrize("name", ["characters:running_sum", "characters:tool_sum", "bytes"])
def test_prompt_starts_with_exactly_one_bos(name: str, tmp_path: Path) -> None:
    tokenizer = saved_and_loaded(name, tmp_path)
    ids = tokenizer("3+8=").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_running_sum_text_survives_the_round_trip(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("characters:running_sum", tmp_path)
    text = "3+8=1,1+5=6;#6"
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_unknown_character_is_an_error_not_a_loss(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("characters:running_sum", tmp_path)
    with pytest.raises(Exception, match="UNK"):
        tokenizer("3 and 8")


@pytest.mark.parametrize("text", ["plain words", "  two  spaces\n\ttab", "é ü 漢字 🙂", "\x00\x7f"])
def test_bytes_text_survives_the_round_trip_one_token_a_byte(text: str, tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("bytes", tmp_path)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 259


def test_from_model_without_a_model_names_the_choices() -> None:
    with pytest.raises(UserError, match="characters:running_sum"):
        build_tokenizer("from_model", None)


def test_missing_tokenizer_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer folder"):
        build_tokenizer(str(tmp_path / "absent"), None)


def test_folder_without_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer"):
        build_tokenizer("from_model", tmp_path)


def test_damaged_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    build_tokenizer("bytes", None).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model":')
    with pytest.raises(UserError, match="cannot be read"):
        build_tokenizer("from_model", tmp_path)


def test_tokenizer_without_end_of_sequence_is_a_user_error(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="end-of-sequence"):
        build_tokenizer("from_model", tmp_path)
