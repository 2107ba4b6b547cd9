"""Names and layout of a published version in an SGLang server, and the checksums that the server must then report.

It maps the names of checkpoints (server/checkpoint_names.py) to SGLang's fused tensors, and compares checksums. The
server is queried in client.py.

transformers stores the experts of a layer in two tensors, checkpoints have two or three per expert, and SGLang skips
names that it does not know without a warning: a mixture of experts would continue to sample with untrained experts.

SGLang puts q, k and v into one tensor, gate and up into another, and pads the vocabulary with zeros to a multiple of
64, and on CPUs also the inner width of feed-forward layers to a multiple of 32. Fused tensors are row-major
concatenations, so their bytes are the concatenated bytes of the parts. The checksum is the first 8 bytes of SHA-256 (on
a CPU; on GPUs it is computed by another function, which only runs there).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from areal_like.errors import UserError, WeightError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose layout is as described here."""
EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe")
"""Mixtures of experts whose checkpoints are named as described here."""
VOCAB_MULTIPLE = 64
INNER_MULTIPLE = 32
"""Multiple to which the inner width of a feed-forward layer is padded on CPUs."""
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_PART = re.compile(rf"\.({'|'.join(_FUSED)})\.(weight|bias)$")
_VOCAB = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_DERIVED = re.compile(r"cos_sin_cache|inv_freq")
"""Tensors of the server that are not part of a version: they are computed from the config."""


def check_experts(config: PreTrainedConfig) -> None:
    """Raise UserError for a mixture of experts whose names in SGLang are unknown."""
    text = config.get_text_config()
    has_experts = any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if has_experts and config.model_type not in EXPERT_FAMILIES:
        raise UserError(
            f"weight updates of mixture-of-experts models of type {config.model_type} are not supported with SGLang",
            where="rollout.engine.kind",
            remedy="set rollout.engine.kind: embedded, or use a mixture-of-experts model of type "
            f"{' or '.join(EXPERT_FAMILIES)}",
        )


def check_family(config: PreTrainedConfig, where: str) -> None:
    """Raise UserError, with the setting, for a model whose layout in SGLang is unknown."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"this setting does not support models of type {config.model_type}, whose tensor layout in "
            f"SGLang is unknown",
            where=where,
            remedy=f"remove this setting (supported model types: {', '.join(FAMILIES)})",
        )


def experts_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Numbers of layers and of experts per token. Raises UserError for a model without experts."""
    text = config.get_text_config()
    per_token = getattr(text, "num_experts_per_tok", None)
    if not per_token:
        raise UserError(
            f"model type {config.model_type} has no experts",
            where="rollout.engine.sglang.routed_experts",
            remedy="routed_experts: false",
        )
    return int(text.num_hidden_layers), int(per_token)


def server_layout(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """SGLang's tensors by name, each with its parts in order, by their Hugging Face names."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = _PART.search(name)
        fused, place = _FUSED[found[1]] if found else ("", 0)
        target = f"{name[: found.start()]}.{fused}.{found[2]}" if found else name
        parts.setdefault(target, []).append((place, name))
    return {target: tuple(name for _, name in sorted(pieces)) for target, pieces in parts.items()}


def server_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype, *, is_head_tied: bool) -> dict[str, str]:
    """Checksums that a server with exactly these tensors, in `dtype`, reports (one rank, on a CPU)."""
    names = [name for name in tensors if not (is_head_tied and name == "lm_head.weight")]
    found = {}
    for target, parts in server_layout(names).items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(_bytes_of(_padded(target, tensors[part].to(dtype))))
        found[target] = digest.digest()[:8].hex()
    return found


def compare(said: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Raise WeightError with the first tensors that differ. `said`: the report of the server's weight checker."""
    ranks = said.get("ranks") or []
    if len(ranks) != 1:
        raise WeightError(f"the server returned checksums of {len(ranks)} ranks instead of one rank")
    have = {name: text for name, text in ranks[0]["checksums"].items() if not _DERIVED.search(name)}
    wrong = sorted(name for name in {*have, *expected} if have.get(name) != expected.get(name))
    if wrong:
        raise WeightError(
            f"{len(wrong)} of {len(expected)} tensors on the server differ from the published ones, for example "
            + ", ".join(f"{x} ({have.get(x, 'missing')}, not {expected.get(x, 'expected')})" for x in wrong[:2])
        )


def _padded(target: str, part: Tensor) -> Tensor:
    """The tensor with the rows or columns of zeros that the server adds."""
    if target.endswith(".down_proj.weight"):
        return pad(part, (0, -part.shape[1] % INNER_MULTIPLE))
    multiple = VOCAB_MULTIPLE if _VOCAB.search(target) else INNER_MULTIPLE if ".gate_up_proj." in target else 1
    return pad(part, (*(0, 0) * (part.ndim - 1), 0, -part.shape[0] % multiple))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
