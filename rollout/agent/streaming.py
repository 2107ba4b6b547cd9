"""A streamed answer to a client: sends events as the answer grows, and its end or error.

The format of events is in the dialects; rollout/answers.py decides which part of an answer is final.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

from rollout.agent.dialect import BadRequest, EventStream, Opening, Reply, TextKind

CONVERSATION_HEADER = "X-Areal-Like-Conversation"
"""Header of requests and answers with the id of their conversation, where clients report rewards for conversations."""
BEGINS_HEADER = "X-Areal-Like-Conversation-Begins"
"""Header of requests: `true` says that the request begins a conversation, although it has answers in it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A partial answer: its texts so far, as far as they are final."""

    opening: Opening
    reasoning: str
    content: str


OnPart = Callable[[Part], Awaitable[None]]


class StreamedResponse:
    """Sends an answer's events; the response begins with the first of them."""

    def __init__(self, request: web.Request, stream: EventStream) -> None:
        self._request, self._stream = request, stream
        self._sent: dict[TextKind, str] = {"reasoning": "", "content": ""}
        self.response: web.StreamResponse | None = None
        """The response; None: nothing has been sent, and the request may still be refused."""

    async def part(self, part: Part) -> None:
        """Send the new text. A client that has disconnected is detected elsewhere."""
        with contextlib.suppress(ConnectionError):
            await self._begin(part.opening)
            await self._send(self._new("reasoning", part.reasoning))
            await self._send(self._new("content", part.content))

    async def end(self, reply: Reply) -> None:
        """Send the rest. Raises ConnectionError if the client has disconnected."""
        await self._begin(Opening.of(reply))
        await self._send(self._new("reasoning", reply.message.get("reasoning_content") or ""))
        content = reply.message["content"]
        if not content.startswith(self._sent["content"]):
            self._sent["content"] = ""  # the text sent so far was reasoning: all that follows is content
        await self._send(self._new("content", content))
        await self._close(self._stream.end(reply))

    async def fail(self, refusal: BadRequest) -> None:
        """Send the error. Raises ConnectionError if the client has disconnected."""
        await self._close(self._stream.fail(refusal))

    def _new(self, kind: TextKind, text: str) -> Iterable[str]:
        sent = self._sent[kind]
        is_over = kind == "reasoning" and self._sent["content"]
        if is_over or not text.startswith(sent) or len(text) == len(sent):
            return ()
        self._sent[kind] = text
        return self._stream.text(kind, text[len(sent) :])

    async def _begin(self, opening: Opening) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            headers |= {CONVERSATION_HEADER: opening.conversation} if opening.conversation else {}
            self.response = web.StreamResponse(headers=headers)
            await self.response.prepare(self._request)
            await self._send(self._stream.begin(opening))

    async def _send(self, events: Iterable[str]) -> None:
        assert self.response is not None
        if text := "".join(events):
            await self.response.write(text.encode(errors="replace"))

    async def _close(self, events: Iterable[str]) -> None:
        await self._send(events)
        assert self.response is not None
        await self.response.write_eof()
