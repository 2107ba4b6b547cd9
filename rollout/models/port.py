"""The interface of a model that a workflow calls by name.

Shape legend: P tokens of a prompt, R tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from rollout.transcript import Answer, Transcript


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
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """Generate one answer.

        Args:
            prompt: [P] int32 tokens, or a transcript. It is not changed.
            max_new_tokens: longest answer; None: as declared.
            stop_token_ids: as in `SampleTools.generate`.
            temperature: 0 is greedy; None: as declared.

        Returns:
            The answer, whose `model` is the name of this one and whose versions are its own. If a prompt leaves no room
                in the context of a model with separate weights, it is empty and has ended by `context`.

        Raises:
            UserError, SampleCut: as in `SampleTools.generate`.
        """
        ...

    async def logprobs(
        self, prompt: np.ndarray | Transcript, tokens: np.ndarray, *, temperature: float = 1.0
    ) -> TokenLogprobs:
        """Compute this model's log-probs of tokens after a prompt. Only for models with separate weights.

        Args:
            prompt: [P] int32 tokens, or a transcript; at least one.
            tokens: [R] int32 tokens that follow it.
            temperature: logits are divided by it.

        Returns:
            The log-probs, with the version that computed them.

        Raises:
            UserError: a role of the policy, a token outside the model's vocabulary, or more tokens than its context.
        """
        ...
