"""The sizes of a model that tensor parallelism divides (tensor_split.py), from its config. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_like.decoder_shape import EXPERTS

SPLIT_SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "heads of keys and values",
    "intermediate_size": "columns of the feed-forward layers",
}
"""Keys of a transformers config whose values the number of ranks must divide."""


def split_fault(config: Mapping[str, Any], size: int) -> tuple[str, str] | None:
    """Return why `size` ranks cannot split the matrices of a model, and the remedy; None if its sizes allow it.

    config: its config.json, as a mapping; of a multimodal model the text part counts.

    Example:
        >>> split_fault({"num_attention_heads": 6, "num_key_value_heads": 2}, 4)
        ("4 ranks cannot split the model's 6 attention heads equally", 'set tensor_parallel to one of 1, 2')
    """
    sizes = {**config, **(config.get("text_config") or {})}
    if any(isinstance(sizes.get(key), int) and sizes[key] > 1 for key in EXPERTS):
        return "the matrices of a mixture of experts cannot be split over ranks", "set tensor_parallel: 1"
    known = {what: sizes[key] for key, what in SPLIT_SIZES.items() if isinstance(sizes.get(key), int)}
    for what, number in known.items():
        if number > 0 and number % size:
            able = [one for one in range(1, size + 1) if all(other % one == 0 for other in known.values())]
            words = f"{size} ranks cannot split the model's {number} {what} equally"
            return words, f"set tensor_parallel to one of {', '.join(map(str, able))}"
    return None
