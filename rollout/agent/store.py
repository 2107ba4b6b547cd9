"""The answers that an agent has received, as a tree: finds the answer that a request continues, and its exact tokens.

Answers are parsed in rollout/chat.

An agent sends its whole conversation with every request. The deepest answer in it that was sampled here is found by the
messages up to it; the request continues from the tokens of that answer as they were sampled, and only what the template
writes after it is tokenised. Sampled tokens are never tokenised again, so log-probs and masks stay valid.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from areal_like.errors import UserError
from areal_like.trajectory import FinishReason, Trajectory
from rollout.tokens import PromptTokens
from rollout.transcript import Answer, Transcript

Message = dict[str, Any]
"""A message: role, content as text, and if they apply `tool_calls` with arguments as text, `tool_call_id`,
`reasoning_content` and `TURN`."""
Thinking = Literal["keep", "template"]
"""Handling of the reasoning of earlier answers: it stays in the context, or is left out if the chat template leaves it
out."""
TURN = "turn"
"""Key of a message: the index of its turn, as identified by an id that the client received."""


@dataclass(slots=True)
class Turn:
    """One answer.

    index: rising, and unique among all answers that the client gets. chain: digest of the tools and all messages up to
    the answer. call_ids: ids of its tool calls, as sent to the client. transcript: all its tokens. stop: text of the
    token that ended it; empty if it was truncated. closing: text that then ends it for the template. reasoning:
    reasoning of the answer. anchor: the turn whose tokens it continues. is_continued: another turn continues its
    tokens.
    """

    index: int
    chain: bytes
    call_ids: frozenset[str]
    transcript: Transcript
    finish_reason: FinishReason
    stop: str
    closing: str
    reasoning: str
    anchor: Turn | None
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    transcript: the tokens. anchor: the turn that they continue; None: a new conversation. covered: number of messages
    up to and including the anchor. chain: digest of the request's messages. begins_again: why the prompt is rendered
    again although there is a turn to continue, as counted by `num_rendered_again` and `num_without_reasoning`; empty
    otherwise.
    """

    transcript: Transcript
    anchor: Turn | None
    covered: int
    chain: bytes
    begins_again: Literal["", "no_end", "no_reasoning"] = ""


