"""Conversations of clients outside the run (workflow `traffic`): which sample each belongs to, and its reward.

HTTP is in listener.py, answers are in session.py, the samples' tasks in traffic.py.

A conversation that begins while a sample waits for one belongs to that sample: the one of the oldest group, whose
deadline comes first. Without such a sample its requests are answered too, but not recorded; it stays unrecorded. A
conversation is over with its final reward, `reward_timeout_s` after its last request or answer, or when its sample is
cancelled. What is remembered of such conversations is in past_conversations.py.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from rollout.agent.dialect import AgentRequest, BadRequest, Reply
from rollout.agent.kept_conversations import KeptConversations
from rollout.agent.past_conversations import (
    CUT,
    ENDED,
    HAD_ANSWERS,
    NO_SAMPLE,
    TOO_LATE,
    Past,
    PastConversations,
    has_answers,
)
from rollout.agent.session import AgentSession, RequestName
from rollout.agent.store import TURN, Message, Thinking, chains_of
from rollout.agent.streaming import BEGINS_HEADER, OnConversation, OnPart
from rollout.chat.formats import ChatFormat
from rollout.workflow import PolicyAccess, SampleTools

MAX_ID_CHARS = 128
WAITING_PER_SLOT = 8
"""Number of requests that may wait for each slot of the engine, in addition to those of recorded conversations."""
HAD_ANSWERS_WARNING = (
    "a conversation is not recorded, because its first request to this worker already had answers in it; a client "
    f"whose conversations begin so must send the header {BEGINS_HEADER}: true with the first request (conversations "
    "that began before a restart of the worker are not recorded either; this is reported once)"
)

log = logging.getLogger(__name__)


class Conversation:
    """A recorded conversation, with the sample that it belongs to. Times in seconds of the event loop's clock."""

    def __init__(self, name: str, session: AgentSession, reward_timeout_s: float) -> None:
        self.name, self.session, self._reward_timeout_s = name, session, reward_timeout_s
        self.num_running = 0
        """Number of requests that are being answered; the deadline waits for them."""
        self.is_final = False
        """No further request is recorded, and no further reward accepted."""
        self.is_ended = False
        """Its client has ended it; otherwise its deadline does."""
        self.is_cut = False
        """Its sample was cancelled."""
        self._moved_s = 0.0
        self._changed = asyncio.Event()
        self.touch()

    def touch(self) -> None:
        """Record activity of the client, from which the deadline counts."""
        self._moved_s = asyncio.get_running_loop().time()
        self._changed.set()

    @property
    def left_s(self) -> float:
        """Seconds until its deadline, if nothing happens."""
        return self._moved_s + self._reward_timeout_s - asyncio.get_running_loop().time()

    def end(self) -> None:
        """Record the client's final word."""
        self.is_final = self.is_ended = True
        self._changed.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the deadline while a request is answered."""
        self.num_running += 1
        self.touch()
        try:
            yield
        finally:
            self.num_running -= 1
            self.touch()

    async def over(self) -> None:
        """Wait for its final reward or its deadline. Raises the error that ended the sample."""
        while self.num_running or not (self.is_final or self.left_s <= 0):
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            left_s = None if self.num_running else max(0.0, self.left_s)
            try:
                waited: set[asyncio.Future[Any]] = {changed, self.session.broken}
                await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if self.session.broken.done():
                self.session.broken.result()
        self.is_final = True


class Slot:
    """A sample that waits for a conversation, or has one."""

    def __init__(self, order: tuple[int, int], tools: SampleTools) -> None:
        self.order, self.tools = order, tools
        self.conversation: Conversation | None = None
        self.taken = asyncio.Event()
        """Set while it has a conversation."""
        self.is_over = False
        """Its conversation is over, and its sample is complete."""

    def __lt__(self, other: Slot) -> bool:
        return self.order < other.order


class Conversations:
    """All conversations of one worker; see `listener.Answers`. Used on one event loop.

    `policy`: answers requests that are not recorded. `key`: API key of the clients; empty: none. `no_tools`,
    `thinking`: as in `AgentSession`.
    """

    def __init__(
        self, policy: PolicyAccess, chat: ChatFormat, *, key: str, no_tools: str, thinking: Thinking,
        reward_timeout_s: float,
    ) -> None:  # fmt: skip
        self.secret = key
        self.counts: Counter[str] = Counter()
        self._policy, self._chat, self._no_tools, self._thinking = policy, chat, no_tools, thinking
        self._reward_timeout_s = reward_timeout_s
        self._numbers = itertools.count()
        self._free: list[Slot] = []
        self._open: dict[str, Conversation] = {}
        self._past = PastConversations()
        self._has_warned = False
        self._kept = KeptConversations()
        self._num_running = 0

    # ------------------------------------------------------------ samples

    @asynccontextmanager
    async def slot(self, order: tuple[int, int], tools: SampleTools) -> AsyncIterator[Slot]:
        """A sample that waits for a conversation until the block ends. `order`: of samples that wait, the lowest gets
        the next conversation."""
        slot = Slot(order, tools)
        heapq.heappush(self._free, slot)
        try:
            yield slot
        finally:
            if slot in self._free:
                self._free.remove(slot)
                heapq.heapify(self._free)
            if (conversation := slot.conversation) is not None:
                if not slot.is_over:  # the client may have sent its final reward while another request is answered
                    conversation.is_cut = True
                    self.counts["traffic_dropped"] += 1
                self._leave(conversation, CUT)
                await conversation.session.close()

    async def taken(self, slot: Slot) -> Conversation:
        """Wait until a conversation of the sample is over that has an answer. Raises the error that ended the
        sample."""
        while True:
            await slot.taken.wait()
            conversation = slot.conversation
            assert conversation is not None
            await conversation.over()
            if conversation.session.store.turns:
                self._ended(conversation)
                slot.is_over = True
                return conversation
            # All its requests were refused, or its client has disconnected: the sample waits for another one.
            await conversation.session.close()
            self._open.pop(conversation.name, None)
            slot.conversation = None
            slot.taken.clear()
            heapq.heappush(self._free, slot)

    def _ended(self, conversation: Conversation) -> None:
        session = conversation.session
        is_missing = session.reward is None
        self.counts["traffic_missing_rewards"] += is_missing
        self._leave(conversation, TOO_LATE)

    def _leave(self, conversation: Conversation, past: Past) -> None:
        if self._open.pop(conversation.name, None) is not None:
            self._past.add(conversation.name, past)
        self._past.add_answers(conversation.name, [turn.chain for turn in conversation.session.store.turns])

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def answering(
        self, request: AgentRequest, name: RequestName, on_part: OnPart | None = None,
        on_conversation: OnConversation | None = None,
    ) -> AsyncIterator[Reply]:  # fmt: skip
        """Generate the answer to a request. `on_part` is not called (see `AgentSession.answering`). Raises
        BadRequest."""
        self.counts["traffic_requests"] += 1
        if self._num_running >= self._policy.num_slots * (1 + WAITING_PER_SLOT) + len(self._open):
            raise BadRequest(f"{self._num_running} requests are waiting: try again later", status=429, code="busy")
        self._num_running += 1
        try:
            async with AsyncExitStack() as stack:
                known, conversation = self._conversation(request, name)
                if on_conversation is not None:
                    on_conversation(known)
                reply = None
                if conversation is not None:
                    reply = await self._recorded(stack, conversation, request, name)
                is_recorded = reply is not None
                if reply is None:
                    reply = await stack.enter_async_context(self._unrecorded(request, name))
                    self._past.add_reply(known, request, reply.message)
                self.counts["traffic_recorded" if is_recorded else "traffic_not_recorded"] += 1
                self._kept.keep(reply.index, request, {**reply.message, TURN: reply.index})
                yield replace(reply, conversation=known)
        finally:
            self._num_running -= 1

    async def _recorded(
        self, stack: AsyncExitStack, conversation: Conversation, request: AgentRequest, name: RequestName
    ) -> Reply | None:
        """The answer within a conversation; None if its sample was cancelled meanwhile. Raises BadRequest."""
        stack.enter_context(conversation.running())
        try:
            return await stack.enter_async_context(conversation.session.answering(request, name))
        except BadRequest:
            if conversation.is_cut:
                return None
            if not conversation.session.store.turns and conversation.num_running == 1:
                conversation.end()  # it has not begun
            raise
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if conversation.is_cut and (current is None or not current.cancelling()):
                return None
            raise

    @asynccontextmanager
    async def _unrecorded(self, request: AgentRequest, name: RequestName) -> AsyncIterator[Reply]:
        session = self._passing_session()
        try:
            async with session.answering(request, name) as reply:
                yield reply
        finally:
            await session.close()

    def _passing_session(self) -> AgentSession:
        return AgentSession(
            self._policy, self._chat, no_tools=self._no_tools, gives_reasoning=True, numbers=self._numbers
        )

    def _conversation(self, request: AgentRequest, name: RequestName) -> tuple[str, Conversation | None]:
        """Id of the request's conversation, and the conversation if the request is recorded. Raises BadRequest."""
        is_valid = name.conversation.isascii() and name.conversation.isprintable()
        if len(name.conversation) > MAX_ID_CHARS or not is_valid:
            raise BadRequest(f"the id of a conversation must have at most {MAX_ID_CHARS} printable ASCII characters")
        found = self._open.get(name.conversation) if name.conversation else self._continued(request, name)
        if found is not None:
            return found.name, None if found.is_final else found
        known = name.conversation
        if not known and not name.begins:
            known = self._past.continued(request)
        known = known or secrets.token_urlsafe(12)
        if self._past.why(known) is not None:
            return known, None
        if has_answers(request) and not name.begins:
            self._past.add(known, HAD_ANSWERS)
            self._warn_of_answers()
            return known, None
        if not self._free:
            self._past.add(known, NO_SAMPLE)
            return known, None
        slot = heapq.heappop(self._free)
        session = AgentSession(
            slot.tools, self._chat, no_tools=self._no_tools, thinking=self._thinking, numbers=self._numbers
        )
        slot.conversation = self._open[known] = Conversation(known, session, self._reward_timeout_s)
        slot.taken.set()
        self.counts["traffic_conversations"] += 1
        return known, slot.conversation

    def _warn_of_answers(self) -> None:
        """Warn once that a conversation is not recorded because of HAD_ANSWERS, since the run waits meanwhile."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(HAD_ANSWERS_WARNING)
            self._policy.report(HAD_ANSWERS_WARNING)

    def _continued(self, request: AgentRequest, name: RequestName) -> Conversation | None:
        """The conversation that a request without an id repeats, or continues unless it begins one: by the deepest
        answer in it, of equal ones the newest."""
        newest_first = list(reversed(self._open.values()))
        if name.key or name.is_retry:
            for one in newest_first:
                if one.session.knows(name):
                    return one
        if name.begins:
            return None
        if request.token_ids is not None:
            depths = [(one.session.store.begins(request.token_ids), 0) for one in newest_first]
        elif has_answers(request):
            chains = chains_of(request.messages, request.tools)
            depths = [one.session.store.continued(request.messages, chains) for one in newest_first]
        else:
            return None
        best = max(range(len(depths)), key=lambda place: depths[place], default=None)
        return newest_first[best] if best is not None and depths[best][0] else None

    def conversation(self, index: int) -> list[Message]:
        """All messages up to and including an answer. Raises BadRequest if the answer is unknown or no longer kept."""
        return self._kept.conversation(index)

    def num_tokens(self, request: AgentRequest) -> int:
        """Number of tokens of a request's prompt. Raises BadRequest."""
        return self._passing_session().num_tokens(request)

    @property
    def max_context(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self._policy.tokens.max_context

    def fail(self, error: BaseException) -> None:
        """Log a request that could not be handled; the others continue."""
        log.error("a request failed", exc_info=error)

    # ------------------------------------------------------------ rewards

    def reward(self, body: Mapping[str, Any], named: str = "") -> dict[str, Any]:
        """Take the reward of a conversation.

        Args:
            body: `conversation_id`; `reward`, a number, or null if there will be none; `final` (default true): the
                conversation is over. Of several rewards that are not final the last counts. named: the id, if the
                client sent it in a header.

        Returns:
            The reply to the client: the id, and the seconds in which the conversation takes another reward.

        Raises:
            BadRequest: the conversation is unknown or over, or the reward is not a number.
        """
        name, is_final = body.get("conversation_id", named), body.get("final", True)
        if not isinstance(name, str) or not name:
            what = 'conversation_id is missing: send {"conversation_id": "...", "reward": 1.0}'
            raise BadRequest(what, param="conversation_id")
        if not isinstance(is_final, bool):
            raise BadRequest("final must be true or false", param="final")
        conversation = self._open.get(name)
        if conversation is None or conversation.is_final:
            raise self._no_conversation(name, conversation is not None)
        if not conversation.session.store.turns:
            raise BadRequest(f"conversation {name} has no answer yet", status=409, code="no_answer")
        if "reward" in body and body["reward"] is None:
            conversation.session.reward = None
        else:
            conversation.session.report(body)
            self.counts["traffic_rewards"] += 1
        if is_final:
            conversation.end()
            self._leave(conversation, ENDED)
        left_s = 0.0 if is_final else max(0.0, conversation.left_s)
        return {"conversation_id": name, "is_final": is_final, "deadline_s": round(left_s, 1)}

    def _no_conversation(self, name: str, is_ending: bool) -> BadRequest:
        past = ENDED if is_ending else self._past.why(name)
        if past is None:
            self.counts["traffic_unknown_rewards"] += 1
            what = (
                f"there is no conversation {name}: its id is wrong, or the worker that had it was restarted, and it is"
                " not trained on"
            )
            return BadRequest(what, status=404, code="unknown_conversation", param="conversation_id")
        self.counts[past.counter] += 1
        what = f"the reward for conversation {name} is not used: {past.words}"
        return BadRequest(what, status=409, code=past.code, param="conversation_id")
