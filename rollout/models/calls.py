"""The models of one sample, as its workflow calls them: models with separate weights, and roles of the policy.

Engines and weights are in hosting.py, external models in external.py, the policy's generation in rollout/sample.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from areal_like.errors import EngineError, UserError
from areal_like.trajectory import Segment
from rollout.answering import STOPS, answer_of, call_sampling, end_of, prompt_tokens
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.model_settings import MODELS_KEY, CalledModelSettings
from rollout.models.external import ExternalCalls
from rollout.models.hosting import ModelHost, ModelHosts
from rollout.models.port import CalledModel, Caller, Prompt, TokenLogprobs, as_tokens, call_seed
from rollout.transcript import Answer

SESSION_SHIFT = 48
"""Number of bits of a lease's number in the key of a conversation."""


def session_key(lease_id: int, declared: Iterable[str], name: str) -> int:
    """Key of the conversation of one model or role in a sample: each has a separate one, because several may share an
    engine. `declared`: names of all; `name` is empty for the policy without a role."""
    place = list(declared).index(name) + 1 if name else 0
    return lease_id + (place << SESSION_SHIFT)


class CalledModels(Mapping[str, CalledModel]):
    """`tools.models`: the declared models by name. Raises UserError for another name."""

    def __init__(self, caller: Caller, hosts: ModelHosts, request_ids: Iterator[int], deadline_s: float) -> None:
        lease_id = caller.task.lease_id

        def made(name: str, settings: CalledModelSettings) -> HostedModel | ExternalCalls | PolicyRole:
            if name in hosts.external:
                return ExternalCalls(caller, hosts.external[name])
            if settings.is_role:
                return PolicyRole(caller, settings)
            key = session_key(lease_id, hosts.declared, name)
            return HostedModel(caller, hosts.hosts[name], settings, request_ids, deadline_s, key)

        self._made = {name: made(name, settings) for name, settings in hosts.declared.items()}

    def __getitem__(self, name: str) -> CalledModel:
        if name not in self._made:
            known = f"use one of {', '.join(self._made)}" if self._made else f"declare the model in {MODELS_KEY}"
            raise UserError(
                f"the workflow calls a model `{name}`, which is not declared", where=MODELS_KEY, remedy=known
            )
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def end_sessions(self) -> None:
        """End the sample's conversations, so that engines may drop what they keep of them."""
        for model in self._made.values():
            if isinstance(model, HostedModel):
                model.end_session()


class PolicyRole:
    """A role of the policy (port.CalledModel)."""

    def __init__(self, caller: Caller, settings: CalledModelSettings) -> None:
        self._caller, self._settings = caller, settings
        self.name, self.is_trained = settings.name, settings.is_trained

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See CalledModel."""
        own = self._settings
        return await self._caller.generate_as(
            own, as_tokens(prompt, self._caller.tokens), stop_token_ids=stop_token_ids,
            max_new_tokens=own.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=own.temperature if temperature is None else temperature,
        )  # fmt: skip

    async def logprobs(self, prompt: Prompt, tokens: np.ndarray, *, temperature: float = 1.0) -> TokenLogprobs:
        """See CalledModel."""
        raise UserError(
            f"{self.name} is a role of the policy, which does not compute log-probs of given tokens",
            where=MODELS_KEY,
            remedy="set source: start, path or refresh_every for this model",
        )


class HostedModel:
    """A model with separate weights (port.CalledModel)."""

    def __init__(
        self, caller: Caller, host: ModelHost, settings: CalledModelSettings, request_ids: Iterator[int],
        deadline_s: float, session_key: int,
    ) -> None:  # fmt: skip
        self._caller, self._host, self._settings = caller, host, settings
        self._request_ids, self._deadline_s, self._session_key = request_ids, deadline_s, session_key
        self._numbers = itertools.count()
        self.name, self.is_trained = settings.name, False
        self._adapter = "" if settings.adapter is None else settings.name

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See CalledModel. Raises EngineError if its engine failed; the worker then exits."""
        prompt_P, own = prompt_tokens(as_tokens(prompt, self._caller.tokens)), self._settings
        given = msgspec.structs.replace(self._caller.task.sampling, stop=())  # which are the policy's
        sampling = call_sampling(
            given, self._host.end_ids, stop_token_ids=stop_token_ids,
            max_new_tokens=own.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=own.temperature if temperature is None else temperature,
        )  # fmt: skip
        max_context = self._host.engine.capabilities.max_context
        seed = call_seed(self._caller.task.seed, self.name, next(self._numbers))
        if len(prompt_P) >= max_context:
            return answer_of(Segment.empty(), "context", is_trainable=False, model=self.name)

        async def ask() -> GenerationOutcome:
            return await self._host.engine.generate(
                GenerationRequest(
                    request_id=next(self._request_ids), prompt_P=prompt_P, prefix=Segment.empty(), sampling=sampling,
                    seed=seed, session_key=self._session_key, adapter=self._adapter,
                )
            )  # fmt: skip

        outcome: GenerationOutcome = await self._with_engine(ask)
        while (
            outcome.end_reason == "cancelled"
        ):  # the policy was rolled back to an earlier version, and so was its copy
            outcome = await self._with_engine(ask)
        segment = outcome.segment
        self._host.tokens[self.name] += len(segment)
        ended_by = end_of(segment, sampling, len(prompt_P), end_ids=self._host.end_ids, max_context=max_context)
        if ended_by is None or (outcome.end_reason == "stop") != (
            ended_by in STOPS
        ):  # the engine's reason takes precedence
            ended_by = "stop_token" if outcome.end_reason == "stop" else "length"
        return answer_of(segment, ended_by, is_trainable=False, model=self.name)

    async def logprobs(self, prompt: Prompt, tokens: np.ndarray, *, temperature: float = 1.0) -> TokenLogprobs:
        """See CalledModel."""
        prompt_P = prompt_tokens(as_tokens(prompt, self._caller.tokens))

        async def ask() -> tuple[np.ndarray, int]:
            try:
                return await self._host.engine.logprobs(
                    prompt_P, np.asarray(tokens), temperature, adapter=self._adapter
                )
            except UserError as error:
                raise UserError(f"model {self.name}: {error.what}", where=MODELS_KEY, remedy=error.remedy) from error

        logprobs_R, version = await self._with_engine(ask)
        return TokenLogprobs(logprobs_R=logprobs_R, model=self.name, version=version)

    def end_session(self) -> None:
        """End its conversation in this sample."""
        self._host.engine.end_session(self._session_key)

    async def _with_engine(self, ask: Callable[[], Any]) -> Any:
        """The answer of the engine, once it has weights; a failure of the engine ends the worker."""
        with self._caller.waiting():
            await self._host.gate.wait(0, self._deadline_s)
            try:
                return await ask()
            except EngineError as error:
                self._caller.engine_error = error
                raise
