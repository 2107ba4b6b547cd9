"""The workflow `agent`: starts a user's program for each sample; its requests to a model are answered by the policy.

HTTP is in listener.py, answers in session.py, and the tokens that a request continues in store.py.

The program's environment has `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which OpenAI's SDKs read, the same variables for
Anthropic's SDKs, and the data row. All its answers are trained on, in one trajectory per branch of its conversations,
with one verdict. The program is killed with all its descendants when the sample ends.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from areal_like.errors import UserError
from areal_like.process import describe_status
from areal_like.trajectory import Trajectory
from areal_like.verdict import MAX_REASON_CHARS, Verdict, VerdictKind
from areal_like.wire.messages import SampleTask
from rollout.agent.finished import counts_of, sample_of
from rollout.agent.listener import listening
from rollout.agent.programs import Preloaded, Program, Programs, Started, command_of
from rollout.agent.session import AgentSession
from rollout.agent.store import Thinking
from rollout.answers import chat_of
from rollout.chat.formats import find_format
from rollout.transcript import Transcript
from rollout.workflow import OPTIONS_KEY, Sample, SampleTools

FAILED_IN = "agent"
"""Name of the scorer in verdicts of the agent."""
MAX_OUTPUT_BYTES = 4096
"""Bytes of the end of a program's output that are kept to explain a failure."""
MAX_ROW_CHARS = 100_000
"""Largest row in an environment variable; Linux allows 128 KiB."""
EXIT_REWARDS = {0: 1.0, 1: 0.0}
"""Rewards by exit status, with `reward: exit`; another status is a failure. Test runners such as pytest use 1 for
failed tests, and other numbers if they could not run them."""
RewardSource = Literal["scorer", "agent", "exit"]
Failure = tuple[VerdictKind, str]
"""Why a sample has no reward: the kind of its verdict, and a message."""


