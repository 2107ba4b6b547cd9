"""What is remembered of conversations that are over or not recorded."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.agent import past_conversations
from rollout.agent.dialect import AgentRequest
from rollout.agent.past_conversations import ENDED, NO_SAMPLE, PastConversations

ASKED = {"role": "user", "content": "3 and 4?"}
SAID = {"role": "assistant", "content": "7"}
MORE = {"role": "user", "content": "and 5?"}


def request(*messages: Any, token_ids: list[int] | None = None) -> AgentRequest:
    return AgentRequest(
        model="m", messages=list(messages), tools=[], reads_calls=False, max_tokens=None, is_streamed=False,
        token_ids=token_ids,
    )  # fmt: skip


def test_a_request_continues_the_conversation_of_its_deepest_answer() -> None:
    past = PastConversations()
    for name, messages in (("a", (ASKED,)), ("b", (ASKED, SAID, MORE))):
        past.add(name, NO_SAMPLE)
        past.add_reply(name, request(*messages), SAID)
    assert past.continued(request(ASKED)) == ""
    assert past.continued(request(ASKED, SAID, ASKED)) == "a"
    assert past.continued(request(ASKED, {**SAID, "content": " 7\n"}, MORE, SAID, MORE)) == "b"
    assert past.continued(request(MORE, SAID, MORE)) == ""


def test_a_request_of_token_ids_is_not_remembered() -> None:
    past = PastConversations()
    past.add("a", NO_SAMPLE)
    past.add_reply("a", request(token_ids=[1]), SAID)
    assert past.continued(request(SAID, MORE)) == ""


def test_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_conversations, "MAX_REMEMBERED", 2)
    past = PastConversations()
    for name in ("a", "b", "a", "c"):
        past.add(name, ENDED)
    assert [past.why(name) for name in "abc"] == [ENDED, None, ENDED]
    for name in "bca":
        past.add_reply(name, request({**ASKED, "content": name}), SAID)
    known = [past.continued(request({**ASKED, "content": name}, SAID, MORE)) for name in "bca"]
    assert known == ["", "c", "a"]
