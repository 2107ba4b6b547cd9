"""Settings and results of a call of `generate`, for all models: prompt, sampling settings, and the reason why an answer
ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.port import GenerationOutcome
from rollout.stop_strings import StopStrings
from rollout.transcript import Answer, EndedBy, Transcript

STOP_IDS: tuple[EndedBy, ...] = ("end_of_sequence", "stop_token")
STOPS: tuple[EndedBy, ...] = (*STOP_IDS, "stop_string")
_TURN_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd 64-bit constant (golden ratio): turns of one sample draw from separate random streams."""


def turn_seed(seed: int, turn: int) -> int:
    """Key of the random stream of an answer: of the sample's seed, and the answer's number in the sample.

    Example:
        >>> turn_seed(7, 0), turn_seed(7, 1) != turn_seed(7, 2)
        (7, True)
    """
    return (seed + turn * _TURN_SEED_STEP) % 2**63 if turn else seed


@dataclass(eq=False)
class PolicyCall:
    """One running call of the policy; there are several if a workflow calls it in parallel.

    new_tokens: tokens of ended requests (a call has several if it was parked). generation: the running request.
    """

    new_tokens: Segment = field(default_factory=Segment.empty)
    generation: asyncio.Future[GenerationOutcome] | None = None
    is_parked: bool = False


def prompt_tokens(prompt: np.ndarray | Transcript) -> np.ndarray:
    """The tokens [P] int32 of the prompt of a call. Raises UserError: a workflow has given something else, which an
    engine must not see."""
    if isinstance(prompt, Transcript):
        return prompt.tokens_T
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise UserError(
            f"a prompt must be a one-dimensional array of token ids, not {type(prompt).__name__} of dtype {ids.dtype}"
            f" and shape {ids.shape}",
            remedy="use tools.tokens.prompt(row) or tools.tokens.encode(text)",
        )
    return ids.astype(np.int32, copy=False)


def call_sampling(
    given: Sampling,
    end_ids: Sequence[int],
    *,
    max_new_tokens: int | None = None,
    stop_token_ids: Sequence[int] | np.ndarray | None = None,
    temperature: float | None = None,
) -> Sampling:
    """The task's sampling settings with the arguments of one call, and with the model's end-of-sequence ids among the
    stop ids; no stop ids with `ignore_eos`. Raises UserError: max_new_tokens is not a number."""
    chosen = given.stop_token_ids if stop_token_ids is None else tuple(int(token) for token in stop_token_ids)
    stop = tuple(dict.fromkeys((*chosen, *end_ids)))
    bound = given.max_new_tokens if max_new_tokens is None else max_new_tokens
    if not isinstance(bound, int | float | np.number):
        raise UserError(f"max_new_tokens must be a number, not {bound!r}")
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
    """The reason why an answer has ended, or None. An answer that came with the lease may be complete, if its worker
    was lost between generating and scoring. `stops`: finds `sampling.stop`."""
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
    """Create the answer with this end."""
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
