"""The protocol of generation engines: the embedded one (embedded.py), servers of SGLang (sglang/) and vLLM (vllm/), and
the emulated one (emulated.py).

Threading: all methods are called from one asyncio loop and never block it; where an engine computes is up to the
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from areal_like.trajectory import Segment
from areal_like.weights.process_group import GroupCall
from areal_like.wire.messages import Sampling
from rollout.config import Interruption
from rollout.stop_strings import StopStrings

EndReason = Literal["stop", "length", "segment", "cancelled"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to generate or to continue.

    prompt_P: int32 prompt tokens. prefix: answer tokens that were sampled before (they are prefilled, not sampled
    again). sampling.max_new_tokens bounds the whole answer, prefix included. seed keys the random stream by answer
    position. segment_tokens: stop with reason "segment" after this many new tokens (0: never).
    share_key: requests of equal share_key have equal prompts; their prompt may be prefilled once.
    session_key: requests of equal session_key are turns of one conversation; keys and values of an earlier turn may be
    reused for a prompt that begins with the same tokens. -1: nothing is kept.
    adapter: name of an adapter that the engine has; empty: the weights alone. Requests of different adapters share no
    keys and values, whatever their keys are.
    stops: finds `sampling.stop` in the answer, prefix included; the answer ends with the token that completes one, with
    the reason "stop". None: there are no stop strings.
    """

    request_id: int
    prompt_P: np.ndarray
    prefix: Segment
    sampling: Sampling
    seed: int
    segment_tokens: int = 0
    share_key: int = -1
    session_key: int = -1
    adapter: str = ""
    stops: StopStrings | None = None


class GenerationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. `segment` holds the newly sampled tokens only (the prefix is not repeated).

    routed_experts: if configured, int32 [prompt + whole answer - 1, layers, experts per token]: the experts that each
    position was routed to in the last computation (after a swap positions are computed again).
    """

    request_id: int
    segment: Segment
    end_reason: EndReason
    paused_s: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    routed_experts: np.ndarray | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that loading a version took."""

    version: int
    stage_s: float
    pause_s: float
    transfer_s: float = 0.0
    """The part of the pause in which the payload was transferred, if it is transferred within the pause."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an engine, so that the worker need not know its type."""

    num_slots: int
    max_context: int
    """Longest prompt plus answer, tokens."""
    interruptions: tuple[Interruption, ...]
    per_request_seed: bool
    """The random stream is keyed by (seed, position), so a sample does not depend on its neighbours."""
    group_ranks: int = 0
    """Number of ranks of the engine in a process group for weights; 0: it can only load files."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device type that it computes on."""


class Engine(Protocol):
    """Generates token by token and can swap its weights in the middle of answers (`exact-interruption`)."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> int:
        """Version now used for sampling; -1 before the first load."""
        ...

    async def start(self) -> None:
        """Prepare to accept `load_version` and `generate`. Raises UserError or EngineError."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        """Generate until an end. Cancelling the task frees the slot at the next token boundary.

        Args:
            request: prompt, tokens sampled before, sampling settings and seed.

        Returns:
            The newly sampled tokens, and the reason for the end.

        Raises:
            UserError: prompt plus one token does not fit the context.
        """
        ...

    def end_session(self, session_key: int) -> None:
        """Declare that no further request will have this session key, so that its kept data may be dropped."""
        ...

    def progress(self) -> Mapping[int, Segment]:
        """For each running request: all newly sampled tokens so far (a prefix of the later outcome's segment)."""
        ...

    async def load_version(self, manifest_path: Path, interruption: Interruption) -> LoadReport:
        """Stage and verify the payload while generation continues, then swap it in at a token boundary.

        Args:
            manifest_path: manifest of a full version.
            interruption: `recompute`: running requests are prefilled again (prompt plus partial answer) under the new
                weights. `keep_kv`: they continue with the old keys and values. `drain`: they finish first, none starts.

        Returns:
            The seconds that it took.

        Raises:
            WeightError: checksum, shape or a missing file; the old version then stays in use.
        """
        ...

    async def release_memory(self) -> int:
        """Release weights and cache, and return the number of bytes. `version` is -1 until the next load, which
        allocates memory again.

        Answers that still run end as `cancelled`, with the tokens they have.
        """
        ...

    async def load_from_group(self, call: GroupCall, interruption: Interruption) -> LoadReport:
        """Join the group while generation continues; then pause at a token boundary, receive the payload, verify it and
        swap it in. Modes as in `load_version`. Only if `capabilities.group_ranks` is not 0.

        Raises TransferBroken if the payload did not arrive, WeightError if it arrived damaged; the old version then
        stays in use.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic: tokens, prefill_tokens (computed, not sampled), busy_s (a slot was active), idle_s, paused_s,
        steps."""
        ...

    async def close(self) -> None:
        """Cancel everything and free resources."""
        ...
