"""The models of one sample, as its workflow calls them: models with separate weights, and roles of the policy.

Engines and weights are in hosting.py, the policy's generation in rollout/sample.py.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from areal_like.errors import EngineError, UserError
from areal_like.trajectory import Segment
from areal_like.wire.messages import SampleTask
from rollout.answering import STOPS, answer_of, call_sampling, end_of
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.model_settings import MODELS_KEY, CalledModelSettings
from rollout.models.hosting import ModelHost, ModelHosts
from rollout.models.port import CalledModel, TokenLogprobs
from rollout.transcript import Answer, Transcript

SEED_STEP = 0x9E3779B97F4A7C15
"""Odd constant as for turns of the policy: each call draws from a separate random stream."""


class Caller(Protocol):
    """The sample that calls (rollout/sample.py)."""

    task: SampleTask
    engine_error: EngineError | None

    async def generate_as(self, role: CalledModelSettings, prompt: np.ndarray | Transcript, **asked: Any) -> Answer:
        """Generate an answer of the policy in this role."""
        ...

    def waiting(self) -> Any:
        """A context manager whose time counts as spent on other models."""
        ...


class CalledModels(Mapping[str, CalledModel]):
    """`tools.models`: the declared models by name. Raises UserError for another name."""

    def __init__(self, caller: Caller, hosts: ModelHosts, request_ids: Iterator[int], deadline_s: float) -> None:
        self._hosts = hosts
        self._made: dict[str, CalledModel] = {
            name: HostedModel(caller, hosts.hosts[name], request_ids, deadline_s)
            if settings.has_weights
            else PolicyRole(caller, settings)
            for name, settings in hosts.declared.items()
        }

    def __getitem__(self, name: str) -> CalledModel:
        if name not in self._made:
            known = f"there are {', '.join(self._made)}" if self._made else f"declare it in {MODELS_KEY}"
            raise UserError(f"the workflow calls a model `{name}` that is not declared", where=MODELS_KEY, remedy=known)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def end_session(self, session_key: int) -> None:
        """End the sample's conversations, so that engines may drop what they keep of them."""
        for host in self._hosts.hosts.values():
            host.engine.end_session(session_key)


class PolicyRole:
    """A role of the policy (port.CalledModel)."""

    def __init__(self, caller: Caller, settings: CalledModelSettings) -> None:
        self._caller, self._settings = caller, settings
        self.name, self.is_trained = settings.name, settings.is_trained

    async def generate(
        self,
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See CalledModel."""
        own = self._settings
        return await self._caller.generate_as(
            own, prompt, stop_token_ids=stop_token_ids,
            max_new_tokens=own.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=own.temperature if temperature is None else temperature,
        )  # fmt: skip

    async def logprobs(
        self, prompt: np.ndarray | Transcript, tokens: np.ndarray, *, temperature: float = 1.0
    ) -> TokenLogprobs:
        """See CalledModel."""
        raise UserError(
            f"{self.name} is a role of the policy, which gives no log-probs of tokens",
            where=MODELS_KEY,
            remedy="source: start, a path, or refresh_every",
        )


class HostedModel:
    """A model with separate weights (port.CalledModel)."""

    def __init__(self, caller: Caller, host: ModelHost, request_ids: Iterator[int], deadline_s: float) -> None:
        self._caller, self._host = caller, host
        self._request_ids, self._deadline_s = request_ids, deadline_s
        self._numbers = itertools.count()
        self.name, self.is_trained = host.settings.name, False

    async def generate(
        self,
        prompt: np.ndarray | Transcript,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See CalledModel. Raises EngineError if its engine failed; the worker then exits."""
        prompt_P, own = _tokens(prompt), self._host.settings
        given = msgspec.structs.replace(self._caller.task.sampling, stop=())  # which are the policy's
        sampling = call_sampling(
            given, self._host.end_ids, stop_token_ids=stop_token_ids,
            max_new_tokens=own.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=own.temperature if temperature is None else temperature,
        )  # fmt: skip
        max_context = self._host.engine.capabilities.max_context
        seed = self._seed(next(self._numbers))
        if len(prompt_P) >= max_context:
            return answer_of(Segment.empty(), "context", is_trainable=False, model=self.name)

        async def ask() -> GenerationOutcome:
            return await self._host.engine.generate(
                GenerationRequest(
                    request_id=next(self._request_ids), prompt_P=prompt_P, prefix=Segment.empty(), sampling=sampling,
                    seed=seed, session_key=self._caller.task.lease_id,
                )
            )  # fmt: skip

        outcome: GenerationOutcome = await self._with_engine(ask)
        while (
            outcome.end_reason == "cancelled"
        ):  # the policy was rolled back to an earlier version, and so was its copy
            outcome = await self._with_engine(ask)
        segment = outcome.segment
        ended_by = end_of(segment, sampling, len(prompt_P), end_ids=self._host.end_ids, max_context=max_context)
        if ended_by is None or (outcome.end_reason == "stop") != (
            ended_by in STOPS
        ):  # the engine's reason takes precedence
            ended_by = "stop_token" if outcome.end_reason == "stop" else "length"
        return answer_of(segment, ended_by, is_trainable=False, model=self.name)

    async def logprobs(
        self, prompt: np.ndarray | Transcript, tokens: np.ndarray, *, temperature: float = 1.0
    ) -> TokenLogprobs:
        """See CalledModel."""
        prompt_P = _tokens(prompt)

        async def ask() -> tuple[np.ndarray, int]:
            try:
                return await self._host.engine.logprobs(prompt_P, np.asarray(tokens), temperature)
            except UserError as error:
                raise UserError(f"model {self.name}: {error.what}", where=MODELS_KEY, remedy=error.remedy) from error

        logprobs_R, version = await self._with_engine(ask)
        return TokenLogprobs(logprobs_R=logprobs_R, model=self.name, version=version)

    async def _with_engine(self, ask: Callable[[], Any]) -> Any:
        """The answer of the engine, once it has weights; a failure of the engine ends the worker."""
        with self._caller.waiting():
            await self._host.gate.wait(0, self._deadline_s)
            try:
                return await ask()
            except EngineError as error:
                self._caller.engine_error = error
                raise

    def _seed(self, number: int) -> int:
        return int((self._caller.task.seed + (zlib.crc32(self.name.encode()) + number) * SEED_STEP) % 2**63)


def _tokens(prompt: np.ndarray | Transcript) -> np.ndarray:
    return prompt.tokens_T if isinstance(prompt, Transcript) else np.asarray(prompt, np.int32)
