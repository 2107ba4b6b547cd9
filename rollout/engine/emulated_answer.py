"""Answers of the emulated engine: their lengths, tokens and versions.

Time is in emulated.py.

Tokens are the prompt's, repeated, with the model's end-of-sequence id at the end; log-probs are -1. Indexes count real
tokens, including the prefix; each stands for `token_scale` emulated tokens.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from areal_like.emulation.device import lengths_of
from areal_like.emulation.lengths import NamedDraws
from areal_like.emulation.replica import Sequence
from areal_like.emulation.settings import EmulationSettings
from areal_like.trajectory import Segment
from rollout.engine.port import EndReason, GenerationOutcome, GenerationRequest

LOGPROB = -1.0


@dataclass(eq=False)
class Answer:
    """One request from its start to its end."""

    request: GenerationRequest
    sequence: Sequence
    stop: int
    """Number of tokens at its end."""
    end_reason: EndReason
    future: asyncio.Future[GenerationOutcome]
    submitted_s: float
    started_s: float = math.nan
    paused_before_s: float = 0.0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first index, version)."""

    @property
    def has_started(self) -> bool:
        """Whether it is, or was, in the batch."""
        return not math.isnan(self.started_s)


@dataclass(frozen=True)
class Plan:
    """How an answer will end."""

    stop: int
    end_reason: EndReason
    emulated_tokens: int


class Planner:
    """Draws lengths, which depend only on seed, prompt and sample, not on the mode."""

    def __init__(self, emulation: EmulationSettings, *, max_new_tokens: int, max_context: int, seed: int) -> None:
        self._scale, self._max_context = emulation.token_scale, max_context
        self.lengths = lengths_of(emulation, max_new_tokens)
        self._draws = NamedDraws(self.lengths, seed)

    def plan(self, request: GenerationRequest) -> Plan | None:
        """How the answer will end; None if its prefix already has this length."""
        num_prefix = len(request.prefix)
        group = request.share_key if request.share_key >= 0 else request.seed
        emulated = self._draws(group, request.seed)
        most = min(request.sampling.max_new_tokens, self._max_context - len(request.prompt_P))
        stop, reason = math.ceil(emulated / self._scale), "stop"
        if stop > most:
            emulated, stop, reason = most * self._scale, most, "length"
        if num_prefix >= stop:
            return None
        if request.segment_tokens and num_prefix + request.segment_tokens < stop:
            stop = num_prefix + request.segment_tokens
            return Plan(stop, "segment", stop * self._scale)
        return Plan(stop, "stop" if reason == "stop" else "length", emulated)


def segment_of(answer: Answer, stop: int) -> Segment:
    """New tokens up to index `stop`."""
    request = answer.request
    first = len(request.prefix)
    count = stop - first
    if count <= 0:
        return Segment.empty()
    stop_ids = request.sampling.stop_token_ids
    known = request.prompt_P[~np.isin(request.prompt_P, stop_ids)]
    source = known if len(known) else request.prompt_P
    tokens_R = source[np.arange(first, stop) % len(source)].astype(np.int32)
    if stop == answer.stop and answer.end_reason == "stop" and stop_ids:
        tokens_R[-1] = stop_ids[0]
    starts = [start for start, _ in answer.spans] + [stop]
    versions_R = np.repeat([version for _, version in answer.spans], np.diff(starts)).astype(np.int32)
    return Segment(tokens_R, np.full(count, LOGPROB, np.float32), versions_R)
