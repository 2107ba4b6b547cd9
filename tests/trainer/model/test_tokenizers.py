"""Claims about the tokenizers built in code, after a round trip through their saved folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from areal_like.errors import UserError
from areal_like.tasks import guess_number, running_sum, tool_sum
from trainer.model import tokenizers
from trainer.model.tokenizers import BUILT_IN_TOKENIZERS, build_tokenizer


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


@pytest.mark.parametrize(
    ("name", "characters"),
    [
        ("characters:running_sum", running_sum.CHARACTERS), ("characters:tool_sum", tool_sum.CHARACTERS),
        ("characters:guess_number", guess_number.CHARACTERS),
    ],
)  # fmt: skip
def test_each_task_has_its_own_characters_in_their_order(name: str, characters: str) -> None:
    tokenizer = build_tokenizer(name, None)
    ids = tokenizer(characters, add_special_tokens=False).input_ids
    assert ids == list(range(3, 3 + len(characters)))
    assert len(tokenizer) == 3 + len(characters)
    assert name in BUILT_IN_TOKENIZERS


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


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"]
)
def test_any_file_of_a_tokenizer_is_tried_and_an_empty_tokenizer_is_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token it is small, but no mistake."""
    asked: list[dict[str, Any]] = []

    class Made(list[str]):
        eos_token_id = 0

    def load(folder: str, **keys: Any) -> Made:
        asked.append({"folder": folder, **keys})
        return made

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    (tmp_path / file).touch()
    made = Made()
    with pytest.raises(UserError) as raised:
        build_tokenizer(str(tmp_path), None)
    assert str(raised.value) == f"{tmp_path}: the tokenizer is empty -> download the tokenizer files again"
    made = Made(["end"])
    assert build_tokenizer(str(tmp_path), None) is made
    assert asked == [{"folder": str(tmp_path), "local_files_only": True}] * 2, "nothing is downloaded"


def test_two_texts_have_one_beginning_and_ends_mean_what_they_are_called(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("bytes", tmp_path)
    ids = tokenizer("ab", "c").input_ids
    assert ids == [1, ord("a") + 3, ord("b") + 3, ord("c") + 3]
    assert tokenizer.decode([3 + ord(character) for character in "a , b"]) == "a , b", "no space is cleaned away"


def test_marks_of_the_calculator_s_chats_are_one_token_each(tmp_path: Path) -> None:
    tokenizer = saved_and_loaded("chat:tool_sum", tmp_path)
    call = {"function": {"name": "add", "arguments": {"x": 3, "y": 8}}}
    messages = [
        {"role": "user", "content": "3+8="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("<3+8=><" + "[3,8]>" + "<1>" + "<")
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith('{"x": 3, "y": 8}}\n</tool_call>1')
    assert (tokenizer.eos_token, tokenizer.bos_token) == (tool_sum.CHAT_END, None)


def test_demonstrations_as_chats_are_what_the_chat_template_writes() -> None:
    tokenizer = build_tokenizer("chat:tool_sum", None)
    chats = tool_sum.demonstrations(5, {"chat": True}, 30)
    for chat, plain in zip(chats, tool_sum.demonstrations(5, None, 30), strict=True):
        messages: list[dict[str, Any]] = [{"role": "user", "content": plain["prompt"]}]
        for text, is_trained in plain["spans"]:
            said, opened, call = text.partition("(")
            if not is_trained:
                messages.append({"role": "tool", "content": text.removesuffix(";")})
            elif opened:
                arguments = {"x": int(call[0]), "y": int(call[2])}
                calls = [{"function": {"name": "add", "arguments": arguments}}]
                messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            else:
                messages.append({"role": "assistant", "content": said})
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert chat["prompt"] == plain["prompt"]
        assert prompt + "".join(text for text, _ in chat["spans"]) + tool_sum.CHAT_END == whole
        assert [one[1] for one in chat["spans"]] == [one[1] for one in plain["spans"]]
