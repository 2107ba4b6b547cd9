"""What one agent asks of the policy while its sample lasts: one answer after the other, each once.

Owns: `AgentSession` (a request to an answer, retries, counts, the reward an agent reports). Refuses: HTTP
(listener.py), the agent's process (workflow.py), which tokens a request continues (store.py).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from rollout.agent.chat_completions import BadRequest, ChatRequest, Reply
from rollout.agent.store import Message, TokenStore
from rollout.answers import read_answer
from rollout.chat.calls import schemas_by_name
from rollout.chat.formats import ChatFormat, ParsedAnswer
from rollout.transcript import Answer
from rollout.workflow import SampleTools


class AgentSession:
    """The requests of one agent. Used on one event loop.

    `chat`: how the model writes answers. `row`: of data, which the agent may ask for. `no_tools`: why requests with
    tools are refused; empty: they are not.
    """

    def __init__(
        self, tools: SampleTools, chat: ChatFormat, *, row: Mapping[str, Any] | None = None, no_tools: str = ""
    ) -> None:
        self._tools, self._chat, self._no_tools = tools, chat, no_tools
        self.row = row or {}
        self.secret = secrets.token_urlsafe(24)
        """The agent's key; no other agent has it."""
        self.store = TokenStore(tools.tokens, stop_marks=chat.stop_marks, has_text_arguments=chat.has_text_arguments)
        self.last_content = ""
        """Of the newest answer, without reasoning and calls: what scorers judge."""
        self.reward: tuple[float, dict[str, float]] | None = None
        """Value and components that the agent reported."""
        self.counts: Counter[str] = Counter()
        self.is_over = False
        """The agent has ended: nothing more is answered."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds what ended the sample while an answer was sampled: its lease, or the engine."""
        self._one_at_a_time = asyncio.Lock()
        self._replies: dict[str, asyncio.Task[Reply]] = {}

    async def reply(self, request: ChatRequest, *, key: str, is_repeated: bool) -> Reply:
        """Answer a request.

        Args:
            request: what is asked.
            key: names the request: the client's idempotency key, or a digest of it.
            is_repeated: the client may have sent it before: then it gets the same answer. Otherwise an equal request
                is a new one, as an agent asks that wants several answers.

        Raises:
            BadRequest: the request cannot be answered; the agent may go on with another.
        """
        if self.is_over:
            raise BadRequest("the sample has ended", status=409, code="sample_ended")
        known = self._replies.get(key) if is_repeated else None
        if known is None:
            known = self._replies[key] = asyncio.create_task(self._answer(request))
            known.add_done_callback(_retrieve)
        else:
            self.counts["agent_retries"] += 1
        return await asyncio.shield(known)  # a client that goes away does not cut the answer: it will ask again

    def report(self, body: Any) -> None:
        """Take the reward that an agent reports; the last one counts. Raises BadRequest."""
        if self.is_over:
            raise BadRequest("the sample has ended", status=409, code="sample_ended")
        value = body.get("reward") if isinstance(body, Mapping) else None
        components = body.get("components", {}) if isinstance(body, Mapping) else {}
        if not _is_number(value):
            raise BadRequest('reward must be a finite number, as in {"reward": 1.0}', param="reward")
        if not isinstance(components, Mapping) or not all(map(_is_number, components.values())):
            raise BadRequest("components must be an object of finite numbers", param="components")
        self.reward = float(value), {str(name): float(part) for name, part in components.items()}  # type: ignore[arg-type]

    async def close(self) -> None:
        """End every answer under way."""
        self.is_over = True
        running = [task for task in self._replies.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self.broken.done() and not self.broken.cancelled():
            self.broken.exception()  # marks it as seen: the workflow may have ended before

    async def _answer(self, request: ChatRequest) -> Reply:
        async with self._one_at_a_time:  # a sample has one position in the engine
            try:
                return await self._sample(request)
            except UserError as error:
                raise BadRequest(str(error), code="unusable_messages") from error
            except (BadRequest, asyncio.CancelledError):
                raise
            except BaseException as error:
                if not self.broken.done():
                    self.broken.set_exception(error)
                raise BadRequest("the sample has been cut", status=503, code="sample_cut") from error

    async def _sample(self, request: ChatRequest) -> Reply:
        if request.tools and self._no_tools:
            raise BadRequest(self._no_tools, param="tools")
        prompt = self.store.prompt(request.messages, request.tools)
        before_T = prompt.transcript.tokens_T
        prompt_ids = before_T.tolist()
        if len(prompt_ids) >= self._tools.tokens.max_context:
            raise BadRequest(
                f"the messages have {len(prompt_ids)} tokens, and the context has {self._tools.tokens.max_context}",
                param="messages",
                code="context_length_exceeded",
            )
        answer = await self._tools.generate(prompt.transcript, max_new_tokens=request.max_tokens)
        schemas = schemas_by_name(request.tools)
        parsed = read_answer(self._tools.tokens, self._chat, before_T, answer, schemas)
        message = self._message(parsed)
        turn = self.store.record(prompt, answer, message, stop=self._stop(answer), closing=self._chat.closing(parsed))
        self.last_content = parsed.content
        cut = answer.ended_by in ("length", "context")
        return Reply(
            index=turn.index,
            created=int(time.time()),
            message=message,
            finish_reason="length" if cut else "tool_calls" if message.get("tool_calls") else "stop",
            prompt_ids=prompt_ids,
            token_ids=answer.segment.tokens_R.tolist(),
            token_texts=[self._text(answer, place) for place in range(len(answer.segment))],
            logprobs=answer.segment.logprobs_R.tolist(),
        )

    def _message(self, parsed: ParsedAnswer) -> Message:
        """The answer for the client. Calls that cannot be read stay text, for the agent to see."""
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        good = [call for call in parsed.calls if not call.fault]
        bad = [call for call in parsed.calls if call.fault]
        self.counts["agent_tool_calls"] += len(good)
        self.counts["agent_malformed_calls"] += len(bad)
        if bad:
            shown = "\n".join(f"{call.arguments}\n[{call.fault}]" for call in bad)
            message["content"] = f"{parsed.content}\n{shown}".strip()
        if good:
            message["tool_calls"] = [self._call(call, place) for place, call in enumerate(good)]
        return message

    def _call(self, call: ToolCall, place: int) -> dict[str, Any]:
        # Nine characters, which is what Mistral's templates insist on; unique in the session.
        name = f"c{len(self.store.turns) % 10**6:06d}{place % 100:02d}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _stop(self, answer: Answer) -> str:
        return self._text(answer, -1) if answer.stop_token is not None else ""

    def _text(self, answer: Answer, place: int) -> str:
        return self._tools.tokens.decode(answer.segment.tokens_R[[place]], with_special_tokens=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _retrieve(task: asyncio.Task[Reply]) -> None:
    """The client may have gone away: an error that nobody reads is no error of the worker."""
    if not task.cancelled():
        task.exception()
