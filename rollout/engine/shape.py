"""Reads a model's config: the dimensions of the lean decoder, or the reason why it does not support the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from areal_like.context_limit import context_limit
from areal_like.errors import UserError

log = logging.getLogger(__name__)

LEAN_FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Rotary variants with one table for all positions; the last two only within `exact_context`."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Llama-like decoder. Query heads of one key/value head form a group of `num_queries_per_key`."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    is_head_tied: bool
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool

    @property
    def num_queries_per_key(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_key_heads

    @staticmethod
    def of(config: PreTrainedConfig) -> ModelShape:
        """Read a config of one of LEAN_FAMILIES."""
        family = config.model_type
        attention_bias = bool(getattr(config, "attention_bias", False))
        return ModelShape(
            family=family,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            is_head_tied=bool(config.tie_word_embeddings),
            has_qkv_bias=True if family == "qwen2" else attention_bias,
            has_out_bias=False if family == "qwen2" else attention_bias,
            has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
            has_qk_norm=family == "qwen3",
        )


def exact_context(config: PreTrainedConfig, max_context: int) -> int:
    """Longest sequence of an engine set to `max_context` tokens: fewer if the model has fewer positions.

    Raises UserError if its rotary frequencies depend on the sequence length before that.
    """
    limit = context_limit(vars(config.get_text_config()))
    if limit is None:
        return max_context
    capped = limit.cap(max_context, where="rollout.engine.max_context")
    if capped < max_context:
        log.info(
            "rollout.engine.max_context was reduced from %d to %d, the number of positions of the model",
            max_context,
            capped,
        )
    return capped


def why_not_lean(config: PreTrainedConfig) -> str:
    """The first reason why the lean decoder cannot run this model; empty if it can."""
    if config.model_type not in LEAN_FAMILIES:
        return f"model type {config.model_type} is not one of {', '.join(LEAN_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "sliding-window layers"
    rope: dict[str, Any] = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        return f"rotary variant {kind}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary embedding"
    return ""


def read_config(model_dir: Path) -> PreTrainedConfig:
    """The transformers config of a model folder. Raises UserError if there is none, or if it is unknown."""
    if not (model_dir / "config.json").is_file():
        raise UserError(
            "the folder contains no config.json",
            where=str(model_dir),
            remedy="specify a Hugging Face model folder",
        )
    try:
        return AutoConfig.from_pretrained(str(model_dir))
    except (ValueError, OSError, TypeError) as error:
        raise UserError(f"config.json cannot be read ({error})", where=str(model_dir)) from error
