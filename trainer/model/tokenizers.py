"""The tokenizer that is saved with a prepared model: the model's, that of another folder, or a built-in one.

Built-in tokenizers put `<bos>` before a prompt; an answer is encoded without special tokens and ends in `<eos>`. The
tokenizer of chats has a chat template instead, and ends every message with `<|im_end|>`.
A character that is not in the vocabulary is an error; it is never silently dropped.
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
    """Return the tokenizer `name` (see ModelSettings.tokenizer); `model_folder` is the folder for `from_model`.

    Raises UserError if it does not exist, cannot be read, or has no end-of-sequence token.
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
                "a model created from `model.init` has no tokenizer",
                where="model.tokenizer",
                remedy=f"set model.tokenizer to a tokenizer folder, or to one of {', '.join(BUILT_IN_TOKENIZERS)}",
            )
        return load_tokenizer(model_folder)
    if not Path(name).is_dir():
        raise UserError(
            f"there is no tokenizer folder {name!r}",
            where="model.tokenizer",
            remedy="set model.tokenizer to from_model, to an existing folder, or to one of "
            f"{', '.join(BUILT_IN_TOKENIZERS)}",
        )
    return load_tokenizer(Path(name))


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`. Raises UserError if it is missing or unreadable."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / file).is_file() for file in files):
        raise UserError(
            "the folder contains no tokenizer (tokenizer.json)",
            where=str(folder),
            remedy="copy the tokenizer files to this folder, or set model.tokenizer",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare Exception for damaged files
        raise UserError(
            f"the tokenizer cannot be read ({first_line(error)})",
            where=str(folder),
            remedy="download the tokenizer files again, or set model.tokenizer",
        ) from error
    if len(tokenizer) == 0:
        raise UserError("the tokenizer is empty", where=str(folder), remedy="download the tokenizer files again")
    if tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end-of-sequence token, so answers could never end",
            where=str(folder),
            remedy="set eos_token in the tokenizer's tokenizer_config.json",
        )
    return tokenizer


def character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    """Create a tokenizer with one token per character of `characters`, after <pad>, <bos>, <eos>."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_specials(tokenizer)


def tool_sum_chat_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer with a token per character and marker of chats (areal_like.tasks.tool_sum)."""
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
    """Create a tokenizer with one token per byte of UTF-8: byte b has id b + 3, after <pad>, <bos>, <eos>."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS])}
    for byte, symbol in enumerate(_byte_symbols()):
        vocabulary[symbol] = byte + 3
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_specials(tokenizer)


def _byte_symbols() -> list[str]:
    """Return the visible character of byte-level tokenizers for each byte value 0..255 (GPT-2's convention).

    Printable Latin-1 bytes represent themselves; the others use code points from 256 on, in order.
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