class AgentWorkflow:
    """Runs one program for each sample."""

    is_resumable = False

    def __init__(
        self, *, command: Sequence[str], preload: Sequence[str] = (), reward: RewardSource = "scorer",
        timeout_s: float = 600.0, format: str | None = None, thinking: Thinking = "keep",
    ) -> None:  # fmt: skip
        """Args:
            command: the program and its arguments; `python` is the interpreter of the run.
            preload: with a program in Python: modules to import once, in a process that every program is forked from.
                They must not start threads, nor open connections, when they are imported. Linux only.
            reward: `scorer`: the scorers of the run judge the content of the last answer, or the text that the program
                submits by `POST $AREAL_LIKE_ANSWER_URL`, `{"answer": "7"}`. `agent`: the program reports the reward by
                `POST $AREAL_LIKE_REWARD_URL`, `{"reward": 1.0}`. `exit`: status 0 of the program is a reward of 1, and
                status 1 one of 0; with another status or a signal the sample gets no reward.
            timeout_s: time limit of one program, without the time in which its requests are answered; the sample of a
                longer one gets no reward.
            format: how the model writes tool calls, a name of `rollout.chat.formats.FORMATS`; None: as the tokenizer's
                chat template shows it.
            thinking: `keep`: the reasoning of earlier answers stays in the context. `template`: if the chat template
                leaves it out, the conversation is rendered again from its text, as a separate trajectory.

        Raises:
            UserError: there is no such program or format, or a setting is out of range.
        """
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise UserError(
                "`command` must be a list of strings",
                where=OPTIONS_KEY,
                remedy="write, for example, command: [python, agent.py]",
            )
        words = command_of(command)
        if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
            raise UserError(
                "`preload` must be a list of module names",
                where=OPTIONS_KEY,
                remedy="write, for example, preload: [openai]",
            )
        if reward not in ("scorer", "agent", "exit"):
            raise UserError(f"`reward` must be `scorer`, `agent` or `exit`, not {reward!r}", where=OPTIONS_KEY)
        if thinking not in ("keep", "template"):
            raise UserError(f"`thinking` must be `keep` or `template`, not {thinking!r}", where=OPTIONS_KEY)
        if not timeout_s > 0:
            raise UserError("`timeout_s` must be greater than 0", where=OPTIONS_KEY)
        if format is not None:
            find_format(None, name=format, where=f"{OPTIONS_KEY}.format")
        self._programs: Programs = Preloaded(words, preload) if preload else Started(words)
        self._reward, self._timeout_s, self._format = reward, timeout_s, format
        self._thinking: Thinking = thinking

    async def run(self, task: SampleTask, tools: SampleTools) -> Sample:
        chat, no_tools = chat_of(tools.tokens, name=self._format, where=f"{OPTIONS_KEY}.format")
        session = AgentSession(tools, chat, row=task.row, no_tools=no_tools, thinking=self._thinking)
        async with listening(session) as address, self._program(session, address) as program:
            failure = await self._ended(session, program)
        trajectories = session.store.trajectories() or [await _one_token(tools)]
        verdict = await self._verdict(tools, session, trajectories, failure)
        return sample_of(tools, trajectories, verdict)

    @asynccontextmanager
    async def _program(self, session: AgentSession, address: str) -> AsyncIterator[Program]:
        """Start the program; it is killed with all its descendants when the block ends."""
        environment = {
            **os.environ,
            **{name: _with_loopback(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")},
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": session.secret,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": session.secret,
            "AREAL_LIKE_REWARD_URL": f"{address}/rl/reward",
            "AREAL_LIKE_ANSWER_URL": f"{address}/rl/answer",
            "AREAL_LIKE_ROW_URL": f"{address}/rl/row",
        }
        if len(row := json.dumps(session.row)) <= MAX_ROW_CHARS:
            environment["AREAL_LIKE_ROW"] = row
        program = await self._programs.start(environment)
        try:
            yield program
        finally:
            await asyncio.shield(program.end())

    async def _ended(self, session: AgentSession, program: Program) -> Failure | None:
        """Wait for the program. Returns why its sample has no reward, or None if it may have one, which the session has
        with `reward: exit`. Raises the error that ended the sample."""
        ending = asyncio.create_task(_status_and_output(program))
        expired = asyncio.create_task(session.own_time.taken(self._timeout_s))
        try:
            waited: set[asyncio.Future[Any]] = {ending, expired, session.broken}
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if session.broken in done:
                session.broken.result()
            if ending not in done:
                return "timed_out", f"the program took longer than {self._timeout_s:g} s, without its requests"
            status, printed = ending.result()
        finally:
            session.is_over = True
            ending.cancel()
            expired.cancel()
        if self._reward == "exit" and status in EXIT_REWARDS:
            _, parts = session.reward or (0.0, {})
            session.reward = EXIT_REWARDS[status], parts
        elif status:
            said = printed.strip().splitlines()[-1:]
            return "crashed", f"the program ended with {describe_status(status)}: {''.join(said)}"
        return None

    async def _verdict(
        self, tools: SampleTools, session: AgentSession, trajectories: Sequence[Trajectory], failure: Failure | None
    ) -> Verdict:
        counts = counts_of(session)
        if failure is None and not session.store.turns:
            failure = "invalid", "the program never requested an answer (OPENAI_BASE_URL, ANTHROPIC_BASE_URL)"
        if failure is None and self._reward == "agent" and session.reward is None:
            failure = "invalid", "the program reported no reward (AREAL_LIKE_REWARD_URL)"
        if failure is not None:
            kind, reason = failure
            return Verdict(
                kind=kind, reason=reason[:MAX_REASON_CHARS], components=counts, scorer=FAILED_IN, failed_in=FAILED_IN
            )
        if self._reward != "scorer":
            assert session.reward is not None
            value, parts = session.reward
            return Verdict(kind="scored", value=value, components={**counts, **parts}, scorer=FAILED_IN)
        verdict = await tools.score(session.judged, trajectories[0])
        return msgspec.structs.replace(verdict, components={**counts, **verdict.components})


def _with_loopback(no_proxy: str) -> str:
    """Hosts that are reached without the machine's proxy, including the policy's."""
    return ",".join([*filter(None, no_proxy.split(",")), "127.0.0.1"])


async def _one_token(tools: SampleTools) -> Trajectory:
    """Sample one token, because a sample needs at least one; its verdict decides how it is used."""
    prompt = tools.tokens.prompt({"messages": [{"role": "user", "content": "-"}]})
    transcript = Transcript(prompt, encode=tools.tokens.encode)
    transcript.sampled(await tools.generate(transcript, max_new_tokens=1))
    return transcript.close()


async def _status_and_output(program: Program) -> tuple[int, str]:
    """The program's exit status and the end of its output, once it has ended."""
    printed = await _last_output(program)
    return await program.wait(), printed


async def _last_output(program: Program) -> str:
    """The end of the program's output, once the output is closed."""
    kept = b""
    while read := await program.output.read(1 << 16):
        kept = (kept + read)[-MAX_OUTPUT_BYTES:]
    return kept.decode(errors="replace")
