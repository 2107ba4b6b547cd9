"""Answers of a policy that is served: each request is answered from the messages it contains.

The endpoint decides how an answer is sampled, how many requests may wait, and which conversations
`previous_response_id` can name. HTTP is in listener.py. Nothing is trained on: a request is rendered by the chat
template, and a session generates its only answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from areal_like.errors import EngineError, first_line
from areal_like.safety import Part as SafetyPart
from areal_like.safety import SafetyFilter
from areal_like.serve_files import UNNAMED_MODEL
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.agent.dialect import AgentRequest, BadRequest, Opening, Reply, no_such_model
from rollout.agent.kept_conversations import KeptConversations
from rollout.agent.session import AgentSession, RequestName
from rollout.agent.store import Message
from rollout.agent.streaming import OnConversation, OnPart, Part
from rollout.answers import read_begun
from rollout.chat.calls import json_text
from rollout.chat.formats import ChatFormat
from rollout.engine.port import Engine, GenerationOutcome, GenerationRequest
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

MAX_TEMPERATURE = 100.0
WAITING_PER_SLOT = 8
"""Number of requests that may wait for each slot of the engine; further ones are refused."""

LOOK_S = 0.05
"""Interval between checks of a streamed answer for new tokens."""
_TEXTS = frozenset({"content", "reasoning_content", "tool_calls", "function", "arguments"})
"""Keys of a message below which safety stages look at texts."""
OnGrown = Callable[[np.ndarray, np.ndarray], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _EndpointTools:
    """The tools with which a session samples its answer, with the settings of its request."""

    engine: Engine
    tokens: PromptTokens
    sampling: Sampling
    number: int
    seed: int
    adapter: str = ""
    on_grown: OnGrown | None = None
    """Called with the prompt and the answer so far, whenever it grows."""

    async def generate(self, prompt: Transcript, *, max_new_tokens: int | None = None) -> Answer:
        """See `SampleTools.generate`. Raises EngineError."""
        prompt_P = prompt.tokens_T
        room = self.tokens.max_context - len(prompt_P)
        limit = min(one for one in (room, max_new_tokens, self.sampling.max_new_tokens) if one)
        sampling = msgspec.structs.replace(self.sampling, max_new_tokens=limit)
        request = GenerationRequest(
            request_id=self.number, prompt_P=prompt_P, prefix=Segment.empty(), sampling=sampling, seed=self.seed,
            adapter=self.adapter,
        )  # fmt: skip
        outcome = await self._generated(request)
        is_stopped = outcome.end_reason == "stop"
        return Answer(
            segment=outcome.segment,
            finish_reason="stop" if is_stopped else "length",
            ended_by="end_of_sequence" if is_stopped else "length",
            number=0,
            stop_token=int(outcome.segment.tokens_R[-1]) if is_stopped else None,
        )

    async def _generated(self, request: GenerationRequest) -> GenerationOutcome:
        if self.on_grown is None:
            return await self.engine.generate(request)
        generating, num_seen = asyncio.ensure_future(self.engine.generate(request)), 0
        try:
            while not (await asyncio.wait({generating}, timeout=LOOK_S))[0]:
                segment = self.engine.progress().get(request.request_id)
                if segment is not None and len(segment) > num_seen:
                    num_seen = len(segment)
                    await self.on_grown(request.prompt_P, segment.tokens_R)
            return generating.result()
        finally:
            generating.cancel()
            await asyncio.wait({generating})


class Endpoint:
    """Answers any number of clients that have its key. Used on one event loop; see `listener.Answers`.

    `tokens`: with the engine's context. `sampling`: defaults for requests; `max_new_tokens` 0: as many as fit. `key`:
    API key of the clients; empty: a random one. `no_tools`: why requests with tools are refused; empty: they are
    accepted. `models`: names of the models that requests may name, of which the first is the base, and the others
    adapters of the engine. With one model, any name is accepted. `safety`: looks at requests and answers; a stage that
    looks at answers delays streams until the answer is complete.
    """

    def __init__(
        self, engine: Engine, tokens: PromptTokens, chat: ChatFormat, *, sampling: Sampling, key: str = "",
        no_tools: str = "", models: Sequence[str] = (UNNAMED_MODEL,), safety: SafetyFilter | None = None,
    ) -> None:  # fmt: skip
        self._safety = safety
        self._models = tuple(models)
        self._engine, self._tokens, self._chat, self._no_tools = engine, tokens, chat, no_tools
        self._sampling = msgspec.structs.replace(sampling, stop_token_ids=tokens.stop_ids)
        self.secret = key or secrets.token_urlsafe(24)
        self.counts: Counter[str] = Counter()
        """Number of requests by outcome."""
        self.is_closing = False
        """The endpoint is shutting down: further requests are refused."""
        self.num_running = 0
        """Number of requests that run or wait."""
        self.idle = asyncio.Event()
        """Set while no request runs or waits."""
        self.idle.set()
        self.broken = asyncio.Event()
        """Set once the engine has failed: no further request can be answered."""
        self.engine_error: EngineError | None = None
        """The engine's error."""
        self._numbers = itertools.count()
        self._kept = KeptConversations()

    @asynccontextmanager
    async def answering(
        self, request: AgentRequest, name: RequestName, on_part: OnPart | None = None,
        on_conversation: OnConversation | None = None,
    ) -> AsyncIterator[Reply]:  # fmt: skip
        """Generate the answer to a request; leaving the block early cancels it. `on_part` is called as the answer
        grows; `on_conversation` is not called, because conversations have no ids.

        Raises:
            BadRequest: it cannot be answered, too many wait, or the engine has failed.
        """
        self._admit()
        request = self._looked_at_request(request)
        if self._safety is not None and self._safety.looks_at("answers"):
            on_part = None
        number = next(self._numbers)
        session = self._session(request, number, on_part)
        self.num_running += 1
        self.idle.clear()
        try:
            async with session.answering(request, name) as given:
                reply = self._looked_at_answer(given)
                self._kept.keep(number, request, reply.message)
                yield replace(reply, index=number)
        except BadRequest:
            if session.broken.done():
                self.fail(error := session.broken.exception() or RuntimeError("cancelled"))
                if isinstance(error, EngineError):
                    self.engine_error = self.engine_error or error
                    self.broken.set()
                what = f"the engine failed: {first_line(error)}"
                raise BadRequest(what, status=500, code="engine_failed") from error
            raise
        finally:
            await session.close()
            self.num_running -= 1
            if not self.num_running:
                self.idle.set()

    def conversation(self, index: int) -> list[Message]:
        """All messages up to and including an answer. Raises BadRequest if the answer is unknown or no longer kept."""
        return self._kept.conversation(index)

    def num_tokens(self, request: AgentRequest) -> int:
        """Number of tokens of a request's prompt. Raises BadRequest."""
        return self._session(request, 0).num_tokens(request)

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._tokens.max_context

    def fail(self, error: BaseException) -> None:
        """Log a request that could not be handled; the others continue."""
        log.error("a request failed", exc_info=error)

    def _looked_at_request(self, request: AgentRequest) -> AgentRequest:
        """The request with masked messages. Raises BadRequest if a safety stage refuses one."""
        if self._safety is None:
            return request
        wants_tokens = request.wants_logprobs or request.wants_token_ids or request.token_ids is not None
        if self._safety.looks_at("answers") and wants_tokens:
            what = "tokens and log-probs are not returned, because the safety stages of this server look at text"
            raise BadRequest(what, code="content_refused")
        if not self._safety.looks_at("prompts"):
            return request
        if request.token_ids is not None:
            what = "prompts in tokens are refused, because the safety stages of this server look at text"
            raise BadRequest(what, code="content_refused")
        return replace(request, messages=[self._looked_at(one, "prompts") for one in request.messages])

    def _looked_at_answer(self, reply: Reply) -> Reply:
        """The answer with a masked message. Raises BadRequest if a safety stage refuses it."""
        if self._safety is None or not self._safety.looks_at("answers"):
            return reply
        return replace(reply, message=self._looked_at(reply.message, "answers"))

    def _looked_at(self, value: Any, part: SafetyPart) -> Any:
        """A message with all its texts masked. Raises BadRequest."""
        if isinstance(value, Mapping):
            return {
                key: self._looked_at_arguments(one, part) if key == "arguments" and isinstance(one, str)
                else self._looked_at(one, part) if key in _TEXTS
                else one
                for key, one in value.items()
            }  # fmt: skip
        if isinstance(value, list):
            return [self._looked_at(one, part) for one in value]
        return self._looked_at_text(value, part) if isinstance(value, str) else value

    def _looked_at_arguments(self, written: str, part: SafetyPart) -> str:
        """The arguments of a call with masked texts and numbers; what is no JSON is looked at as text. Raises
        BadRequest."""
        try:
            arguments = json.loads(written, object_pairs_hook=_without_repetition)
            looked = self._looked_at_value(arguments, part)
            return written if looked == arguments else json_text(looked)
        except (ValueError, RecursionError):
            return self._looked_at_text(written, part)

    def _looked_at_value(self, value: Any, part: SafetyPart) -> Any:
        """A JSON value whose texts, names and numbers are masked; a masked number is text. Raises BadRequest."""
        if isinstance(value, dict):
            return {self._looked_at_text(key, part): self._looked_at_value(one, part) for key, one in value.items()}
        if isinstance(value, list):
            return [self._looked_at_value(one, part) for one in value]
        if isinstance(value, str):
            return self._looked_at_text(value, part)
        if isinstance(value, bool) or value is None:
            return value
        number = str(value)
        looked = self._looked_at_text(number, part)
        return value if looked == number else looked

    def _looked_at_text(self, text: str, part: SafetyPart) -> str:
        """The masked text. Raises BadRequest if a stage refuses it."""
        assert self._safety is not None
        try:
            looked = self._safety.look(text, part)
        except Exception as error:  # a stage of the user may raise anything
            self.fail(error)
            raise BadRequest("a safety stage of this server failed", status=500, code="safety_failed") from error
        self.counts.update(looked.counts)
        if looked.refused_by:
            whose = "request" if part == "prompts" else "answer"
            raise BadRequest(f"the {whose} is refused by a safety stage of this server", code="content_refused")
        return looked.text

    def _admit(self) -> None:
        """Raise BadRequest if there is no room for another request."""
        if self.is_closing:
            raise BadRequest("the server is shutting down", status=503, code="shutting_down")
        slots = self._engine.capabilities.num_slots
        if self.num_running >= slots * (1 + WAITING_PER_SLOT):
            raise BadRequest(
                f"{self.num_running} requests are already waiting; try again later", status=429, code="busy"
            )

    def _session(self, request: AgentRequest, number: int, on_part: OnPart | None = None) -> AgentSession:
        sampling, seed = sampling_of(request.settings, self._sampling)
        created = int(time.time())

        async def grown(prompt_P: np.ndarray, tokens_R: np.ndarray) -> None:
            assert on_part is not None
            texts = read_begun(self._tokens, self._chat, prompt_P, tokens_R, reads_calls=request.reads_calls)
            if any(texts):
                prompt_ids = prompt_P.tolist() if request.wants_token_ids else []
                await on_part(Part(Opening(number, created, len(prompt_P), prompt_ids=prompt_ids), *texts))

        asking = _EndpointTools(
            self._engine, self._tokens, sampling, number, seed, self._adapter_of(request), grown if on_part else None
        )
        return AgentSession(
            asking, self._chat, no_tools=self._no_tools, gives_reasoning=True, numbers=itertools.count(number)
        )

    def _adapter_of(self, request: AgentRequest) -> str:
        """The adapter that a request names; empty: the base. Raises BadRequest."""
        base, *adapters = self._models
        if not adapters or request.model in (base, UNNAMED_MODEL):
            return ""
        if request.model not in adapters:
            raise no_such_model(request.model, self._models)
        return request.model


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError if a name is repeated, of which only the last would be looked at."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the JSON object contains a key twice")
    return found


def sampling_of(settings: Mapping[str, Any], default: Sampling) -> tuple[Sampling, int]:
    """Sampling settings of an answer, and the seed of its random numbers. Raises BadRequest for a number out of
    range.
    """
    temperature = _number(settings, "temperature", default.temperature, 0.0, MAX_TEMPERATURE)
    top_p = _number(settings, "top_p", default.top_p, 1e-6, 1.0)
    top_k = _number(settings, "top_k", default.top_k, 0, 2**31 - 1, is_whole=True)
    seed = _number(settings, "seed", secrets.randbits(62), -(2**63), 2**63 - 1, is_whole=True)
    sampling = msgspec.structs.replace(default, temperature=float(temperature), top_p=float(top_p), top_k=int(top_k))
    return sampling, int(seed) % 2**63


def _number(
    settings: Mapping[str, Any], name: str, default: float, least: float, most: float, *, is_whole: bool = False
) -> float:
    value = settings.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        kind = "a whole number" if is_whole else "a number"
        raise BadRequest(f"{name} must be {kind} from {least:g} to {most:g}", param=name)
    return float(value) if not is_whole else value
