"""Classifiers of a few thousand weights in folders, saved as a trainer of reward models saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from transformers.models.qwen3 import Qwen3ForTokenClassification

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"


def save_classifier(
    folder: Path, *, num_labels: int = 1, per_token: bool = False, chat: bool = False, causal: bool = False
) -> Path:
    """A Qwen3 of random weights with the head that is asked for, and a tokenizer over printable characters."""
    characters = ["<pad>", "<unk>", "<end>", *(chr(code) for code in range(32, 127)), "\n"]
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>"
    )
    if chat:
        wrapped.chat_template = CHAT
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, max_position_embeddings=512, num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    kind: Any = Qwen3ForTokenClassification if per_token else Qwen3ForSequenceClassification
    torch.manual_seed(0)
    (Qwen3ForCausalLM if causal else kind)(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
