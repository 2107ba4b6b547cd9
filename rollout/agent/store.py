"""The answers an agent has received, as a tree: which of them a request continues, and the exact tokens it continues.

Owns: `TokenStore`, what of a message survives a client (`message_key`), how messages are written for the chat template.
Refuses: HTTP, generating, reading answers (rollout/chat).

An agent sends its whole conversation with every request. The deepest answer in it that was sampled here is found by the
messages up to it; the request continues from the tokens of that answer as they were sampled, and only what the
template writes after it is tokenised. Nothing that was sampled is ever tokenised again, so log-probs and masks hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import FinishReason, Trajectory
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

Message = dict[str, Any]
"""Role, content as text, and where they apply `tool_calls` with arguments as text, `tool_call_id` and
`reasoning_content`."""


@dataclass(slots=True)
class Turn:
    """One answer.

    index: from 0, in order of time. chain: digest of the tools and all messages up to the answer. call_ids: of its tool
    calls, as they were given to the client. transcript: all its tokens. stop: text of the token that ended it; empty
    where it was cut. closing: text that then ends it for the template. is_continued: another turn has its tokens.
    """

    index: int
    chain: bytes
    call_ids: frozenset[str]
    transcript: Transcript
    finish_reason: FinishReason
    stop: str
    closing: str
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks the policy to continue.

    transcript: the tokens. anchor: the turn they continue; None: a conversation of its own. chain: digest of the
    request's messages.
    """

    transcript: Transcript
    anchor: Turn | None
    chain: bytes


class TokenStore:
    """The turns of one agent.

    `stop_marks`: texts of the tokens with which the chat template may end an answer. `has_text_arguments`: the template
    wants the arguments of past calls as JSON text, not as an object.
    """

    def __init__(self, tokens: PromptTokens, *, stop_marks: Sequence[str], has_text_arguments: bool = False) -> None:
        self._tokens, self._stop_marks, self._has_text_arguments = tokens, tuple(stop_marks), has_text_arguments
        self._by_chain: dict[bytes, list[Turn]] = {}
        self.turns: list[Turn] = []
        self.num_rendered_again = 0
        """Requests that continue an answer which the template's text does not show, so that they began from their
        text."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The tokens that a request continues.

        Args:
            messages: the whole conversation, at least one message.
            tools: as the chat template takes them.

        Raises:
            UserError: the chat template refuses the messages, or the tokenizer a text.
        """
        chains = _chains(messages, tools)
        anchor, covered = self._deepest(messages, chains)
        if anchor is not None and covered < len(messages):
            given = self._after(anchor, messages, covered, tools)
            if given is not None:
                known = anchor.transcript
                transcript = known.forked() if anchor.is_continued else known.copied()
                transcript.given(given)
                return Prompt(transcript, anchor, chains[-1])
            self.num_rendered_again += 1
        first = self._tokens.prompt({"messages": self._for_template(messages)}, tools)
        return Prompt(Transcript(first, encode=self._tokens.encode), None, chains[-1])

    def record(self, prompt: Prompt, answer: Answer, reply: Message, *, stop: str, closing: str) -> Turn:
        """Take an answer of at least one token in, before the next `prompt`. `stop` and `closing` as of `Turn`."""
        prompt.transcript.sampled(answer)
        if prompt.anchor is not None:
            prompt.anchor.is_continued = True
        turn = Turn(
            index=len(self.turns), chain=_digest(prompt.chain, message_key(reply)), call_ids=_call_ids(reply),
            transcript=prompt.transcript, finish_reason=answer.finish_reason, stop=stop, closing=closing,
        )  # fmt: skip
        self.turns.append(turn)
        self._by_chain.setdefault(turn.chain, []).append(turn)
        return turn

    def trajectories(self) -> list[Trajectory]:
        """What is trained on: one trajectory for each answer that no other one continues, the last answer's first.

        Each sampled token is trained on in exactly one of them. Empty where there was no answer.
        """
        leaves = [turn for turn in self.turns if not turn.is_continued]
        return [turn.transcript.close(turn.finish_reason) for turn in reversed(leaves)]

    def _deepest(self, messages: Sequence[Message], chains: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The deepest turn that the messages continue, and how many of them it covers."""
        for place in reversed(range(len(messages))):
            if messages[place]["role"] == "assistant" and (found := self._by_chain.get(chains[place])):
                named = [turn for turn in found if turn.call_ids == _call_ids(messages[place])]
                return (named or found)[-1], place + 1
        return None, 0

    def _after(
        self, anchor: Turn, messages: Sequence[Message], covered: int, tools: Sequence[Mapping[str, Any]]
    ) -> np.ndarray | None:
        """Tokens between the anchor's last one and the next answer; None where the template's text does not show its
        end."""
        stops = [stop for stop in (anchor.stop, *self._stop_marks) if stop]
        try:
            tail = self._tokens.continuation(self._for_template(messages), covered, stops, tools)
        except UserError:
            return None
        given = self._tokens.encode(tail)
        return given if anchor.stop else np.concatenate([self._tokens.encode(anchor.closing), given])

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """As chat templates want them. Reasoning is left out: templates drop it at different places, and where an
        answer is continued its tokens hold it anyway."""
        return [self._one_for_template(message) for message in messages]

    def _one_for_template(self, message: Message) -> Message:
        made = {key: value for key, value in message.items() if key != "reasoning_content"}
        if made.get("tool_calls") and not self._has_text_arguments:
            made["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _as_object(call["function"]["arguments"])}}
                for call in made["tool_calls"]
            ]
        return made


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a message comes back from every client: not the reasoning, the ids of calls, or white space around an
    answer.

    Example:
        >>> message_key({"role": "assistant", "content": " 7\\n", "reasoning_content": "3 + 4"})
        ('assistant', '7', (), '')
    """
    is_answer = message["role"] == "assistant"
    content = message.get("content") or ""
    calls = tuple(
        (call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    of_call = str(message.get("tool_call_id") or "") if message["role"] == "tool" else ""
    return message["role"], content.strip() if is_answer else content, calls, of_call


def _chains(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """For each message the digest of the tools and all messages up to it."""
    chain = _digest(b"", json.dumps(list(tools), sort_keys=True))
    chains = []
    for message in messages:
        chain = _digest(chain, message_key(message))
        chains.append(chain)
    return chains


def _digest(before: bytes, what: Any) -> bytes:
    return hashlib.blake2b(repr((before, what)).encode(errors="surrogatepass"), digest_size=16).digest()


def _call_ids(message: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(str(call.get("id")) for call in message.get("tool_calls") or ())


def _canonical(arguments: str) -> str:
    """Clients write JSON again in their own way."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def _as_object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
