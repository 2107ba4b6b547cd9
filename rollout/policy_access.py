"""What a worker provides to a workflow that answers clients outside of samples (`workflow.PolicyAccess`)."""

from __future__ import annotations

from collections.abc import Callable

from areal_like.config import ProcessSpec
from areal_like.wire.messages import Sampling
from rollout.pool import SamplePool
from rollout.sample_context import SampleContext
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript


class PoolPolicy:
    """Answers of the policy with the run's sampling settings, without a lease. `report`: shows the user a warning."""

    def __init__(
        self, spec: ProcessSpec, bench: SampleContext, pool: SamplePool, report: Callable[[str], None]
    ) -> None:
        digits = spec.name.rpartition("-")[2]
        self.worker_index = int(digits) if digits.isdigit() else 0
        self.num_slots = bench.engine.capabilities.num_slots
        self._tokens = bench.tokens.for_row({})
        self._sampling = Sampling(**spec.sampling.model_dump(exclude={"forced_lengths"}))
        self._pool, self._report = pool, report

    @property
    def tokens(self) -> PromptTokens:
        """Tokenisation."""
        return self._tokens

    async def generate(self, prompt: Transcript, *, max_new_tokens: int | None = None) -> Answer:
        """See `workflow.PolicyAccess`."""
        return await self._pool.generate(prompt, self._sampling, max_new_tokens=max_new_tokens)

    def report(self, text: str) -> None:
        """See `workflow.PolicyAccess`."""
        self._report(text)