class TokenStore:
    """The turns of one agent.

    `stop_marks`: texts of the tokens with which the chat template may end an answer. `has_text_arguments`: the template
    takes the arguments of past calls as JSON text, not as an object. `thinking`: see `Thinking`. `gives_reasoning`: the
    template gets the reasoning in messages if no sampled answer is continued.
    """

    def __init__(
        self, tokens: PromptTokens, *, stop_marks: Sequence[str], has_text_arguments: bool = False,
        thinking: Thinking = "keep", gives_reasoning: bool = False,
    ) -> None:  # fmt: skip
        self._thinking, self._gives_reasoning = thinking, gives_reasoning
        self._tokens, self._stop_marks, self._has_text_arguments = tokens, tuple(stop_marks), has_text_arguments
        self._by_chain: dict[bytes, list[Turn]] = {}
        self.turns: list[Turn] = []
        self.num_rendered_again = 0
        """Number of answers whose prompt was rendered from text, because the template's text does not show the end of
        the answer that they continue."""
        self.num_without_reasoning = 0
        """Number of answers whose prompt was rendered from text, because the template leaves out earlier reasoning
        (`thinking`)."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The tokens that a request continues.

        Args:
            messages: the whole conversation, at least one message.
            tools: in the form of chat templates.

        Raises:
            UserError: the chat template rejects the messages, or the tokenizer a text.
        """
        chains = chains_of(messages, tools)
        tools = self._tokens.plain(tools)
        anchor, covered = self._deepest(messages, chains)
        if anchor is not None and self._thinking == "template":
            reasoned = self._with_reasoning(messages, chains)
            if self._is_left_out(anchor, messages, reasoned, tools):
                return self._begun(reasoned, tools, chains[-1], "no_reasoning")
        if anchor is not None and covered < len(messages):
            given = self._after(anchor, messages, covered, tools)
            if given is not None:
                known = anchor.transcript
                transcript = known.forked() if anchor.is_continued else known.copied()
                transcript.given(given)
                return Prompt(transcript, anchor, covered, chains[-1])
        why: Literal["", "no_end"] = "" if anchor is None else "no_end"
        return self._begun(self._for_template(messages), tools, chains[-1], why)

    def prompt_of_tokens(self, token_ids: Sequence[int]) -> Prompt:
        """The prompt of a client that renders conversations itself: it continues the longest earlier turn whose tokens
        it begins with. Raises UserError for ids that the tokenizer does not have."""
        num_known = self._tokens.num_ids
        if (wrong := next((one for one in token_ids if not 0 <= one < num_known), None)) is not None:
            raise UserError(f"token id {wrong} is not in the tokenizer's vocabulary of {num_known} tokens")
        ids_P = np.asarray(token_ids, np.int32)
        chain = _digest(b"tokens", ids_P.tobytes())
        anchor, known_T = None, ids_P[:0]
        for turn in self.turns:
            tokens_T = turn.transcript.tokens_T
            is_longer = len(known_T) <= len(tokens_T) <= len(ids_P)  # of equal ones the newest
            if is_longer and np.array_equal(ids_P[: len(tokens_T)], tokens_T):
                anchor, known_T = turn, tokens_T
        if anchor is None:
            return Prompt(Transcript(ids_P, encode=self._tokens.encode), None, 0, chain)
        known = anchor.transcript
        transcript = known.forked() if anchor.is_continued else known.copied()
        transcript.given(ids_P[len(known_T) :])
        return Prompt(transcript, anchor, 0, chain)

    def continued(self, messages: Sequence[Message], chains: Sequence[bytes]) -> tuple[int, int]:
        """How well the messages of a request continue a turn: the number of messages up to its answer (0: they continue
        none), and 1 if they name it by an id. `chains`: see `chains_of`."""
        turn, covered = self._deepest(messages, chains)
        if turn is None:
            return 0, 0
        said = messages[covered - 1]
        calls = _call_ids(said)
        return covered, int(turn.index == said.get(TURN) or (bool(calls) and turn.call_ids == calls))

    def begins(self, token_ids: Sequence[int]) -> int:
        """Number of tokens of the longest turn that a request of token ids begins with; 0: there is none."""
        ids_P = np.asarray(token_ids)
        lengths = (len(turn.transcript.tokens_T) for turn in self.turns)
        known = zip(self.turns, lengths, strict=True)
        return max((n for turn, n in known if np.array_equal(ids_P[:n], turn.transcript.tokens_T)), default=0)

    def record(
        self, prompt: Prompt, answer: Answer, reply: Message, *, stop: str, closing: str, index: int | None = None
    ) -> Turn:  # fmt: skip
        """Add an answer of at least one token, before the next `prompt`. `stop` and `closing` as in `Turn`. `index`: of
        the turn; None: one more than that of the last turn."""
        prompt.transcript.sampled(answer)
        if prompt.anchor is not None:
            prompt.anchor.is_continued = True
        self.num_rendered_again += prompt.begins_again == "no_end"
        self.num_without_reasoning += prompt.begins_again == "no_reasoning"
        turn = Turn(
            index=len(self.turns) if index is None else index,
            chain=_digest(prompt.chain, message_key(reply)), call_ids=_call_ids(reply), transcript=prompt.transcript,
            finish_reason=answer.finish_reason, stop=stop, closing=closing,
            reasoning=str(reply.get("reasoning_content") or ""), anchor=prompt.anchor,
        )  # fmt: skip
        self.turns.append(turn)
        self._by_chain.setdefault(turn.chain, []).append(turn)
        return turn

    def trajectories(self) -> list[Trajectory]:
        """The trajectories to train on: one for each answer that no other one continues, the last answer's first.

        Each sampled token is trained on in exactly one of them. Empty if there was no answer.
        """
        leaves = [turn for turn in self.turns if not turn.is_continued]
        return [turn.transcript.close(turn.finish_reason) for turn in reversed(leaves)]

    def _begun(
        self, written: Sequence[Message], tools: Sequence[Mapping[str, Any]], chain: bytes,
        why: Literal["", "no_end", "no_reasoning"],
    ) -> Prompt:  # fmt: skip
        first = self._tokens.prompt({"messages": written}, tools)
        return Prompt(Transcript(first, encode=self._tokens.encode), None, 0, chain, why)

    def _with_reasoning(self, messages: Sequence[Message], chains: Sequence[bytes]) -> list[Message]:
        """Messages for the template with the sampled reasoning, whether or not the client sends it back."""
        written = self._for_template(messages)
        for message, given, chain in zip(written, messages, chains, strict=True):
            if (turn := self._turn_of(given, chain)) is not None and turn.reasoning:
                message["reasoning_content"] = self._tokens.plain(turn.reasoning)
        return written

    def _is_left_out(
        self, anchor: Turn, messages: Sequence[Message], reasoned: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether the anchor's tokens contain reasoning that the template does not write for these messages."""
        turn: Turn | None
        held, turn = Counter[str](), anchor
        while turn is not None:
            if turn.reasoning:
                held[self._tokens.plain(turn.reasoning)] += 1
            turn = turn.anchor
        if not held:
            return False
        try:
            with_it = self._tokens.chat_text(reasoned, tools)
            without = self._tokens.chat_text(self._for_template(messages), tools)
        except UserError:
            return False
        return any(with_it.count(one) - without.count(one) < number for one, number in held.items())

    def _deepest(self, messages: Sequence[Message], chains: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The deepest turn that the messages continue, and how many of them it covers."""
        for place in reversed(range(len(messages))):
            if (turn := self._turn_of(messages[place], chains[place])) is not None:
                return turn, place + 1
        return None, 0

    def _turn_of(self, message: Message, chain: bytes) -> Turn | None:
        """The turn of a message with this chain; of several equal ones the one that its ids name, else the newest."""
        found = self._by_chain.get(chain) if message["role"] == "assistant" else None
        if not found:
            return None
        numbered = [turn for turn in found if turn.index == message.get(TURN)]
        named = [turn for turn in found if turn.call_ids == _call_ids(message)]
        return (numbered or named or found)[-1]

    def _after(
        self, anchor: Turn, messages: Sequence[Message], covered: int, tools: Sequence[Mapping[str, Any]]
    ) -> np.ndarray | None:
        """Tokens between the anchor's last one and the next answer; None if the template's text does not show the
        anchor's end."""
        stops = [stop for stop in (anchor.stop, *self._stop_marks) if stop]
        try:
            end = self._tokens.turn_end(self._for_template(messages), covered, stops, tools)
        except UserError:
            return None
        given = self._tokens.encode(end.after(anchor.stop))
        return np.concatenate([self._tokens.encode(anchor.closing), given]) if not anchor.stop else given

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form of chat templates, without markers that could begin or end a turn: an agent's text may
        be a web page or the policy's own text, and neither may forge turns of another role. Reasoning is left out:
        templates drop it at different places, and if an answer is continued its tokens contain it."""
        return [self._tokens.plain(self._one_for_template(message)) for message in messages]

    def _one_for_template(self, message: Message) -> Message:
        left_out = (TURN,) if self._gives_reasoning else (TURN, "reasoning_content")
        made = {key: value for key, value in message.items() if key not in left_out}
        if made.get("tool_calls") and not self._has_text_arguments:
            made["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _as_object(call["function"]["arguments"])}}
                for call in made["tool_calls"]
            ]
        return made


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """The part of a message that every client sends back: without reasoning, ids of calls, and white space around an
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


def chains_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digest, for each message, of the tools and all messages up to it."""
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
    """Canonical JSON of arguments, because clients rewrite JSON: other white space and order, 1.0 as 1, empty text for
    no arguments."""
    if not arguments.strip():
        return "{}"
    try:
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):  # written by the policy, so they may be nested arbitrarily deep
        return arguments


def _as_object(arguments: str) -> Any:
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
