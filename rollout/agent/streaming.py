"""A streamed answer to a client: sends comments before the answer, events as it grows, and its end or error.

The format of events is in the dialects; rollout/answers.py decides which part of an answer is final.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from rollout.agent.dialect import BadRequest, EventStream, Opening, Reply, TextKind

CONVERSATION_HEADER = "X-Areal-Like-Conversation"
"""Header of requests and answers with the id of their conversation, where clients report rewards for conversations."""
BEGINS_HEADER = "X-Areal-Like-Conversation-Begins"
"""Header of requests: `true` says that the request begins a conversation, although it has answers in it."""

COMMENT_S = 10.0
"""Longest time in which nothing of a streamed answer is sent. A request that is refused in this time gets the status of
its error; one that is refused later an event. Clients wait longer: Node's `fetch` 300 s for the headers, and 300 s for
more of the body."""
COMMENT = ": waiting for the answer\n\n"
"""A line without a field, which clients ignore: https://html.spec.whatwg.org/multipage/server-sent-events.html"""


@dataclass(frozen=True, slots=True)
class Part:
    """A partial answer: its texts so far, as far as they are final."""

    opening: Opening
    reasoning: str
    content: str


OnPart = Callable[[Part], Awaitable[None]]
OnConversation = Callable[[str], None]
"""Called with the id of a request's conversation, before its answer begins."""


class StreamedResponse:
    """Sends an answer's events. The response begins with the first of them, or with the first comment."""

    def __init__(self, request: web.Request, stream: EventStream) -> None:
        self._request, self._stream = request, stream
        self._sent: dict[TextKind, str] = {"reasoning": "", "content": ""}
        self.response: web.StreamResponse | None = None
        """The response; None: nothing has been sent, and the request may still be refused."""
        self._has_begun = self._is_over = False
        self._conversation = ""
        self._sending = asyncio.Lock()
        """Held while bytes are written, so that a comment never comes between those of an event."""
        self._sent_s = asyncio.get_running_loop().time()

    def belongs_to(self, conversation: str) -> None:
        """Store the id of the conversation, which the header of the response contains."""
        self._conversation = conversation

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Send a comment in each COMMENT_S seconds of the block in which nothing else is sent. Clients ignore comments,
        but some give up a response that does not begin or go on."""
        comments = asyncio.create_task(self._comments())
        try:
            yield
        finally:
            try:
                async with self._sending:  # so that no comment is cut off
                    comments.cancel()
            finally:
                comments.cancel()

    async def part(self, part: Part) -> None:
        """Send the new text. A client that has disconnected is detected elsewhere."""
        with contextlib.suppress(ConnectionError):
            async with self._sending:
                await self._begin(part.opening)
                await self._send(self._new("reasoning", part.reasoning))
                await self._send(self._new("content", part.content))

    async def end(self, reply: Reply) -> None:
        """Send the rest. Raises ConnectionError if the client has disconnected."""
        async with self._sending:
            await self._begin(Opening.of(reply))
            await self._send(self._new("reasoning", reply.message.get("reasoning_content") or ""))
            content = reply.message["content"]
            if not content.startswith(self._sent["content"]):
                self._sent["content"] = ""  # the text sent so far was reasoning: all that follows is content
            await self._send(self._new("content", content))
            await self._close(self._stream.end(reply))

    async def fail(self, refusal: BadRequest) -> None:
        """Send the error. Raises ConnectionError if the client has disconnected."""
        async with self._sending:
            await self._close(self._stream.fail(refusal))

    async def _comments(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # a client that has disconnected is detected elsewhere
            while not self._is_over:
                await asyncio.sleep(self._sent_s + COMMENT_S - loop.time())
                async with self._sending:
                    if not self._is_over and loop.time() - self._sent_s >= COMMENT_S:
                        await self._start(self._conversation)
                        await self._send([COMMENT])

    def _new(self, kind: TextKind, text: str) -> Iterable[str]:
        sent = self._sent[kind]
        is_over = kind == "reasoning" and self._sent["content"]
        if is_over or not text.startswith(sent) or len(text) == len(sent):
            return ()
        self._sent[kind] = text
        return self._stream.text(kind, text[len(sent) :])

    async def _begin(self, opening: Opening) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._start(opening.conversation)
            await self._send(self._stream.begin(opening))

    async def _start(self, conversation: str) -> None:
        if self.response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            headers |= {CONVERSATION_HEADER: conversation} if conversation else {}
            response = web.StreamResponse(headers=headers)
            await response.prepare(self._request)
            self.response = response

    async def _send(self, events: Iterable[str]) -> None:
        assert self.response is not None
        if text := "".join(events):
            await self.response.write(text.encode(errors="replace"))
            self._sent_s = asyncio.get_running_loop().time()

    async def _close(self, events: Iterable[str]) -> None:
        self._is_over = True
        await self._send(events)
        assert self.response is not None
        await self.response.write_eof()
