"""Models behind endpoints that others run, as a workflow calls them, and as a teacher (`rollout.models.*.endpoint`).

Requests, budget and recorded answers are in areal_like/external/. Models with weights in the worker are in hosting.py.

`api: chat` exchanges text: a prompt of tokens is decoded, and the tokens of an answer are those of its text in the
policy's tokenizer, with log-probs of 0, since the endpoint's own tokens are not the policy's. `api: tokens` exchanges
token ids, whose meaning is compared with the policy's tokenizer at the start.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from areal_like.errors import UserError
from areal_like.external.chat import (
    CHAT,
    COMPLETIONS,
    ChatChoice,
    TokenChoice,
    chat_choice,
    prompt_logprobs,
    sampled_tokens,
    token_choice,
)
from areal_like.external.client import ModelClient
from areal_like.external.errors import ExternalStop, RequestRefused
from areal_like.external.settings import ExternalModelOptions
from areal_like.trajectory import Segment
from rollout.answering import answer_of, prompt_tokens
from rollout.model_settings import MODELS_KEY, CalledModelSettings
from rollout.models.port import Caller, Prompt, TokenLogprobs, as_tokens, call_seed, is_messages
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, EndedBy

EXTERNAL_VERSION = 0
"""Version of a model whose weights this project does not know."""
SEED_LIMIT = 2**31
"""Bound of a seed that every endpoint accepts."""
NUM_COMPARED = 24
"""Number of token ids whose text is compared with the policy's tokenizer."""
TOKENIZER_REMEDY = "use a model with the policy's tokenizer"
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class ExternalModel:
    """One external model of a worker; several samples call it at the same time."""

    def __init__(self, settings: CalledModelSettings) -> None:
        """Raises UserError: no key, no HTTP library, no file for a budget or a replay."""
        assert settings.endpoint is not None
        self.settings, self.options = settings, settings.endpoint
        self.where = f"{MODELS_KEY}: {settings.name}"
        path = CHAT if self.options.api == "chat" else COMPLETIONS
        limit = self.options.max_concurrency
        self.client = ModelClient(self.options, path, self.where, max_concurrency=limit)
        self.num_tokens = 0
        """Number of tokens of its answers."""

    async def start(self, tokenizer: Any, *, is_teacher: bool) -> None:
        """With `api: tokens`, compare token ids with the policy's tokenizer, and of a teacher that the endpoint returns
        log-probs of given tokens. Raises UserError, ExternalError.

        The endpoint is asked each time, because a recorded reply may be another server's. It is not asked in a replay,
        which sends nothing, or if the budget is used up: then the answers to come may all be recorded."""
        if self.options.api != "tokens" or self.options.record == "replay":
            return
        if used := self.client.budget_end():
            log.warning("%s: the tokenizer of %s is not compared with the policy's, because the budget is used up (%s)",
                        self.where, self.shown_url, used)  # fmt: skip
            return
        texts = _plain_tokens(tokenizer)
        tokens = list(texts) if len(texts) > 1 else [0, 1]

        def rows_in(choice: TokenChoice) -> Any:
            if is_teacher:
                prompt_logprobs(choice, tokens, 1, self.shown_url)
            return choice.prompt_logprobs

        try:
            rows = await self._about_prompt(tokens, rows_in, is_repeatable=False)
        except RequestRefused as error:
            if not is_teacher:
                return
            what = f"a teacher needs log-probs of given tokens, but {error}"
            remedy = "use a server that offers prompt_logprobs, such as vLLM, or a teacher with weights (path: FOLDER)"
            raise UserError(what, where=self.where, remedy=remedy) from error
        for token, row in zip(tokens, rows or (), strict=False):
            entry = (row or {}).get(str(token))
            said = entry.get("decoded_token") if isinstance(entry, dict) else None
            if isinstance(said, str) and token in texts and said.strip() != texts[token].strip():
                what = f"token {token} is {said!r} at {self.shown_url}, but {texts[token]!r} in the policy's tokenizer"
                raise UserError(what, where=self.where, remedy=TOKENIZER_REMEDY)

    @property
    def shown_url(self) -> str:
        """Its address for messages."""
        return self.client.shown_url

    async def _about_prompt(
        self, tokens_T: Sequence[int], read: Callable[[TokenChoice], _T], *, is_repeatable: bool = True
    ) -> _T:
        """What `read` makes of the reply to a request for log-probs of these tokens. is_repeatable: as in `ask`."""
        body = {"prompt": list(tokens_T), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        return await self.client.ask(
            body, lambda reply: read(token_choice(reply, self.shown_url)), is_repeatable=is_repeatable
        )

    async def logprobs(self, tokens_T: Sequence[int], start: int) -> list[float]:
        """Log-probs [T - start] of tokens from `start` on. Raises ExternalError, ExternalStop."""
        return await self._about_prompt(
            tokens_T, lambda choice: prompt_logprobs(choice, tokens_T, start, self.shown_url)
        )

    def counters(self) -> dict[str, float]:
        """Monotonic counters: those of the requests, and tokens of answers."""
        return {**self.client.counters(), "tokens": float(self.num_tokens)}


class ExternalCalls:
    """The calls of one external model in one sample (port.CalledModel)."""

    def __init__(self, caller: Caller, model: ExternalModel) -> None:
        self._caller, self._model = caller, model
        self._numbers = itertools.count()
        self.name, self.is_trained = model.settings.name, False

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] | np.ndarray | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """See CalledModel. Raises ExternalError if this request has no answer."""
        own, given, options = self._model.settings, self._caller.task.sampling, self._model.options
        url = self._model.shown_url
        limit = next(one for one in (max_new_tokens, own.max_new_tokens, given.max_new_tokens) if one is not None)
        heat = next(one for one in (temperature, own.temperature, given.temperature) if one is not None)
        seed = call_seed(self._caller.task.seed, self.name, next(self._numbers))
        body: dict[str, Any] = {"temperature": float(heat)}
        if options.send_seed:
            body["seed"] = seed % SEED_LIMIT
        if options.api == "tokens":
            stops = [] if stop_token_ids is None else [int(token) for token in stop_token_ids]
            body |= {"prompt": _ids(prompt, self._caller.tokens), "max_tokens": int(limit), "logprobs": 1}
            body |= {"return_token_ids": True, "skip_special_tokens": False, "stop_token_ids": stops}
            found = await self._ask(body, seed, lambda reply: _sampled(reply, url))
            return self._token_answer(*found, stops)
        if stop_token_ids is not None:
            what = "`api: chat` exchanges text, so it cannot use stop_token_ids"
            raise UserError(what, where=self._model.where, remedy="remove stop_token_ids, or use api: tokens")
        body |= {"messages": _messages(prompt, self._caller.tokens, options), options.max_tokens_key: int(limit)}
        return self._text_answer(await self._ask(body, seed, lambda reply: chat_choice(reply, url)))

    async def logprobs(self, prompt: Prompt, tokens: np.ndarray, *, temperature: float = 1.0) -> TokenLogprobs:
        """See CalledModel."""
        if self._model.options.api != "tokens":
            what = "`api: chat` returns no log-probs of given tokens"
            raise UserError(
                what, where=self._model.where, remedy="set api: tokens, which requires a server such as vLLM"
            )
        if temperature != 1.0:
            what = f"an endpoint returns log-probs at temperature 1, not {temperature:g}"
            raise UserError(
                what,
                where=self._model.where,
                remedy="use temperature 1, or set path instead of endpoint for this model",
            )
        prompt_P, tokens_R = _ids(prompt, self._caller.tokens), np.asarray(tokens)
        if not prompt_P:
            raise UserError("computing log-probs requires a prompt of at least one token", where=self._model.where)
        known = [*prompt_P, *map(int, tokens_R)]
        with self._caller.waiting():
            try:
                made = await self._model.logprobs(known, len(prompt_P))
            except ExternalStop as error:
                self._caller.engine_error = error
                raise
        return TokenLogprobs(logprobs_R=np.asarray(made, np.float32), model=self.name, version=EXTERNAL_VERSION)

    async def _ask(self, body: Mapping[str, Any], seed: int, read: Callable[[Any], _T]) -> _T:
        with self._caller.waiting():
            try:
                return await self._model.client.ask(body, read, salt=seed)
            except ExternalStop as error:  # ends the worker, and so the run
                self._caller.engine_error = error
                raise

    def _text_answer(self, choice: ChatChoice) -> Answer:
        tokens_R = self._caller.tokens.encode(choice.message.content or "")
        self._model.num_tokens += len(tokens_R)
        is_cut = choice.finish_reason == "length"
        return Answer(
            segment=_segment(tokens_R, np.zeros(len(tokens_R), np.float32)),
            finish_reason="length" if is_cut else "stop", ended_by="length" if is_cut else "end_of_sequence",
            is_trainable=False, model=self.name,
        )  # fmt: skip

    def _token_answer(
        self, ids: list[int], logprobs: list[float], finish_reason: str | None, stops: Sequence[int]
    ) -> Answer:
        self._model.num_tokens += len(ids)
        ended_by: EndedBy = "length"
        if finish_reason != "length":
            ended_by = "stop_token" if ids and ids[-1] in stops else "end_of_sequence"
        made = _segment(np.asarray(ids, np.int32), np.minimum(np.asarray(logprobs, np.float32), 0.0))
        return answer_of(made, ended_by, is_trainable=False, model=self.name)


