"""What a call of `generate` means, whichever model answers: its sampling settings, and what has ended an answer.

Owns: those rules, the state of a running call of the policy. Refuses: engines, leases, waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.port import GenerationOutcome
from rollout.stop_strings import StopStrings
from rollout.transcript import Answer, EndedBy

STOP_IDS: tuple[EndedBy, ...] = ("end_of_sequence", "stop_token")
STOPS: tuple[EndedBy, ...] = (*STOP_IDS, "stop_string")


@dataclass(eq=False)
class PolicyCall:
    """One running call of the policy; there are several where a workflow calls it in parallel.

    new_tokens: of ended requests; it has several where it was parked. generation: the running request.
    """

    new_tokens: Segment = field(default_factory=Segment.empty)
    generation: asyncio.Future[GenerationOutcome] | None = None
    is_parked: bool = False


def call_sampling(
    given: Sampling,
    end_ids: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    stop_token_ids: Sequence[int] | np.ndarray | None = None,
    temperature: float | None = None,
) -> Sampling:
    """The task's sampling, with what one call asks for and the model's end-of-sequence ids among the stop ids; there
    are none where they do not count (`ignore_eos`)."""
    chosen = given.stop_token_ids if stop_token_ids is None else tuple(int(token) for token in stop_token_ids)
    stop = tuple(dict.fromkeys((*chosen, *end_ids)))
    bound = given.max_new_tokens if max_new_tokens is None else max_new_tokens
    if given.ignore_eos:
        stop, bound = (), min(bound, given.max_new_tokens)
    return msgspec.structs.replace(
        given, stop_token_ids=stop, stop=() if given.ignore_eos else given.stop, max_new_tokens=bound,
        temperature=given.temperature if temperature is None else float(temperature),
    )  # fmt: skip


def end_of(
    answer: Segment,
    sampling: Sampling,
    num_prompt: int,
    *,
    end_ids: Sequence[int],
    max_context: int,
    stops: StopStrings | None = None,
) -> EndedBy | None:
    """What has ended an answer; one handed to us may be complete: its worker was lost between generating and scoring.
    None: nothing has. stops: of `sampling.stop`."""
    if not len(answer):
        return None
    last = int(answer.tokens_R[-1])
    if last in sampling.stop_token_ids:
        return "end_of_sequence" if last in end_ids else "stop_token"
    if stops is not None and stops.is_end(answer.tokens_R):
        return "stop_string"
    if len(answer) >= sampling.max_new_tokens:
        return "length"
    return "context" if num_prompt + len(answer) >= max_context else None


def answer_of(
    segment: Segment,
    ended_by: EndedBy,
    *,
    number: int = -1,
    is_trainable: bool,
    model: str = "",
    experts: np.ndarray | None = None,
) -> Answer:
    """The answer that ended so."""
    return Answer(
        segment=segment,
        finish_reason="stop" if ended_by in STOPS else "length",
        ended_by=ended_by,
        number=number,
        stop_token=int(segment.tokens_R[-1]) if ended_by in STOP_IDS and len(segment) else None,
        is_trainable=is_trainable,
        model=model,
        routed_experts=experts,
    )
