"""JSON file that `areal-like verify --spot` and its process, trainer/spot_logprobs.py, exchange."""

from __future__ import annotations

import msgspec

from areal_like.settings import DType


class SpotSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Log-probs to compute from a checkpoint. dtype: type in which its weights were published. sequences: the tokens
    [T] of each trajectory, and which of them were sampled [T].
    """

    model_dir: str
    dtype: DType
    temperature: float
    num_threads: int
    sequences: list[tuple[list[int], list[bool]]]
