"""The session of one agent: generates the answers to its requests one after the other, each once.

A session handles retries, counts and the reward that an agent reports. HTTP is in listener.py, the agent's process in
workflow.py, and the tokens that a request continues in store.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from rollout.agent.dialect import AgentRequest, BadRequest, Reply
from rollout.agent.program_time import ProgramTime
from rollout.agent.store import TURN, Message, Prompt, Thinking, TokenStore, Turn
from rollout.agent.streaming import OnConversation, OnPart
from rollout.answers import read_answer
from rollout.chat.calls import Read, Schemas, schemas_by_name
from rollout.chat.formats import ChatFormat, ParsedAnswer
from rollout.tokens import PromptTokens, PromptTooLong
from rollout.transcript import Answer, Transcript

MAX_REMEMBERED = 256
"""Number of newest requests whose answers are kept for retries."""
MAX_COMPONENTS = 256
"""Largest number of components of a reported reward; they are stored with the sample."""
MAX_ANSWER_CHARS = 1_000_000
"""Longest text that an agent submits for scoring."""
MAX_DEPTH = 100
"""Deepest nesting of a tool call's arguments, which dialects and clients parse; Python's parsers fail at a thousand or
less."""


class AnswerTools(Protocol):
    """The part of `SampleTools` that a session uses."""

    @property
    def tokens(self) -> PromptTokens: ...

    async def generate(self, prompt: Transcript, *, max_new_tokens: int | None = None) -> Answer: ...


@dataclass(frozen=True, slots=True)
class RequestName:
    """Identity of a request.

    key: the client's idempotency key; empty: none. digest: hash of the request. is_retry: the client has marked it as a
    retry. conversation: id of its conversation, if the client names it. begins: the client says that a conversation
    begins with it.
    """

    key: str
    digest: bytes
    is_retry: bool = False
    conversation: str = ""
    begins: bool = False


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request, its running or finished answer, and the clients that wait for it."""

    name: RequestName
    answer: asyncio.Task[Reply]
    num_waiting: int = 0
    is_delivered: bool = False


