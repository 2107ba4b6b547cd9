"""The workflow `traffic`: trains on the conversations of clients outside the run, with rewards that come later.

A sample waits for a conversation, which conversations.py assigns, and for its reward. HTTP is in listener.py, answers
in session.py. The address is open as long as its worker runs. A sample that waits for a client has no deadline; a
conversation has one (`reward_timeout_s`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Literal

from aiohttp import web

from areal_like.errors import UserError
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleTask
from rollout.agent.conversations import Conversation, Conversations
from rollout.agent.finished import counts_of, sample_of
from rollout.agent.listener import application, bound_socket, read_json, runner_of
from rollout.agent.store import Thinking
from rollout.agent.streaming import CONVERSATION_HEADER
from rollout.answers import chat_of
from rollout.chat.formats import find_format
from rollout.workflow import OPTIONS_KEY, PolicyAccess, Sample, SampleTools

SCORER = "traffic"
"""Name of the scorer in verdicts of clients."""
WRONG_KEY = "this is not the key of this address: use the value of {{variable}} (workflow_options.key_variable: {name})"


class TrafficWorkflow:
    """Answers clients at a fixed address; each sample is one of their conversations."""

    is_resumable = False

    def __init__(
        self, *, port: int, host: str = "127.0.0.1", key_variable: str | None = None, reward_timeout_s: float = 300.0,
        on_missing_reward: Literal["drop"] | float = "drop", format: str | None = None, thinking: Thinking = "keep",
    ) -> None:  # fmt: skip
        """Args:
            port: port of the first worker; each further worker's is one higher.
            host: address to listen at. One that is not of the loopback interface needs a key.
            key_variable: environment variable with the API key of the clients; None: clients need no key.
            reward_timeout_s: time limit for a reward, from the last request or answer of a conversation.
            on_missing_reward: `drop`: a conversation without a reward is not trained on. A number: it has this reward.
            format: see the workflow `agent`.
            thinking: see the workflow `agent`.

        Raises:
            UserError: a setting is out of range, or there is no key.
        """
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise UserError(f"`port` must be a whole number from 1 to 65535, not {port!r}", where=f"{OPTIONS_KEY}.port")
        if not isinstance(host, str) or not host:
            raise UserError(f"`host` must be a host name or an IP address, not {host!r}", where=f"{OPTIONS_KEY}.host")
        if not _is_positive(reward_timeout_s):
            what = f"`reward_timeout_s` must be a number greater than 0, not {reward_timeout_s!r}"
            raise UserError(what, where=f"{OPTIONS_KEY}.reward_timeout_s")
        if on_missing_reward != "drop" and not _is_finite(on_missing_reward):
            what = f"`on_missing_reward` must be `drop` or a finite number, not {on_missing_reward!r}"
            raise UserError(what, where=f"{OPTIONS_KEY}.on_missing_reward")
        if thinking not in ("keep", "template"):
            raise UserError(f"`thinking` must be `keep` or `template`, not {thinking!r}", where=OPTIONS_KEY)
        if format is not None:
            find_format(None, name=format, where=f"{OPTIONS_KEY}.format")
        self._key = _key(host, key_variable)
        self._wrong_key = WRONG_KEY.format(name=key_variable)
        self._host, self._port, self._reward_timeout_s = host, port, float(reward_timeout_s)
        self._missing = None if on_missing_reward == "drop" else float(on_missing_reward)
        self._format, self._thinking = format, thinking
        self._conversations: Conversations | None = None

    @asynccontextmanager
    async def serving(self, policy: PolicyAccess) -> AsyncIterator[None]:
        """See `ServingWorkflow`. Raises UserError if the address is not available."""
        chat, no_tools = chat_of(policy.tokens, name=self._format, where=f"{OPTIONS_KEY}.format")
        conversations = Conversations(
            policy, chat, key=self._key, no_tools=no_tools, thinking=self._thinking,
            reward_timeout_s=self._reward_timeout_s,
        )  # fmt: skip
        listener = bound_socket(
            self._host, self._port + policy.worker_index, host_key=f"{OPTIONS_KEY}.host",
            port_key=f"{OPTIONS_KEY}.port", remedy="choose another port, or end the process that uses it",
        )  # fmt: skip
        runner = runner_of(_routes(conversations, self._wrong_key))
        try:
            await runner.setup()
            await web.SockSite(runner, listener).start()
            self._conversations = conversations
            yield
        finally:
            await runner.cleanup()
            listener.close()

    def traffic_counters(self) -> Mapping[str, float]:
        """See `ServingWorkflow`."""
        if self._conversations is None:
            return {}
        counts = self._conversations.counts
        named = {name: float(count) for name, count in counts.items() if name.startswith("traffic_")}
        return {**named, "traffic_refused": float(counts["agent_refused"])}

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        """See `Workflow`."""
        assert self._conversations is not None, "the worker serves before it takes samples"
        async with self._conversations.slot((task.group_id, task.sample_index), tools) as slot:
            conversation = await self._conversations.taken(slot)
            return sample_of(tools, conversation.session.store.trajectories(), self._verdict(conversation))

    def _verdict(self, conversation: Conversation) -> Verdict:
        session = conversation.session
        counts = counts_of(session)
        if session.reward is not None:
            value, parts = session.reward
            return Verdict(kind="scored", value=value, components={**counts, **parts}, scorer=SCORER)
        missed = f"no reward (deadline: {self._reward_timeout_s:g} s after the last request or answer)"
        reason = "its client sent no reward" if conversation.is_ended else missed
        if self._missing is None:
            return Verdict(kind="invalid", reason=reason, components=counts, scorer=SCORER, failed_in=SCORER)
        parts = {**counts, "missing_reward": 1.0}
        return Verdict(kind="scored", value=self._missing, reason=reason, components=parts, scorer=SCORER)


def _routes(conversations: Conversations, wrong_key: str) -> web.Application:
    async def reward(request: web.Request) -> web.StreamResponse:
        body, _ = await read_json(request)
        return web.json_response(conversations.reward(body, request.headers.get(CONVERSATION_HEADER, "")))

    made = application(conversations, wrong_key=wrong_key)
    made.router.add_post("/rl/reward", reward)
    return made


def _key(host: str, variable: str | None) -> str:
    """The API key of the clients; empty: none. Raises UserError."""
    where = f"{OPTIONS_KEY}.key_variable"
    if variable is None:
        if not _is_loopback(host):
            what = f"a key is required, because other machines may be able to connect to {host}"
            raise UserError(
                what,
                where=where,
                remedy="set key_variable to the name of an environment variable that contains the key",
            )
        return ""
    key = os.environ.get(variable, "") if isinstance(variable, str) else ""
    if not key:
        what = f"the environment variable {variable} is not set"
        raise UserError(what, where=where, remedy=f"set {variable} to the API key that clients send")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < float("inf")  # type: ignore[arg-type]


def _is_positive(value: object) -> bool:
    return _is_finite(value) and value > 0  # type: ignore[operator]
