"""Conversations of clients that are over or not recorded (workflow `traffic`): why they take no rewards, and which
requests without an id continue them.

What is remembered is bounded (MAX_REMEMBERED).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from rollout.agent.dialect import AgentRequest
from rollout.agent.store import Message, chains_of
from rollout.agent.streaming import BEGINS_HEADER

MAX_REMEMBERED = 10_000
"""Number of newest conversations whose ids are known, and of their newest answers."""

Key = TypeVar("Key", str, bytes)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Past:
    """Why a conversation takes no more rewards: code and message for a reward that comes now, and what counts it."""

    code: str
    words: str
    counter: str


ENDED = Past("conversation_ended", "its client has ended it", "traffic_refused_rewards")
TOO_LATE = Past("reward_too_late", "its deadline for a reward (reward_timeout_s) has passed", "traffic_late_rewards")
CUT = Past("conversation_dropped", "the run has dropped its sample, which is not trained on", "traffic_refused_rewards")
NO_SAMPLE = Past(
    "not_recorded", "it is not recorded: no sample waited for a conversation when it began", "traffic_refused_rewards"
)
HAD_ANSWERS = Past(
    "not_recorded",
    "it is not recorded: its first request to this worker already had answers in it; if a conversation begins so, send "
    f"the header {BEGINS_HEADER}: true with that request",
    "traffic_refused_rewards",
)


class PastConversations:
    """Why each conversation takes no rewards, and the answers in it."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Past] = OrderedDict()
        self._by_chain: OrderedDict[bytes, str] = OrderedDict()
        """Ids, by the chain of an answer (`Turn.chain`)."""

    def why(self, name: str) -> Past | None:
        """Why this conversation takes no rewards; None if it is unknown."""
        return self._by_name.get(name)

    def add(self, name: str, past: Past) -> None:
        """Remember a conversation."""
        _put(self._by_name, name, past)

    def add_answers(self, name: str, chains: Iterable[bytes]) -> None:
        """Remember answers in a conversation, by their chains."""
        for chain in chains:
            _put(self._by_chain, chain, name)

    def add_reply(self, name: str, request: AgentRequest, message: Message) -> None:
        """Remember the answer to a request."""
        if request.token_ids is None:
            self.add_answers(name, chains_of([*request.messages, message], request.tools)[-1:])

    def continued(self, request: AgentRequest) -> str:
        """Id of the conversation with the deepest answer in a request; empty if there is none."""
        if not has_answers(request):
            return ""
        chains = chains_of(request.messages, request.tools)
        names = (self._by_chain.get(chain, "") for chain in reversed(chains))
        return next((name for name in names if name in self._by_name), "")


def has_answers(request: AgentRequest) -> bool:
    """Whether there are answers of the assistant in a request."""
    return any(message["role"] == "assistant" for message in request.messages)


def _put(kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)