def _sampled(reply: Any, shown_url: str) -> tuple[list[int], list[float], str | None]:
    """Token ids [R], log-probs [R] and reason of the end of an answer. Raises RequestRefused."""
    choice = token_choice(reply, shown_url)
    return *sampled_tokens(choice, shown_url), choice.finish_reason


def _segment(tokens_R: np.ndarray, logprobs_R: np.ndarray) -> Segment:
    if not len(tokens_R):
        return Segment.empty()
    return Segment(tokens_R.astype(np.int32), logprobs_R, np.full(len(tokens_R), EXTERNAL_VERSION, np.int32))


def _ids(prompt: Prompt, tokens: PromptTokens) -> list[int]:
    return [int(token) for token in prompt_tokens(as_tokens(prompt, tokens))]


def _messages(prompt: Prompt, tokens: PromptTokens, options: ExternalModelOptions) -> list[dict[str, Any]]:
    if is_messages(prompt):
        messages = [dict(one) for one in prompt]
    else:
        messages = [{"role": "user", "content": tokens.decode(prompt_tokens(as_tokens(prompt, tokens)))}]
    if options.system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": options.system})
    return messages


def _plain_tokens(tokenizer: Any) -> dict[int, str]:
    """Some token ids spread over the vocabulary, with their text, which is printable ASCII."""
    ids = sorted(tokenizer.get_vocab().values())
    special, found = set(tokenizer.all_special_ids), dict[int, str]()
    for place in range(0, len(ids), max(1, len(ids) // (4 * NUM_COMPARED))):
        text = str(tokenizer.decode([ids[place]], clean_up_tokenization_spaces=False))
        if ids[place] not in special and text.strip() and text.isascii() and text.isprintable():
            found[ids[place]] = text
        if len(found) == NUM_COMPARED:
            break
    return found
