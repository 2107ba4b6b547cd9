"""Sizes of a decoder, from its transformers config or, if there is none, from a table of public models.

Only models of Llama's architecture have a shape: it is None for a config that lacks one of these sizes. Memory is
estimated in controller/config/memory, speed in emulation/roofline.py.

Legend: D hidden size, A width of all query heads, K width of all key heads, I inner width of the feed-forward part,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys of a transformers config that count the experts of a layer."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder with grouped attention and a gated feed-forward part."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """In a mixture of experts: the width of one expert."""
    vocabulary: int
    is_tied: bool
    """The head shares its weight with the embedding."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    experts: int = 1
    experts_per_token: int = 1

    @property
    def query_width(self) -> int:
        """A."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """K."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Weight matrices of one layer: 2 D (A + K) + experts * 3 D I (+ the router's D * experts)."""
        feed_forward = 3 * self.hidden * self.inner * self.experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 2 * self.hidden * (self.query_width + self.key_width) + feed_forward + router

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: matrices, two norms, and, if the model has them, biases of q, k and v and norms of
        query and key heads."""
        biases = self.query_width + 2 * self.key_width if self.has_qkv_bias else 0
        return self.layer_matrix_parameters + biases + (2 * self.head_dim if self.has_qk_norm else 0) + 2 * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Embedding, head and final norm: V D (twice where the head has its own) + D."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters, with all experts of a mixture."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest weight of a layer: all experts' up (or gate) projections are one tensor each."""
        return self.hidden * max(self.inner * self.experts, self.query_width)


def shape_of(config: Mapping[str, Any]) -> DecoderShape | None:
    """The shape that a transformers config describes (its text part if there are several); None if a size is missing or
    is not a positive integer."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    try:
        hidden, heads = _size(sizes, "hidden_size"), _size(sizes, "num_attention_heads")
        inner = _size(sizes, "intermediate_size")
        experts = max((_size(sizes, key, 0) for key in EXPERTS), default=0)
        shape = DecoderShape(
            layers=_size(sizes, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_size(sizes, "num_key_value_heads", heads),
            head_dim=_size(sizes, "head_dim", hidden // heads),
            inner=_size(sizes, "moe_intermediate_size", inner) if experts > 1 else inner,
            vocabulary=_size(sizes, "vocab_size"),
            is_tied=bool(sizes.get("tie_word_embeddings", config.get("tie_word_embeddings"))),
            has_qkv_bias=str(sizes.get("model_type", "")).startswith("qwen2") or bool(sizes.get("attention_bias")),
            has_qk_norm=str(sizes.get("model_type", "")).startswith("qwen3"),
            experts=max(1, experts),
            experts_per_token=_size(sizes, "num_experts_per_tok", 1) if experts > 1 else 1,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return shape


def _size(sizes: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = sizes.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(key)
    return value


def _qwen3(layers: int, hidden: int, heads: int, inner: int, *, is_tied: bool = False) -> DecoderShape:
    return DecoderShape(layers, hidden, heads, 8, 128, inner, 151936, is_tied, has_qk_norm=True)


def _qwen2(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, *, is_tied: bool = False
) -> DecoderShape:
    return DecoderShape(layers, hidden, heads, kv_heads, 128, inner, vocabulary, is_tied, has_qkv_bias=True)


PUBLIC_SHAPES: Mapping[str, DecoderShape] = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, is_tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, is_tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728, is_tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12288),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 40, 17408),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 25600),
    "Qwen/Qwen3-30B-A3B": DecoderShape(
        48, 2048, 32, 4, 128, 768, 151936, is_tied=False, has_qk_norm=True, experts=128, experts_per_token=8
    ),
    "Qwen/Qwen2.5-1.5B": _qwen2(28, 1536, 12, 2, 8960, 151936, is_tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5-32B": _qwen2(64, 5120, 40, 8, 27648, 152064),
    "meta-llama/Meta-Llama-3-8B": DecoderShape(32, 4096, 32, 8, 128, 14336, 128256, is_tied=False),
    "meta-llama/Meta-Llama-3-70B": DecoderShape(80, 8192, 64, 8, 128, 28672, 128256, is_tied=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(28, 1536, 12, 2, 8960, 151936),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _qwen2(48, 5120, 40, 8, 13824, 152064),
}
"""Sizes from the published config.json of these models, for machines that have not downloaded them."""
_SUFFIXES = ("-instruct", "-base")
_BY_NAME = {name.rsplit("/", 1)[-1].lower(): shape for name, shape in PUBLIC_SHAPES.items()}
_BY_NAME |= {"llama-3.1-8b": _BY_NAME["meta-llama-3-8b"], "llama-3.1-70b": _BY_NAME["meta-llama-3-70b"],
             "llama-3.3-70b": _BY_NAME["meta-llama-3-70b"], "qwen2.5-math-7b": _BY_NAME["qwen2.5-7b"],
             "qwen2.5-math-1.5b": _BY_NAME["qwen2.5-1.5b"]}  # fmt: skip


def public_shape(name: str) -> DecoderShape | None:
    """The shape of a public model by its hub name or by the name of its folder; None if the table lacks it."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    for suffix in _SUFFIXES:
        last = last.removesuffix(suffix)
    return _BY_NAME.get(last)


def public_names() -> Mapping[str, DecoderShape]:
    """Shapes by the last part of the name, in lower case."""
    return _BY_NAME
