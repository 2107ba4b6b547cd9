"""The newest answers that a later request may name by `previous_response_id`, each with its conversation."""

from __future__ import annotations

from collections import OrderedDict

from rollout.agent.dialect import AgentRequest, BadRequest
from rollout.agent.store import Message

MAX_KEPT = 1000
"""Number of newest answers that a later request may name; the conversation of each is kept."""
MAX_KEPT_CHARS = 100_000_000
"""Characters of all these conversations together."""


class KeptConversations:
    """Conversations by index of their newest answer."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[list[Message], int]] = OrderedDict()
        """Conversation and its number of characters."""

    def keep(self, index: int, request: AgentRequest, message: Message) -> None:
        """Keep the conversation that ends with this answer, if the request is of the API `responses` and asks to store
        it."""
        if "input" not in request.settings or request.settings.get("store") is False:
            return
        messages = [*request.messages[request.num_instructions :], message]
        self._kept[index] = messages, sum(len(str(one)) for one in messages)
        while len(self._kept) > MAX_KEPT or sum(size for _, size in self._kept.values()) > MAX_KEPT_CHARS:
            self._kept.popitem(last=False)

    def conversation(self, index: int) -> list[Message]:
        """All messages up to and including an answer. Raises BadRequest if the answer is unknown or no longer kept."""
        if index not in self._kept:
            what = f"there is no response resp_{index}, or it is no longer stored; send the whole conversation"
            raise BadRequest(what, status=404, code="not_found")
        self._kept.move_to_end(index)
        return list(self._kept[index][0])
