"""The tokenizer a prepared model is saved with: the model's own, another folder's, or one built in code.

Owns: `build_tokenizer` and the built-in vocabularies. Refuses: turning rows into prompts (a workflow's business).
Built-in tokenizers put `<bos>` before a prompt; an answer is encoded without special tokens and ends in `<eos>`. That
of chats has a chat template instead, and ends every message in `<|im_end|>`.
A character the vocabulary lacks is an error, never silently dropped.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from areal_like.config import BUILT_IN_TOKENIZERS
from areal_like.errors import UserError, first_line
from areal_like.tasks import tool_sum

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
RUNNING_SUM_CHARACTERS = "0123456789+=,;#"
TOOL_SUM_CHARACTERS = "0123456789+=:;#()?"
GUESS_NUMBER_CHARACTERS = "0123456789:?<>=!"


def build_tokenizer(name: str, model_folder: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer called `name` (see ModelSettings.tokenizer); `model_folder` is where `from_model` looks.

    Raises UserError when there is none, it cannot be read, or it knows no end of sequence.
    """
    if name == "characters:running_sum":
        return character_tokenizer(RUNNING_SUM_CHARACTERS)
    if name == "characters:tool_sum":
        return character_tokenizer(TOOL_SUM_CHARACTERS)
    if name == "characters:guess_number":
        return character_tokenizer(GUESS_NUMBER_CHARACTERS)
    if name == "bytes":
        return byte_tokenizer()
    if name == "chat:tool_sum":
        return tool_sum_chat_tokenizer()
    if name == "from_model":
        if model_folder is None:
            raise UserError(
                "a model made from `model.init` has no tokenizer of its own",
                where="model.tokenizer",
                remedy=f"name a tokenizer folder, or one of {', '.join(BUILT_IN_TOKENIZERS)}",
            )
        return load_tokenizer(model_folder)
    if not Path(name).is_dir():
        raise UserError(
            f"there is no tokenizer folder {name!r}",
            where="model.tokenizer",
            remedy=f"use from_model, an existing folder, or one of {', '.join(BUILT_IN_TOKENIZERS)}",
        )
    return load_tokenizer(Path(name))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in `folder`. Raises UserError when it is missing or unreadable."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / file).is_file() for file in files):
        raise UserError(
            "holds no tokenizer (no tokenizer.json)",
            where=str(folder),
            remedy="copy the tokenizer's files there, or set model.tokenizer",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # fault boundary: transformers and tokenizers raise bare Exception for damaged files
        raise UserError(
            f"the tokenizer cannot be read ({first_line(error)})",
            where=str(folder),
            remedy="fetch its files again, or set model.tokenizer",
        ) from error
    if len(tokenizer) == 0:
        raise UserError("the tokenizer is empty", where=str(folder), remedy="fetch its files again")
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token, so answers could never end",
            where=str(folder),
            remedy="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    """One token a character of `characters`, after <pad>, <bos>, <eos>."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_specials(tokenizer)


def tool_sum_chat_tokenizer() -> PreTrainedTokenizerBase:
    """One token a character of the task, and one for each mark of its chats (areal_like/tasks/tool_sum.py)."""
    marks = [PAD, tool_sum.CHAT_END, *tool_sum.CHAT_STARTS.values()]
    words = [*marks, *tool_sum.CHAT_CALL, *tool_sum.CHAT_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    call = "|".join(re.escape(part) for part in tool_sum.CHAT_CALL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{call}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tool_sum.CHAT_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"additional_special_tokens": list(tool_sum.CHAT_STARTS.values())})
    made.chat_template = tool_sum.CHAT_TEMPLATE
    return made


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte of UTF-8: byte b has id b + 3, after <pad>, <bos>, <eos>."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS])}
    for byte, symbol in enumerate(_byte_symbols()):
        vocabulary[symbol] = byte + 3
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_specials(tokenizer)


def _byte_symbols() -> list[str]:
    """The visible character that byte-level tokenizers write for each byte value 0..255 (GPT-2's convention).

    Printable Latin-1 bytes stand for themselves; the rest take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 256
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def _with_specials(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
