"""The interface of a model that a workflow calls by name.

Shape legend: P tokens of a prompt, R tokens of an answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import msgspec
import numpy as np

from areal_like.errors import EngineError, UserError
from areal_like.wire.messages import SampleTask
from rollout.model_settings import CalledModelSettings
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

SEED_STEP = 0x9E3779B97F4A7C15
"""Odd constant as for turns of the policy: each call draws from a separate random stream."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with `role` and `content`, as the chat template takes them."""
Prompt = np.ndarray | Transcript | Messages
"""The prompt of a call: tokens [P], a transcript, or messages."""


def is_messages(prompt: Prompt) -> TypeGuard[Messages]:
    """Whether a prompt is a conversation."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def as_tokens(prompt: Prompt, tokens: PromptTokens) -> np.ndarray | Transcript:
    """The prompt; of a conversation the tokens [P] of the chat template. Raises UserError."""
    return tokens.prompt({"messages": list(prompt)}) if is_messages(prompt) else prompt  # type: ignore[return-value]


def call_seed(task_seed: int, name: str, number: int) -> int:
    """Seed of the call `number` of the model `name` in a sample with this seed."""
    return int((task_seed + (zlib.crc32(name.encode()) + number) * SEED_STEP) % 2**63)


class Caller(Protocol):
    """The sample that calls (rollout/sample.py)."""

    task: SampleTask
    engine_error: EngineError | UserError | None
    """What ends the worker."""

    @property
    def tokens(self) -> PromptTokens:
        """Tokenisation of prompts and answers."""
        ...

    async def generate_as(self, role: CalledModelSettings, prompt: np.ndarray | Transcript, **asked: Any) -> Answer:
        """Generate an answer of the policy in this role."""
        ...

    def waiting(self) -> Any:
        """A context manager whose time counts as spent on other models."""
        ...


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs that a model computes for tokens that it did not sample.

    logprobs_R: float32, log_softmax(logits / temperature) at each token. model, version: the model and version that
    computed them.
    """

    logprobs_R: np.ndarray
    model: str
    version: int


class CalledModel(Protocol):
    """One entry of `rollout.models`, for one sample. Calls of several models, and several calls of one, may run at the
    same time (`asyncio.gather`)."""

    @property
    def name(self) -> str:
        """Its declared name."""
        ...

    @property
    def is_trained(self) -> bool:
        """Its answers may be added by `transcript.sampled`; those of other models only by `transcript.given`."""
        ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """Generate one answer.

        Args:
            prompt: [P] int32 tokens, a transcript, or messages, to which the policy's chat template is applied (an
                external model receives them as they are). It is not changed.
            max_new_tokens: longest answer; None: as declared.
            stop_token_ids: as in `SampleTools.generate`.
            temperature: 0 is greedy; None: as declared.

        Returns:
            The answer, whose `model` is the name of this one and whose versions are its own. If a prompt leaves no room
                in the context of a model with separate weights, it is empty and has ended by `context`.

        Raises:
            UserError, SampleCut: as in `SampleTools.generate`.
            ExternalError: an external model did not answer this request.
        """
        ...

    async def logprobs(self, prompt: Prompt, tokens: np.ndarray, *, temperature: float = 1.0) -> TokenLogprobs:
        """Compute this model's log-probs of tokens after a prompt. Only for models with separate weights, and external
        ones with `api: tokens`.

        Args:
            prompt: [P] int32 tokens, a transcript, or messages; at least one token.
            tokens: [R] int32 tokens that follow it.
            temperature: logits are divided by it; 1 for an external model.

        Returns:
            The log-probs, with the version that computed them.

        Raises:
            UserError: a role of the policy, a token outside the model's vocabulary, or more tokens than its context.
        """
        ...