class AgentSession:
    """The requests of one agent. Used on one event loop.

    `chat`: format of the model's answers. `row`: the data row, which the agent may request. `no_tools`: why requests
    with tools are refused; empty: they are accepted. `thinking`, `gives_reasoning`: as in `TokenStore`. `numbers`:
    indices of the answers; sessions with the same clients share them, so that ids of answers and tool calls differ.
    """

    def __init__(
        self, tools: AnswerTools, chat: ChatFormat, *, row: Mapping[str, Any] | None = None, no_tools: str = "",
        thinking: Thinking = "keep", gives_reasoning: bool = False, numbers: Iterator[int] | None = None,
    ) -> None:  # fmt: skip
        self._tools, self._chat, self._no_tools = tools, chat, no_tools
        self._numbers = itertools.count() if numbers is None else numbers
        self.row = row or {}
        self.secret = secrets.token_urlsafe(24)
        """The agent's API key, different for each agent."""
        self.store = TokenStore(
            tools.tokens, stop_marks=chat.stop_marks, has_text_arguments=chat.has_text_arguments, thinking=thinking,
            gives_reasoning=gives_reasoning,
        )  # fmt: skip
        self.last_content = ""
        """Text of the newest answer without reasoning and tool calls, which scorers judge."""
        self.reward: tuple[float, dict[str, float]] | None = None
        """Value and components that the agent reported."""
        self.handed_in: str | None = None
        """The text that the agent submitted for scoring instead; None: there is none."""
        self.counts: Counter[str] = Counter()
        self.own_time = ProgramTime()
        """Time of the agent, without that in which its requests are answered."""
        self.is_over = False
        """The agent has ended: further requests are refused."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Exception that ended the sample while an answer was sampled: of its lease or of the engine."""
        self._one_at_a_time = asyncio.Lock()
        self._asked: deque[_PendingRequest] = deque(maxlen=MAX_REMEMBERED)
        self._running: set[asyncio.Task[Reply]] = set()
        self._said: dict[int, tuple[Turn | None, list[Message]]] = {}
        """By index of a turn: the turn that it continues, and the messages since then, which end with its answer."""

    @asynccontextmanager
    async def answering(
        self, request: AgentRequest, name: RequestName, on_part: OnPart | None = None,
        on_conversation: OnConversation | None = None,
    ) -> AsyncIterator[Reply]:  # fmt: skip
        """Generate the answer to a request; the block sends it to the client, and raises if that fails.

        Args:
            request: the request. name: a request with the idempotency key of an earlier one, or a retry of one, gets
                the same answer. An equal request without either is a new one, for agents that request several answers.
            on_part: not called, because another worker may continue the answer before it is complete.
            on_conversation: not called, because a session has no conversations with ids.

        Raises:
            BadRequest: the request cannot be answered; the agent may send another.
        """
        if self.is_over:
            raise BadRequest("the sample has ended", status=409, code="sample_ended")
        asked = self._known(name)
        if asked is None:
            self.own_time.hold()
            asked = _PendingRequest(name, asyncio.create_task(self._answer(request)))
            self._asked.append(asked)
            self._running.add(asked.answer)
            asked.answer.add_done_callback(self._ended)
        else:
            self.counts["agent_retries"] += 1
        asked.num_waiting += 1
        try:
            # A client that disconnects does not cancel the answer: it will repeat the request.
            yield await asyncio.shield(asked.answer)
            asked.is_delivered = True
        finally:
            asked.num_waiting -= 1

    def conversation(self, index: int) -> list[Message]:
        """All messages up to and including an answer, without the instructions of its request. Raises BadRequest."""
        if index not in self._said:
            raise BadRequest(f"there is no answer {index} in this sample", status=404, code="not_found")
        anchor, messages = self._said[index]
        while anchor is not None:
            anchor, before = self._said[anchor.index]
            messages = [*before, *messages]
        return list(messages)

    def num_tokens(self, request: AgentRequest) -> int:
        """Number of tokens of a request's prompt. Raises BadRequest."""
        with _refusing():
            return len(self._prompt(request).transcript)

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._tools.tokens.max_context

    def fail(self, error: BaseException) -> None:
        """End the sample with this error; the first one counts."""
        if not self.broken.done():
            self.broken.set_exception(error)

    def report(self, body: Any) -> None:
        """Store the reward that an agent reports; the last one counts. Raises BadRequest."""
        if self.is_over:
            raise BadRequest("the sample has ended", status=409, code="sample_ended")
        value = body.get("reward") if isinstance(body, Mapping) else None
        components = body.get("components", {}) if isinstance(body, Mapping) else {}
        if not _is_number(value):
            raise BadRequest('reward must be a finite number, as in {"reward": 1.0}', param="reward")
        if not isinstance(components, Mapping) or not all(map(_is_number, components.values())):
            raise BadRequest("components must be an object of finite numbers", param="components")
        if len(components) > MAX_COMPONENTS:
            raise BadRequest(f"components may have at most {MAX_COMPONENTS} entries", param="components")
        self.reward = float(value), {str(name): float(part) for name, part in components.items()}  # type: ignore[arg-type]

    def submit_answer(self, body: Any) -> None:
        """Store the text that scorers should judge; the last one counts. Raises BadRequest."""
        if self.is_over:
            raise BadRequest("the sample has ended", status=409, code="sample_ended")
        answer = body.get("answer") if isinstance(body, Mapping) else None
        if not isinstance(answer, str) or len(answer) > MAX_ANSWER_CHARS:
            what = f'answer must be a text of at most {MAX_ANSWER_CHARS} characters, as in {{"answer": "7"}}'
            raise BadRequest(what, param="answer")
        self.handed_in = answer

    @property
    def judged(self) -> str:
        """Text that scorers judge: the submitted text, else the content of the newest answer."""
        return self.last_content if self.handed_in is None else self.handed_in

    async def close(self) -> None:
        """Cancel all running answers."""
        self.is_over = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self.broken.done() and not self.broken.cancelled():
            self.broken.exception()  # marks it as retrieved: the workflow may have ended before

    def knows(self, name: RequestName) -> bool:
        """Whether a request repeats an earlier one. A key that named another request may be that of another client."""
        if name.key:
            return any((one.name.key, one.name.digest) == (name.key, name.digest) for one in self._asked)
        return self._known(name) is not None

    def _known(self, name: RequestName) -> _PendingRequest | None:
        """The request that this one repeats. Raises BadRequest for a key that named another request."""
        if name.key:
            known = next((one for one in self._asked if one.name.key == name.key), None)
            if known is not None and known.name.digest != name.digest:
                raise BadRequest("this idempotency key was used for another request", code="idempotency_key_reused")
            return known
        equal = [one for one in self._asked if one.name.digest == name.digest] if name.is_retry else []
        # Among equal requests, a client repeats the one without an answer; the others have other clients.
        given_up = [one for one in equal if not one.num_waiting and not one.is_delivered]
        return next(iter([*given_up, *reversed(equal)]), None)

    def _ended(self, answer: asyncio.Task[Reply]) -> None:
        self._running.discard(answer)
        self.own_time.release()
        if not answer.cancelled():
            answer.exception()  # the client may have disconnected; an unread error is not an error of the worker

    async def _answer(self, request: AgentRequest) -> Reply:
        async with self._one_at_a_time:  # a sample has one slot in the engine
            if self.is_over or self.broken.done():  # while it waited
                raise BadRequest("the sample was interrupted", status=503, code="sample_cut")
            try:
                with _refusing():
                    return await self._sample(request)
            except (BadRequest, asyncio.CancelledError):
                raise
            except BaseException as error:
                self.fail(error)
                raise BadRequest("the sample was interrupted", status=503, code="sample_cut") from error

    async def _sample(self, request: AgentRequest) -> Reply:
        if request.tools and self._no_tools:
            raise BadRequest(self._no_tools, param="tools")
        prompt = self._prompt(request)
        before_T = prompt.transcript.tokens_T
        room = self._tools.tokens.max_context
        if len(before_T) >= room:
            raise PromptTooLong(f"the messages have {len(before_T)} tokens, but the context has only {room}")
        answer = await self._tools.generate(prompt.transcript, max_new_tokens=request.max_tokens)
        if not len(answer.segment):
            raise PromptTooLong(f"the messages have {len(before_T)} tokens and fill the context")
        schemas = schemas_by_name(request.tools)
        chat = self._chat if request.reads_calls else replace(self._chat, read=_as_text)
        parsed = read_answer(self._tools.tokens, chat, before_T, answer, schemas)
        index = next(self._numbers)
        message = self._message(parsed, schemas, index)
        self.store.record(
            prompt, answer, message, stop=self._stop(answer), closing=self._chat.closing(parsed), index=index
        )
        new = request.messages[max(prompt.covered, request.num_instructions) :]
        self._said[index] = prompt.anchor, [*new, {**message, TURN: index}]
        self.last_content = parsed.content
        cut = answer.ended_by in ("length", "context")
        num_texts = len(answer.segment) if request.wants_logprobs else 0
        return Reply(
            index=index,
            created=int(time.time()),
            message=message,
            finish_reason="length" if cut else "tool_calls" if message.get("tool_calls") else "stop",
            num_prompt=len(before_T),
            prompt_ids=before_T.tolist() if request.wants_token_ids else [],
            tokens_R=answer.segment.tokens_R,
            logprobs_R=answer.segment.logprobs_R,
            token_texts=[self._text(answer, place) for place in range(num_texts)],
        )

    def _prompt(self, request: AgentRequest) -> Prompt:
        if request.token_ids is not None:
            return self.store.prompt_of_tokens(request.token_ids)
        return self.store.prompt(request.messages, request.tools)

    def _message(self, parsed: ParsedAnswer, schemas: Schemas, index: int) -> Message:
        """The answer for the client. Tool calls that cannot be parsed, and calls of tools that were not offered, stay
        text that the agent sees, because few programs expect them as calls."""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        calls = [_checked(call, schemas) for call in parsed.calls]
        good = [call for call in calls if not call.fault]
        bad = [call for call in calls if call.fault]
        self.counts["agent_tool_calls"] += len(good)
        self.counts["agent_malformed_calls"] += len(bad)
        if bad:
            shown = "\n".join(f"{call.arguments}\n[{call.fault}]" for call in bad)
            message["content"] = f"{parsed.content}\n{shown}".strip()
        if good:
            message["tool_calls"] = [_call_message(call, index, place) for place, call in enumerate(good)]
        return message

    def _stop(self, answer: Answer) -> str:
        return self._text(answer, -1) if answer.stop_token is not None else ""

    def _text(self, answer: Answer, place: int) -> str:
        return self._tools.tokens.decode(answer.segment.tokens_R[[place]], with_special_tokens=True)


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse a request whose messages cannot be used."""
    try:
        yield
    except PromptTooLong as error:
        raise BadRequest(str(error), param="messages", code="context_length_exceeded") from error
    except UserError as error:
        raise BadRequest(str(error), code="unusable_messages") from error


def _checked(call: ToolCall, schemas: Schemas) -> ToolCall:
    """The call, with its `fault` if it does not fit the tools that the agent offered."""
    if call.fault:
        return call
    if _depth(json.loads(call.arguments)) > MAX_DEPTH:
        return replace(call, fault="the arguments are nested too deeply")
    if call.name in schemas:
        return call
    written = f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'
    known = ", ".join(schemas)
    return replace(call, arguments=written, fault=f"there is no tool {call.name}; there are: {known}")


def _call_message(call: ToolCall, index: int, place: int) -> dict[str, Any]:
    """A call in the message of answer `index`."""
    name = f"c{index % 10**6:06d}{place % 100:02d}"  # nine characters, as Mistral's templates require
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _depth(value: Any) -> int:
    """Nesting depth of lists and objects, which the parser of tool calls bounds."""
    depth, level = 0, [value]
    while level:
        lists = [one for one in level if isinstance(one, (list, dict))]
        level = [part for one in lists for part in (one.values() if isinstance(one, dict) else one)]
        depth += bool(lists)
    return depth


def _as_text(text: str, _: Schemas) -> Read:
    return Read(text.strip())


def _is_number(value: Any) -> bool:
    """Whether a value is a number within the range of a float; JSON allows larger integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
