"""Prompts and text: templates, the BOS rule, end-of-sequence ids."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from areal_like.errors import UserError
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids

PAD, BOS, EOS = 0, 1, 2
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if not loop.last %};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_tokens_of_a_text_are_the_callers_own_each_time() -> None:
    class Counting:
        bos_token_id, chat_template, num_calls = None, None, 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.num_calls += 1
            return [ord(one) for one in text]

    tokenizer = Counting()
    tokens = PromptTokens(tokenizer, template=None, add_bos="auto", max_context=9)
    first = tokens.encode("ab")
    first[:] = 0
    assert tokens.encode("ab").tolist() == [97, 98]
    assert tokenizer.num_calls == 1
    assert len(tokens.encode("a" * 100)) == len(tokens.encode("a" * 100)) == 100
    assert tokenizer.num_calls == 3, "long texts are not kept"


def make_tokenizer(*, bos=True, adds_bos=True, adds_eos=False, chat_template=None):
    characters = "abcdefghijklmnopqrstuvwxyz 0123456789[];:{}"
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    single = f"{'<s> ' if bos and adds_bos else ''}$A{' </s>' if adds_eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = chat_template
    return made


def make_tokens(tokenizer, *, template=None, add_bos="auto", max_context=64):
    return PromptTokens(tokenizer, template=template, add_bos=add_bos, max_context=max_context, stop_ids=(EOS,))


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_plain_prompt_gets_the_bos_the_tokenizer_adds_by_itself():
    ids = make_tokens(make_tokenizer()).prompt({"prompt": "ab"})
    assert ids.dtype == np.int32
    assert list(ids[:1]) == [BOS]
    assert len(ids) == 3


def test_plain_prompt_of_a_tokenizer_without_bos_habit_gets_none():
    assert BOS not in make_tokens(make_tokenizer(adds_bos=False)).prompt({"prompt": "ab"})


def test_prompt_never_ends_in_the_eos_a_tokenizer_would_add():
    tokenizer = make_tokenizer(adds_eos=True)
    assert tokenizer.encode("ab")[-1] == EOS
    assert make_tokens(tokenizer).prompt({"prompt": "ab"})[-1] != EOS


@pytest.mark.parametrize("add_bos", ["auto", "always"])
@pytest.mark.parametrize("prompt", ["<s>ab", "<s><s>ab"])
def test_bos_in_the_text_is_never_doubled(add_bos, prompt):
    ids = list(make_tokens(make_tokenizer(), add_bos=add_bos).prompt({"prompt": prompt}))
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


def test_add_bos_never_takes_it_away():
    assert BOS not in make_tokens(make_tokenizer(), add_bos="never").prompt({"prompt": "<s>ab"})


def test_add_bos_always_adds_it_where_the_tokenizer_does_not():
    assert make_tokens(make_tokenizer(adds_bos=False), add_bos="always").prompt({"prompt": "ab"})[0] == BOS


def test_add_bos_always_without_a_bos_token_is_refused():
    with pytest.raises(UserError, match="no BOS"):
        make_tokens(make_tokenizer(bos=False), add_bos="always")


def test_chat_template_is_used_where_there_is_one_and_its_bos_is_not_doubled():
    tokenizer = make_tokenizer(chat_template=CHAT)
    ids = list(make_tokens(tokenizer).prompt({"prompt": "ab"}))
    assert text_of(tokenizer, ids).replace("<s>", "") == "[user]ab[assistant]"
    assert ids.count(BOS) == 1


def test_chat_template_without_bos_stays_without_in_auto():
    tokenizer = make_tokenizer(chat_template=CHAT.replace("{{ bos_token }}", ""))
    assert BOS not in make_tokens(tokenizer).prompt({"prompt": "ab"})


def test_messages_rows_go_through_the_chat_template():
    tokenizer = make_tokenizer(chat_template=CHAT)
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    ids = make_tokens(tokenizer).prompt({"messages": messages, "prompt": "ignored"})
    assert text_of(tokenizer, ids).replace("<s>", "") == "[system]x;[user]y[assistant]"


def test_messages_ending_with_the_assistant_are_continued():
    tokenizer = make_tokenizer(chat_template=CHAT)
    messages = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "so"}]
    ids = make_tokens(tokenizer).prompt({"messages": messages})
    assert text_of(tokenizer, ids).endswith("[assistant]so")


@pytest.mark.parametrize("messages", [[], "text", [{"role": "user"}], ["ab"], 3])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(UserError, match="messages"):
        make_tokens(make_tokenizer(chat_template=CHAT)).prompt({"messages": messages})


def test_messages_without_a_chat_template_are_refused_in_words():
    with pytest.raises(UserError, match="require a chat template"):
        make_tokens(make_tokenizer()).prompt({"messages": [{"role": "user", "content": "y"}]})


def test_chat_template_that_raises_is_the_rows_mistake():
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="rejected"):
        make_tokens(tokenizer).prompt({"prompt": "ab"})


def test_prompt_template_wins_over_the_chat_template_and_keeps_braces():
    tokenizer = make_tokenizer(chat_template=CHAT)
    ids = make_tokens(tokenizer, template="q: {prompt} {x}").prompt({"prompt": "{a}"})
    assert text_of(tokenizer, ids).replace("<s>", "") == "q: {a} {x}"
    assert ids[0] == BOS


def test_prompt_template_without_its_placeholder_is_refused():
    with pytest.raises(UserError, match="prompt_template"):
        make_tokens(make_tokenizer(), template="question")


@pytest.mark.parametrize("row", [{"prompt": ""}, {"prompt": "  "}, {"prompt": "<s>"}])
def test_empty_prompt_is_refused(row):
    with pytest.raises(UserError, match="empty"):
        make_tokens(make_tokenizer()).prompt(row)


def test_row_without_prompt_names_its_columns():
    with pytest.raises(UserError, match="question"):
        make_tokens(make_tokenizer()).prompt({"question": "ab"})


def test_prompt_as_long_as_the_context_is_refused_and_one_shorter_is_not():
    tokens = make_tokens(make_tokenizer(adds_bos=False), max_context=8)
    assert len(tokens.prompt({"prompt": "a" * 7})) == 7
    with pytest.raises(UserError, match="no room"):
        tokens.prompt({"prompt": "a" * 8})


def test_character_without_a_token_is_refused_not_dropped():
    with pytest.raises(UserError, match=r"cannot encode the prompt.*'Ü'"):
        make_tokens(make_tokenizer()).prompt({"prompt": "Ü"})


def test_decoded_answer_has_no_special_tokens_and_keeps_spaces():
    tokenizer = make_tokenizer()
    ids = np.array([*tokenizer.encode("a ;b", add_special_tokens=False), EOS], np.int32)
    assert make_tokens(tokenizer).decode(ids) == "a ;b"


def test_ids_beyond_the_vocabulary_do_not_break_decoding():
    assert make_tokens(make_tokenizer()).decode(np.array([3, 60_000], np.int32)) == "a"


def test_eos_ids_come_from_generation_config_first(tmp_path):
    tokenizer = make_tokenizer()
    assert stop_ids(tmp_path, tokenizer) == (EOS,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert stop_ids(tmp_path, tokenizer) == (8, 9)


def test_eos_id_of_a_nested_text_config_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert stop_ids(tmp_path, make_tokenizer()) == (7,)


def test_damaged_config_is_the_users_mistake(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config"):
        stop_ids(tmp_path, make_tokenizer())


def test_saved_tokenizer_is_loaded_from_the_model_folder(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, "from_model")
    assert list(make_tokens(loaded).prompt({"prompt": "ab"})) == list(
        make_tokens(make_tokenizer()).prompt({"prompt": "ab"})
    )


def test_folder_without_tokenizer_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path, "from_model")


def test_a_groups_prompt_is_encoded_once_and_what_a_workflow_changes_is_encoded_again():
    tokenizer = make_tokenizer(chat_template=CHAT)
    tokens, calls = make_tokens(tokenizer), []
    encode = tokenizer.encode
    tokenizer.encode = lambda *args, **options: calls.append(args) or encode(*args, **options)
    row = {"messages": [{"role": "user", "content": "y"}]}
    first = tokens.prompt(row)
    first[:] = 0  # a caller's own copy
    assert text_of(tokenizer, tokens.prompt(row)).endswith("[user]y[assistant]")
    assert len(calls) == 1
    row["messages"].append({"role": "assistant", "content": "so"})
    assert text_of(tokenizer, tokens.prompt(row)).endswith("[assistant]so")
    assert len(calls) == 2


def test_text_of_a_tool_becomes_tokens_without_template_or_special_tokens():
    tokens = make_tokens(make_tokenizer(adds_eos=True), template="Q: {prompt}")
    ids = tokens.encode("ab")
    assert ids.dtype == np.int32
    assert tokens.decode(ids) == "ab"
    assert not {BOS, EOS} & set(ids.tolist())
    assert tokens.encode("").shape == (0,)


def test_an_answer_is_decoded_as_it_was_sampled_without_special_tokens() -> None:
    asked: dict[str, object] = {}

    class Decoding:
        bos_token_id, chat_template = None, None

        def decode(self, tokens: list[int], **options: bool) -> str:
            asked.update(options, tokens=tokens)
            return "a ."

    assert make_tokens(Decoding()).decode(np.array([5, 6], np.int32)) == "a ."
    assert asked == {"tokens": [5, 6], "skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def test_an_observation_is_what_the_chat_template_writes_between_two_turns():
    chat = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(chat_template=chat)
    ids = make_tokens(tokenizer).observation("ab", EOS)
    assert text_of(tokenizer, ids) == ";[user]ab[assistant]"
    with pytest.raises(UserError, match="does not end the assistant's turns"):
        make_tokens(make_tokenizer(chat_template=CHAT)).observation("ab", EOS)


def test_a_special_token_in_an_observation_is_text():
    tokenizer = make_tokenizer(chat_template=CHAT.replace("{% endfor %}", "{{ eos_token }};{% endfor %}"))
    with pytest.raises(UserError, match="no token for '<'"):  # as text this tokenizer cannot express it
        make_tokens(tokenizer).observation("a</s>;[assistant]b</s>", EOS)


def test_an_observation_without_a_chat_is_the_text():
    assert text_of(make_tokenizer(), make_tokens(make_tokenizer()).observation("ab", EOS)) == "ab"
    plain = make_tokens(make_tokenizer(chat_template=CHAT), template="q: {prompt}")
    assert text_of(make_tokenizer(), plain.observation("ab", EOS)) == "ab"


def test_tokens_of_a_row_use_the_chat_arguments_of_its_source_in_every_turn():
    template = CHAT + "{% if add_generation_prompt and quiet %}[quiet]{% endif %}"
    tokenizer = make_tokenizer(chat_template=template)
    tokens = make_tokens(tokenizer)
    row = {"prompt": "y", "_chat": {"kwargs": {"quiet": True}}}
    view = tokens.for_row(row)
    assert tokens.for_row({"prompt": "y"}) is tokens
    assert tokens.for_row(dict(row)) is view
    for made in (tokens, view):
        assert text_of(tokenizer, made.prompt(row)).endswith("[assistant][quiet]")
    messages = [{"role": "user", "content": "y"}]
    assert view.chat_text(messages, ()).endswith("[quiet]")
    assert not tokens.chat_text(messages, ()).endswith("[quiet]")
    tokens.limit_context(7)
    assert tokens.for_row(row).max_context == 7
