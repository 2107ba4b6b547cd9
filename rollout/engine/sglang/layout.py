"""How a published version is named on its way to an SGLang server, how it lies inside, and what the server's weight
checker must then say of it.

Owns: from the trainer's names to those of checkpoints, from these to SGLang's fused tensors, the checksums that follow,
the comparison. Refuses: asking the server (client.py), deciding what a difference means (engine.py).

transformers keeps the experts of a layer in two tensors, checkpoints have two or three per expert, and SGLang skips a
name it does not know without a word: a mixture of experts would go on sampling with experts nobody trained.

SGLang puts q, k, v into one tensor, gate and up into another, and fills the vocabulary up to a multiple of 64, on CPUs
also the inner width of feed-forward layers to one of 32, with zeros. Fused tensors are row-major concatenations, so
their bytes are those of the parts one after the other. The checksum is the first 8 bytes of SHA-256 (on a CPU; the sum
of tensors on GPUs is made by another function, which only runs there).
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
"""Model types whose tensors lie as described here."""
EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe")
"""Mixtures of experts whose checkpoints are named as described here."""
VOCAB_MULTIPLE = 64
INNER_MULTIPLE = 32
"""Of the inner width of a feed-forward layer, on CPUs."""
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_PART = re.compile(rf"\.({'|'.join(_FUSED)})\.(weight|bias)$")
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_VOCAB = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_DERIVED = re.compile(r"cos_sin_cache|inv_freq")
"""Tensors of the server that no version brings: made from the config alone."""


def check_experts(config: PreTrainedConfig) -> None:
    """Raises UserError for a mixture of experts whose tensors we could not name for SGLang."""
    text = config.get_text_config()
    has_experts = any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if has_experts and config.model_type not in EXPERT_FAMILIES:
        raise UserError(
            f"how SGLang's loader names the experts of a {config.model_type} is not known here",
            where="rollout.engine.kind",
            remedy=f"embedded, or a mixture of experts of type {' or '.join(EXPERT_FAMILIES)}",
        )


def check_family(config: PreTrainedConfig, where: str) -> None:
    """Raises UserError, naming the setting, for a model whose tensors are stored in a way not known here."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"how SGLang lays out the tensors of a {config.model_type} is not known here",
            where=where,
            remedy=f"leave it out (known: {', '.join(FAMILIES)})",
        )


def experts_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Layers and experts per token. Raises UserError for a model without experts."""
    text = config.get_text_config()
    per_token = getattr(text, "num_experts_per_tok", None)
    if not per_token:
        raise UserError(
            f"a {config.model_type} has no experts",
            where="rollout.engine.sglang.routed_experts",
            remedy="routed_experts: false",
        )
    return int(text.num_hidden_layers), int(per_token)


def as_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under a checkpoint's names: stacked experts one by one, as views."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.search(name)
        if stacked is None:
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if stacked[1] == "gate_up_proj" else ("down_proj",)
        for expert, both in enumerate(tensor):
            for part, piece in zip(names, both.chunk(len(names)), strict=True):
                found[f"{name[: stacked.start()]}.experts.{expert}.{part}.weight"] = piece
    return found


def server_layout(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """SGLang's tensors by their own names, each with its parts in order, by Hugging Face's."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = _PART.search(name)
        fused, place = _FUSED[found[1]] if found else ("", 0)
        target = f"{name[: found.start()]}.{fused}.{found[2]}" if found else name
        parts.setdefault(target, []).append((place, name))
    return {target: tuple(name for _, name in sorted(pieces)) for target, pieces in parts.items()}


def server_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype, *, is_head_tied: bool) -> dict[str, str]:
    """What a server that holds exactly these tensors, in `dtype`, says of each of its own (one rank, on a CPU)."""
    names = [name for name in tensors if not (is_head_tied and name == "lm_head.weight")]
    found = {}
    for target, parts in server_layout(names).items():
        digest = hashlib.sha256()
        for part in parts:
            digest.update(_bytes_of(_padded(target, tensors[part].to(dtype))))
        found[target] = digest.digest()[:8].hex()
    return found


def compare(said: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Raises WeightError naming the first tensors that differ. `said`: the answer of the server's weight checker."""
    ranks = said.get("ranks") or []
    if len(ranks) != 1:
        raise WeightError(f"the server gave checksums of {len(ranks)} ranks, and one was expected")
    have = {name: text for name, text in ranks[0]["checksums"].items() if not _DERIVED.search(name)}
    wrong = sorted(name for name in {*have, *expected} if have.get(name) != expected.get(name))
    if wrong:
        raise WeightError(
            f"{len(wrong)} of {len(expected)} tensors on the server are not the published ones, e.g. "
            + ", ".join(f"{x} ({have.get(x, 'missing')}, not {expected.get(x, 'expected')})" for x in wrong[:2])
        )


def _padded(target: str, part: Tensor) -> Tensor:
    """With the rows, or columns, of zeros that the server adds."""
    if target.endswith(".down_proj.weight"):
        return pad(part, (0, -part.shape[1] % INNER_MULTIPLE))
    multiple = VOCAB_MULTIPLE if _VOCAB.search(target) else INNER_MULTIPLE if ".gate_up_proj." in target else 1
    return pad(part, (*(0, 0) * (part.ndim - 1), 0, -part.shape[0] % multiple))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
