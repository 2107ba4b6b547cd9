"""Tables of GPUs and models: figures from data sheets and config.json files.

Dense models only. The speeds that are reached in practice are in roofline.py.

GPU figures are from the manufacturers' data sheets, dense bfloat16: NVIDIA H100, H200, H800, H20, A100 80 GB SXM, L40S,
B200. `network` is the usual one network card per GPU of such a node (the paper's cluster: 3.2 Tbit/s for 8, section
7.1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from areal_like.decoder_shape import EXPERTS, DecoderShape, public_names
from areal_like.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    flops: float
    """FLOP/s, dense bfloat16."""
    bandwidth: float
    """Bytes/s of its own memory."""
    memory: float
    """Bytes."""
    network: float
    """Bytes/s to GPUs of other nodes."""
    host_link: float = 25e9
    """Bytes/s to host memory (PCIe, as reached)."""


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h800", 989e12, 3.35e12, 80e9, 50e9),
        Gpu("h100", 989e12, 3.35e12, 80e9, 50e9),
        Gpu("h200", 989e12, 4.8e12, 141e9, 50e9),
        Gpu("h20", 148e12, 4.0e12, 96e9, 50e9),
        Gpu("a100", 312e12, 2.039e12, 80e9, 25e9),
        Gpu("l40s", 362e12, 0.864e12, 48e9, 12.5e9, 20e9),
        Gpu("b200", 2250e12, 8.0e12, 180e9, 50e9, 50e9),
    )
}


@dataclass(frozen=True)
class Model:
    """Sizes of a dense decoder."""

    name: str
    parameters: float
    """Number of all parameters, including embeddings."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_parameter: int = 2

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights an engine holds."""
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token adds to the cache."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_parameter


def model_of_shape(name: str, shape: DecoderShape) -> Model:
    """Sizes of a dense decoder of this shape."""
    return Model(name, float(shape.parameters), shape.layers, shape.hidden, shape.kv_heads, shape.head_dim)


MODELS: Mapping[str, Model] = {
    name: model_of_shape(name, shape) for name, shape in public_names().items() if shape.experts == 1
} | {
    model.name: model
    for model in (
        # The published configs of DeepSeek-R1-Distill-Qwen, as trained in the paper.
        Model("1.5b", 1.78e9, 28, 1536, 2, 128),
        Model("7b", 7.62e9, 28, 3584, 4, 128),
        Model("14b", 14.8e9, 48, 5120, 8, 128),
        Model("32b", 32.8e9, 64, 5120, 8, 128),
    )
}


def gpu_named(name: str, where: str = "--gpu") -> Gpu:
    """The GPU of this name. Raises UserError, which suggests the most similar name."""
    return _named(GPUS, name, "GPU", where)


def model_named(name: str, where: str = "--model") -> Model:
    """A model of the table, or the one that the config.json at a path describes. Raises UserError."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"the file cannot be read as a model config ({error})",
                where=str(file),
                remedy="specify a model folder with a config.json, or a known model name",
            ) from error
        return model_of(config, name=path.name, where=str(file))
    return _named(MODELS, name.rsplit("/", 1)[-1].lower(), "model", where)


def model_of(config: Mapping[str, Any], *, name: str, where: str = "", bytes_per_parameter: int = 2) -> Model:
    """Sizes that follow from a transformers config. Raises UserError if one is missing, and for a mixture of
    experts.
    """
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, inner, vocab = int(config["num_attention_heads"]), int(config["intermediate_size"]), config["vocab_size"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"a size in the model's config is missing or invalid ({error})",
            where=where or name,
            remedy="use the config.json of a causal language model",
        ) from error
    _refuse_experts(config, where or name)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = int(vocab) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + 3 * hidden * inner) + embeddings
    return Model(name, float(parameters), layers, hidden, kv_heads, head_dim, bytes_per_parameter)


def _refuse_experts(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a mixture of experts: it holds many times the weights that a token uses, and `Model` has one
    number for both."""
    for key in EXPERTS:
        count = config.get(key)
        if isinstance(count, int) and count > 1:
            raise UserError(
                f"the model is a mixture of experts ({key}: {count}), but only dense models are supported",
                where=where,
                remedy="choose a dense model of similar cost, or use the costs measured in a run: areal-like simulate "
                "--calibrate RUN",
            )


def _named(table: Mapping[str, T], name: str, noun: str, where: str) -> T:
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    raise UserError(
        f"{name!r} is not a known {noun}" + (f"; did you mean {near[0]!r}?" if near else ""),
        where=where,
        remedy=f"use one of {', '.join(table)}",
    )
