"""The interface between an API for agents (a dialect) and a session: requests, answers and errors as plain values.

HTTP is in listener.py, generating in session.py.

In training, sampling uses the run's settings: temperature, `top_p`, `seed` and penalties of a request are ignored,
since training needs the configured distribution. Settings that would change the answer itself are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from areal_like.serve_files import UNNAMED_MODEL
from rollout.agent.store import Message

TEXT_PARTS = ("text", "input_text", "output_text")
Earlier = Callable[[int], list[Message]]
"""Function that returns the conversation up to and including the answer of an index, without instructions. Raises
BadRequest."""
Refused = Mapping[str, tuple[Any, str]]
"""Settings that would change the answer, each with the value that does not, and a remedy."""


ONLY_SAMPLED = "only the log-probs of the sampled tokens are known"
"""Remedy for requests for the log-probs of other tokens."""


class BadRequest(Exception):
    """A request that is refused; `status`, `code` and `param` are sent to the client."""

    def __init__(self, message: str, *, param: str = "", code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A parsed request.

    messages: with text contents. tools: in the form of chat templates. reads_calls: an answer may call tools; otherwise
    all of it is text. max_tokens: limit of the answer; None: the run's. wants_*: what the answer contains in addition
    to the text. num_instructions: number of leading messages that belong to this request only, not to the conversation.
    token_ids: the whole prompt, instead of messages; None: there are messages. settings: all settings of the request,
    for a policy that is served and not trained, where temperature and similar settings are used.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    reads_calls: bool
    max_tokens: int | None
    is_streamed: bool
    wants_usage: bool = False
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    num_instructions: int = 0
    token_ids: list[int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    index: number of its turn. created: seconds since 1970. message: as in `Message`. finish_reason: `stop`, `length` or
    `tool_calls`. num_prompt: number of prompt tokens. prompt_ids: the prompt tokens; empty if not requested. tokens_R,
    logprobs_R: as they were sampled. token_texts: texts of the tokens; empty if log-probs are not requested.
    conversation: id of its conversation, where clients report rewards for conversations; else empty.
    """

    index: int
    created: int
    message: Message
    finish_reason: str
    num_prompt: int
    prompt_ids: list[int]
    tokens_R: np.ndarray
    logprobs_R: np.ndarray
    token_texts: list[str]
    conversation: str = ""

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Number of tokens of the prompt and of the answer."""
        return self.num_prompt, len(self.tokens_R)


TextKind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Opening:
    """The part of a `Reply` that is known when its stream begins."""

    index: int
    created: int
    num_prompt: int
    conversation: str = ""
    prompt_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, reply: Reply) -> Opening:
        """The opening of an answer that is complete."""
        return cls(reply.index, reply.created, reply.num_prompt, reply.conversation, reply.prompt_ids)


class EventStream(Protocol):
    """The server-sent events of one streamed answer: `begin`, texts in parts, then `end` or `fail`."""

    def begin(self, opening: Opening) -> Iterator[str]:
        """The first events."""
        ...

    def text(self, kind: TextKind, text: str) -> Iterator[str]:
        """More of the answer's text; all its reasoning comes before its content."""
        ...

    def end(self, reply: Reply) -> Iterator[str]:
        """The tool calls of the answer and the last events. The texts have been sent before."""
        ...

    def fail(self, refusal: BadRequest) -> Iterator[str]:
        """The last event of an answer that failed."""
        ...


class Dialect(Protocol):
    """One API."""

    path: str
    """Path of its requests."""

    def read(self, body: Mapping[str, Any], earlier: Earlier) -> AgentRequest:
        """Parse a request. Raises BadRequest, which says what cannot be used and how to fix it."""
        ...

    def answer(self, request: AgentRequest, reply: Reply) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def stream(self, request: AgentRequest) -> EventStream:
        """The events of an answer that is streamed."""
        ...

    def error(self, refusal: BadRequest) -> dict[str, Any]:
        """The body of an error response in the form of this API."""
        ...


def events(stream: EventStream, reply: Reply) -> Iterator[str]:
    """The events of an answer that is complete before its stream begins."""
    yield from stream.begin(Opening.of(reply))
    if reasoning := reply.message.get("reasoning_content"):
        yield from stream.text("reasoning", reasoning)
    if content := reply.message["content"]:
        yield from stream.text("content", content)
    yield from stream.end(reply)


def event(data: Any, name: str = "") -> str:
    """One server-sent event; `data` that is not text is written as JSON."""
    written = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {written}\n\n" if name else f"data: {written}\n\n"


def logprobs_of(reply: Reply) -> list[dict[str, Any]]:
    """The log-prob of each sampled token in OpenAI's form; empty if they are not requested."""
    if not reply.token_texts:
        return []
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, logprob in zip(reply.token_texts, reply.logprobs_R.tolist(), strict=True)
    ]


def refuse(body: Mapping[str, Any], refused: Refused) -> None:
    """Raise BadRequest if a setting would change the answer."""
    for name, (harmless, remedy) in refused.items():
        if body.get(name) is not None and body[name] != harmless:
            raise BadRequest(f"{name} is not supported here: {remedy}", param=name)


def refuse_form(form: Any, param: str) -> None:
    """Raise BadRequest for a format of answers other than text."""
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        raise BadRequest(f"{param} must be text: answers cannot be constrained", param=param)


def reads_calls(body: Mapping[str, Any], tools: list[Any]) -> bool:
    """Whether an answer may call tools. Raises BadRequest for a `tool_choice` that would constrain it."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice must be auto or none: the policy decides which tools it calls", param="tool_choice"
        )
    return bool(tools) and kind != "none"


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A setting that is true or false; absent is false. Raises BadRequest."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", param=name)
    return bool(value)


def max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of the token limits that is set. Raises BadRequest."""
    for name in names:
        if (value := body.get(name)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1", param=name)
            return value
    return None


def model(body: Mapping[str, Any]) -> str:
    """The model name of a request, which answers repeat."""
    return str(body.get("model") or UNNAMED_MODEL)


def no_such_model(name: str, known: Sequence[str]) -> BadRequest:
    """The error for a request that names another model."""
    words = f"the only model is {known[0]}" if len(known) == 1 else f"the models are {', '.join(known)}"
    return BadRequest(f"there is no model {name}; {words}", status=404, code="model_not_found", param="model")


def text_of(content: Any, where: str) -> str:
    """Text, or parts that are all text. Raises BadRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be text or a list of parts", param=where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where} has a part that is not text, but the policy reads only text", param=where)
    return "".join(part["text"] for part in content)


def list_of(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects; absent is empty. Raises BadRequest."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise BadRequest(f"{name} must be a list of objects", param=name)
    return value


def call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A call of a tool in a message. `arguments`: JSON as text, or an object. Raises BadRequest."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} needs the name of a tool and its arguments", param=where)
    written = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": name, "arguments": written}}


def end_of(messages: list[Message], param: str) -> list[Message]:
    """Check that the messages are not empty and do not end with the assistant's. Raises BadRequest."""
    if not messages:
        raise BadRequest(f"{param} must contain at least one message", param=param)
    if messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message must not be an assistant message, because the policy generates the assistant's answer",
            param=param,
        )
    return messages


def openai_error(refusal: BadRequest) -> dict[str, Any]:
    """The body of an error response in OpenAI's form."""
    kinds = {401: "authentication_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(refusal.status, "invalid_request_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param or None, "code": refusal.code}}
