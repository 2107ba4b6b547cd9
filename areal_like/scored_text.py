"""The text that a reward model reads, and the position at which its score is taken, for training and scoring alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError

NOTE = "reward_model.json"
"""File in the folder of a reward model: digest of the tokenizer that it was trained with."""
FORMAT = 1
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
                    "*.tiktoken", "sentencepiece*", "spiece*")  # fmt: skip


def scored_text(tokenizer: Any, text: str, messages: Sequence[Mapping[str, Any]] | None) -> tuple[str, bool]:
    """Text of an answer with its prompt, and whether the tokenizer should add its special tokens.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: prompt and answer, concatenated; used if there is no chat template. messages: the conversation; used if
            the tokenizer has a chat template.
    """
    if messages is not None and getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template([dict(one) for one in messages], tokenize=False)), False
    return text, True


def padding_id(tokenizer: Any) -> int | None:
    """Id that texts of a batch are padded with. transformers takes a text's score at its last token with another id."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
        if token_id is not None:
            return int(token_id)
    return None


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer files of a folder, including the chat template."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def write_tokenizer_digest(folder: Path) -> None:
    """Write the digest of a reward model's tokenizer into its folder."""
    (folder / NOTE).write_text(json.dumps({"format": FORMAT, "tokenizer": tokenizer_digest(folder)}) + "\n")


def check_tokenizer(folder: Path) -> None:
    """Raise UserError if the folder's tokenizer is not the one that its reward model was trained with. A folder without
    the file NOTE passes."""
    file = folder / NOTE
    try:
        recorded = json.loads(file.read_bytes())["tokenizer"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the file cannot be read ({type(error).__name__}: {error})"
        raise UserError(what, where=str(file), remedy="export the reward model again") from error
    if recorded != tokenizer_digest(folder):
        raise UserError(
            "the tokenizer differs from the one that the reward model was trained with",
            where=str(folder),
            remedy="restore the tokenizer files by running areal-like export on the run that trained the model",
        )
