"""A tokenizer for tests of chats: one token for a byte, and one for each mark."""

from __future__ import annotations

from typing import Any

MARKS = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
"""In addition to `<|im_end|>`, the end-of-sequence token."""


def byte_tokenizer(template: str) -> Any:
    """A Hugging Face tokenizer with this chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({one: index for index, one in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": list(MARKS[:1])})
    fast.add_tokens(list(MARKS[1:]))
    fast.chat_template = template
    return fast
