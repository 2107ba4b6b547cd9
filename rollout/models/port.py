"""What a workflow sees of a model that it calls by name.

Owns: the port `CalledModel`, `TokenLogprobs`. Refuses: engines, versions to wait for, which models there are.

Shape legend: P tokens of a prompt, R tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from rollout.transcript import Answer, Transcript


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says of tokens that it did not sample.

    logprobs_R: float32, log_softmax(logits / temperature) at each token. model, version: whose they are.
    """

    logprobs_R: np.ndarray
    model: str
    version: int


class CalledModel(Protocol):
    """One entry of `rollout.models`, for one sample. Calls of several models, and several calls of one, may run at the
    same time (`asyncio.gather`)."""

    @property
    def name(self) -> str:
        """As declared."""
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
            stop_token_ids: as of `SampleTools.generate`.
            temperature: 0 is greedy; None: as declared.

        Returns:
            The answer, whose `model` is the name of this one and whose versions are its own. Where a prompt leaves no
            room in the context of a model with weights of its own, it is empty and has ended by `context`.

        Raises:
            UserError, SampleCut: as `SampleTools.generate`.
        """
        ...

    async def logprobs(
        self, prompt: np.ndarray | Transcript, tokens: np.ndarray, *, temperature: float = 1.0
    ) -> TokenLogprobs:
        """Compute how likely this model finds tokens after a prompt. Only for models with weights of their own.

        Args:
            prompt: [P] int32 tokens, or a transcript; at least one.
            tokens: [R] int32 tokens that follow it.
            temperature: logits are divided by it.

        Returns:
            The log-probs, with the version that they are of.

        Raises:
            UserError: a role of the policy, a token outside the model's vocabulary, or more tokens than its context.
        """
        ...
