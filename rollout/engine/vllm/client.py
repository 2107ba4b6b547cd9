"""The endpoints of one vLLM server, each with a deadline; failures are described in server/http.py.

vLLM's events become those of server/answer.py. An event of vLLM names no version: only the last one of a request has
the spans of its versions. The name in earlier events is therefore that of the weights that this client loaded last,
which is a token's own version or a newer one, as GrowingAnswer needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from areal_like.errors import EngineError
from rollout.engine.server.answer import Finish, MetaInfo, StreamEvent, VersionSpan
from rollout.engine.server.http import HttpCalls, ServerGone, ServerRefused

GENERATE = "/inference/v1/generate"
TICKET_PREFIX = "generate-tokens-"
"""Of a request's id inside the server: an abort of the bare id is answered with success and does nothing."""
PROBE_TIMEOUT_S = 10.0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens of an event."""

    content: tuple[TokenLogprob, ...] | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of an answer."""

    token_ids: tuple[int, ...] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: tuple[VersionSpan, ...] | None = None


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt were found in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a whole request."""

    prompt_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in a stream."""

    message: str = ""
    code: int | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Failure | None = None


_decoder = msgspec.json.Decoder(Chunk)


class EventMaker:
    """Makes the events of one answer out of vLLM's."""

    def __init__(self) -> None:
        self._count = 0
        self._last: Choice | None = None

    def take(self, data: bytes, weights_name: str) -> StreamEvent | None:
        """The event of one `data:` line; None while there is nothing to report: the last part of an answer is kept
        until its token counts follow. Raises EngineError (invalid), ServerGone or ServerRefused (an error)."""
        try:
            chunk = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the server sent an invalid event ({error}): {data[:200]!r}") from error
        if chunk.error is not None:
            if chunk.error.code == 400:
                raise ServerRefused(GENERATE, 400, chunk.error.message)
            raise ServerGone(f"the server reports an error: {chunk.error.message}")
        if chunk.usage is not None and self._last is not None:
            choice, self._last = self._last, None
            return self._event(choice, weights_name, chunk.usage)
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self._last = choice
                return None
            return self._event(choice, weights_name, None)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether no event is kept."""
        return self._last is None

    def _event(self, choice: Choice, weights_name: str, usage: Usage | None) -> StreamEvent:
        tokens = choice.token_ids or ()
        self._count += len(tokens)
        logprobs = choice.logprobs.content or () if choice.logprobs else ()
        details = usage.prompt_tokens_details if usage else None
        return StreamEvent(
            output_ids=tokens,
            meta_info=MetaInfo(
                finish_reason=Finish(choice.finish_reason) if choice.finish_reason else None,
                prompt_tokens=usage.prompt_tokens if usage else 0,
                cached_tokens=(details.cached_tokens or 0) if details else 0,
                completion_tokens=self._count,
                weight_version=weights_name,
                weight_versions=choice.weight_versions or (),
                output_token_logprobs=tuple((one.logprob, one.token_id, None) for one in logprobs),
            ),
        )


class VLLMClient(HttpCalls):
    """One server's endpoints. Create and close it on the event loop."""

    weights_name = "-1"
    """Version of the weights that this client loaded last."""

    # ------------------------------------------------------------ generating

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """The events of one request with `stream` set. It has no deadline."""
        maker = EventMaker()
        async with contextlib.aclosing(self._events(GENERATE, body)) as events:
            async for data in events:
                event = maker.take(data, self.weights_name)
                if event is not None:
                    yield event
        if not maker.is_complete:
            raise ServerGone("the stream ended before its token counts")

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probs of tokens 1, 2, ... of a prompt, each given those before it. The prefix cache is not used. Raises
        ServerRefused, also for a reply of another form."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._post(GENERATE, {"token_ids": tokens, "sampling_params": sampling})
        rows = answer.get("prompt_logprobs") or []
        if len(rows) != len(tokens):
            raise ServerRefused(
                GENERATE,
                200,
                f"the server returned log-probs of {len(rows)} positions for a prompt of {len(tokens)} tokens",
            )
        try:
            return [float(row[str(token)]["logprob"]) for token, row in zip(tokens[1:], rows[1:], strict=True)]
        except (KeyError, TypeError) as error:
            raise ServerRefused(
                GENERATE, 200, f"the server returned no log-prob for a token of the prompt ({error!r})"
            ) from error

    async def abort(self, request_id: str) -> None:
        """End one request; its stream receives the tokens so far, with finish reason `abort`."""
        await self._post("/abort_requests", {"request_ids": [TICKET_PREFIX + request_id]})

    async def abort_all(self) -> None:
        """End every request; each stream receives its tokens so far and its version spans."""
        await self._post("/abort_requests", {})

    # ------------------------------------------------------------ control

    async def prepare(self, version: int) -> None:
        """Make a new server ready for loads, and name its weights. Raises EngineError if its sampler cannot be arranged
        as inside/areal_like_vllm.py describes."""
        await self._post("/init_weight_transfer_engine", {"init_info": {}})
        await self._post("/update_weight_version", {"new_version": str(version)})
        self.weights_name = str(version)
        answer = await self._post("/collective_rpc", {"method": "arrange_sampling"})
        if not all(worker.get("is_arranged") for worker in answer.get("results") or [{}]):
            raise EngineError(
                "this vLLM server uses an unsupported sampler, whose seeds and log-probs would not match those of "
                "areal_like"
            )

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop at a token boundary; requests stay. `clear_cache`: drop all keys and values, which are computed again
        after `resume`."""
        await self._post(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", {})

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._post("/resume", {})

    async def load(self, folder: str, version: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Replace the weights of a paused server by those of a folder on its disk, which must have exactly the tensors
        `shapes`. Raises ServerRefused."""
        limit_s, info = self.load_timeout_s, {"folder": folder, "tensors": {k: list(v) for k, v in shapes.items()}}
        await self._post("/start_weight_update", {}, timeout_s=limit_s)
        await self._post("/update_weights", {"update_info": info}, timeout_s=limit_s)
        await self._post("/finish_weight_update", {"weight_version": str(version)}, timeout_s=limit_s)
        self.weights_name = str(version)

    # ------------------------------------------------------------ asking

    async def probe(self) -> None:
        """Return once the server's front process responds. Raises ServerGone. (Not /health: it needs no scheduler
        either, but fails when a request has failed.)"""
        await self._get("/version", timeout_s=min(PROBE_TIMEOUT_S, self.control_timeout_s / 2))
