"""What `areal-like replay --engine` and its process, rollout/regenerate.py, exchange.

The process is started with a `RegenerateSpec` and gets one `VersionOrder` file (msgpack) for each version of the
policy; its answer is a file with a list of `Regenerated`. Arrays are little-endian bytes.

Shape legend: T tokens of a trajectory, N tokens of all spans of a sequence.
"""

from __future__ import annotations

import msgspec
import numpy as np

from areal_like.config import ProcessSpec, StartSpec
from areal_like.trajectory import FinishReason
from areal_like.wire.messages import Sampling

INTEGERS, REALS, WIDE_REALS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")


class RegenerateSpec(StartSpec):
    """Start of the process."""

    name: str = "regenerate"
    worker: ProcessSpec
    """The recorded spec of a rollout worker. Its model is the starting model, which has the config and tokenizer."""


class AnswerSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive tokens of one answer that were sampled by the version.

    turn: the answer's number in its sample. start: position of the first token in the trajectory; at least 1. position:
    its position in the answer. length: number of tokens.
    """

    turn: int
    start: int
    position: int
    length: int


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory: tokens_T int32; the key of the sample's random stream; what to compute.

    end: the finish reason, if the trajectory is a prompt and one answer whose end is checked; otherwise None.
    """

    tokens_T: bytes
    seed: int
    spans: tuple[AnswerSpan, ...]
    end: FinishReason | None = None


class VersionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one version sampled, and the folder of its weights."""

    version: int
    model_dir: str
    sampling: Sampling
    sequences: tuple[SampledTokens, ...]


class Regenerated(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a sequence, for the tokens of its spans in order.

    logprobs_N: float32, of the recorded tokens. drawn_N: int32, the tokens that the sampler draws after the recorded
    ones. margins_N: float64, see rollout/engine/sampler.py. end: why the answer cannot have ended as recorded; empty if
    it can, or is not checked.
    """

    logprobs_N: bytes
    drawn_N: bytes
    margins_N: bytes
    end: str = ""
