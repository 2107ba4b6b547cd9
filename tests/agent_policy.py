"""A scripted policy for tests of agents, and how requests and programs reach it: real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from chat_tokenizer import byte_tokenizer

from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from rollout.agent.listener import listening
from rollout.agent.session import AgentSession
from rollout.chat.formats import FORMATS
from rollout.tokens import PromptTokens
from rollout.transcript import Answer
from rollout.workflow import load_workflow

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call> arguments<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<think>Hm.</think><tool_call>{"name": "add",  "arguments": {"x": 3, "y": 4}}</tool_call><|im_end|>'
ASK = {"model": "policy", "messages": [{"role": "user", "content": "3 and 4?"}]}


class Policy:
    """Says its lines, one for each request; a line that is an exception is raised."""

    def __init__(self, *lines: Any, template: str = TEMPLATE, max_context: int = 4000) -> None:
        self.tokenizer = byte_tokenizer(template)
        self.eos = self.tokenizer.eos_token_id
        self.lines, self.prompts, self.answers = list(lines), list[list[int]](), list[list[int]]()
        self.limits, self.scored = list[Any](), list[str]()
        self.tokens = PromptTokens(
            self.tokenizer, template=None, add_bos="auto", max_context=max_context, stop_ids=(self.eos,)
        )
        self.going = asyncio.Event()
        self.going.set()

    async def generate(self, transcript: Any, *, max_new_tokens: int | None = None) -> Answer:
        self.prompts.append(transcript.tokens_T.tolist())
        self.limits.append(max_new_tokens)
        await self.going.wait()
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        made = self.tokens.encode(line)[:max_new_tokens]
        segment = Segment(made, np.full(len(made), -0.5, np.float32), np.full(len(made), 2, np.int32))
        self.answers.append(made.tolist())
        ended = bool(len(made)) and made[-1] == self.eos
        return Answer(
            segment=segment, finish_reason="stop" if ended else "length", number=len(self.prompts) - 1,
            ended_by="end_of_sequence" if ended else "length", stop_token=self.eos if ended else None,
        )  # fmt: skip

    async def score(self, response: str, answer: Any) -> Verdict:
        self.scored.append(response)
        return Verdict(kind="scored", value=float(response == "7"), components={"correct": 1.0}, scorer="s")

    def sampled(self, trajectory: Any) -> str:
        return str(self.tokenizer.decode(trajectory.tokens_T[trajectory.loss_mask_T]))


def asked(policy: Policy, *requests: Any, path: str = "/v1/chat/completions", **session: Any) -> Any:
    """Send requests one after the other; (status, body) of each, and the session. A request may be (body, headers)."""

    async def ask() -> Any:
        agent = AgentSession(policy, FORMATS["hermes"], **session)  # type: ignore[arg-type]
        answers = []
        async with listening(agent) as address, aiohttp.ClientSession() as client:
            for request in requests:
                body, headers = request if isinstance(request, tuple) else (request, {})
                headers = {"Authorization": f"Bearer {agent.secret}", **headers}
                data = body if isinstance(body, str) else json.dumps(body)
                async with client.post(address + path, data=data, headers=headers) as response:
                    text = await response.text()
                    is_json = response.content_type == "application/json"
                    answers.append((response.status, json.loads(text) if is_json else text))
        return answers, agent

    return asyncio.run(ask())


@asynccontextmanager
async def serving(policy: Policy, **session: Any) -> AsyncIterator[tuple[AgentSession, str, aiohttp.ClientSession]]:
    """A session, its address, and a client with its key."""
    agent = AgentSession(policy, FORMATS["hermes"], **session)  # type: ignore[arg-type]
    key = {"Authorization": f"Bearer {agent.secret}"}
    async with listening(agent) as address, aiohttp.ClientSession(headers=key) as client:
        yield agent, address, client


async def until(condition: Any) -> None:
    """Let others run until the condition holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in a server's handlers, which set no event
        await asyncio.sleep(0.001)


HELPERS = """
    import json, os, sys, urllib.request

    def post(url, body):
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    def ask(messages, **more):
        body = {"model": "policy", "messages": messages, **more}
        return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]

    row = json.loads(os.environ["AREAL_LIKE_ROW"])
"""


def played(policy: Policy, program: str, tmp_path: Any, **options: Any) -> Any:
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(HELPERS) + textwrap.dedent(program))
    workflow = load_workflow("agent", {"command": [sys.executable, "-S", str(path)], **options})
    task = SimpleNamespace(row={"prompt": "3 and 4?", "answer": "7"})
    return asyncio.run(workflow.run(task, policy))  # type: ignore[arg-type]
