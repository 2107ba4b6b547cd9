"""The workflow `agent` without a program: what one is given, how its end is judged, what becomes of its words."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policy import TEMPLATE, Policy

from areal_like.errors import UserError
from areal_like.verdict import Verdict
from rollout.agent import workflow as module
from rollout.agent.program_time import ProgramTime
from rollout.agent.programs import Started
from rollout.agent.workflow import AgentWorkflow
from rollout.answers import chat_of
from rollout.chat.calls import Read
from rollout.workflow import SampleCut


class Program:
    """A program that prints pieces and ends with a status; without a status it never ends."""

    def __init__(self, *pieces: bytes, status: int | None = 0) -> None:
        self.pieces, self.status, self.output = list(pieces), status, self

    async def read(self, num_bytes: int) -> bytes:
        if self.pieces:
            return self.pieces.pop(0)
        if self.status is None:
            await asyncio.Event().wait()
        return b""

    async def wait(self) -> int:
        assert self.status is not None
        return self.status


class Silent(Program):
    """A program that closes its output and goes on."""

    async def wait(self) -> int:
        return await asyncio.Event().wait()


def session_of(**facts: Any) -> Any:
    store = SimpleNamespace(turns=[1, 2], num_rendered_again=0, num_without_reasoning=0)
    default = {"store": store, "counts": Counter(), "reward": None, "judged": "7", "is_over": False}
    return SimpleNamespace(**{**default, **facts})


def ended(
    program: Program, *, broken: BaseException | None = None, reported: Any = None, **options: Any
) -> tuple[Any, Any]:
    async def wait() -> Any:
        broken_at = asyncio.get_running_loop().create_future()
        session = session_of(broken=broken_at, reward=reported, own_time=ProgramTime())
        if broken is not None:
            session.broken.set_exception(broken)
        try:
            return await AgentWorkflow(command=["sh"], **options)._ended(session, program), session  # type: ignore[arg-type]
        finally:
            assert session.is_over, "nothing is answered any more"
            await asyncio.sleep(0)
            left = [task for task in asyncio.all_tasks() if "_status_and_output" in repr(task)]
            assert not left, "no task reads the output any more"

    found, session = asyncio.run(asyncio.wait_for(wait(), 300.0))
    return found, session


def test_program_that_ends_well_has_no_failure() -> None:
    assert ended(Program(b"done\n"))[0] is None


@pytest.mark.parametrize(
    ("pieces", "status", "reason"),
    [
        ((b"one\ntwo", b"\nthree\n\n"), 3, "the program ended with status 3: three"),
        ((), 1, "the program ended with status 1: "),
        ((b"\xff",), -9, "the program ended with signal SIGKILL: \ufffd"),
    ],
)
def test_program_that_fails_is_shown_with_its_last_line(pieces: tuple[bytes, ...], status: int, reason: str) -> None:
    assert ended(Program(*pieces, status=status))[0] == ("crashed", reason)


@pytest.mark.parametrize("reported", [None, (0.25, {"tests": 2.0})])
@pytest.mark.parametrize(("status", "value"), [(0, 1.0), (1, 0.0)])
def test_reward_of_a_program_by_its_exit_replaces_the_one_that_it_reports(
    status: int, value: float, reported: Any
) -> None:
    failure, session = ended(Program(status=status), reported=reported, reward="exit")
    assert (failure, session.reward) == (None, (value, reported[1] if reported else {}))


def test_what_cut_the_sample_is_raised_and_the_program_not_waited_for() -> None:
    with pytest.raises(SampleCut):
        ended(Program(status=None), broken=SampleCut("revoked"))


@pytest.mark.parametrize(("options", "limit_s"), [({}, 600.0), ({"timeout_s": 2.5}, 2.5)])
@pytest.mark.parametrize("program", [Program(status=None), Silent()])
def test_program_has_ten_minutes_unless_the_option_says_otherwise(
    program: Program, options: Any, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def taken(self: ProgramTime, limit_s: float) -> None:
        limits.append(limit_s)

    monkeypatch.setattr(ProgramTime, "taken", taken)
    found, _ = ended(program, **options)
    assert found == ("timed_out", f"the program took longer than {limit_s:g} s, without its requests")
    assert limits == [limit_s]


def test_only_the_end_of_what_a_program_prints_is_kept() -> None:
    program: Any = Program(b"a" * 5000, b"b" * 4000, b"c" * 90)
    assert asyncio.run(module._last_output(program)) == "a" * 6 + "b" * 4000 + "c" * 90


# ---------------------------------------------------------------- what it is given


def environment_of(row: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    seen: list[Mapping[str, str]] = []
    closed: list[Any] = []

    async def end() -> None:
        closed.append(1)

    async def start(environment: Mapping[str, str]) -> Any:
        seen.append(environment)
        return SimpleNamespace(end=end)

    async def play() -> None:
        session: Any = SimpleNamespace(secret="s", row=row)
        async with AgentWorkflow(command=["sh", "-c", "x"])._program(session, "http://h:1"):
            assert closed == []
        assert closed == [1]

    monkeypatch.setattr(Started, "start", lambda _, environment: start(environment))
    asyncio.run(play())
    (given,) = seen
    return dict(given)


def test_program_is_given_its_address_its_key_and_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    found = environment_of({"a": 1}, monkeypatch)
    added = {
        "OPENAI_BASE_URL": "http://h:1/v1", "OPENAI_API_KEY": "s", "AREAL_LIKE_ROW": '{"a": 1}',
        "ANTHROPIC_BASE_URL": "http://h:1", "ANTHROPIC_API_KEY": "s",
        "NO_PROXY": "example.org,127.0.0.1", "no_proxy": "127.0.0.1",
        "AREAL_LIKE_REWARD_URL": "http://h:1/rl/reward", "AREAL_LIKE_ANSWER_URL": "http://h:1/rl/answer",
        "AREAL_LIKE_ROW_URL": "http://h:1/rl/row",
    }  # fmt: skip
    assert found == {**os.environ, **added}


@pytest.mark.parametrize(("num_chars", "is_given"), [(100_000, True), (100_001, False)])
def test_row_that_is_too_long_for_a_variable_is_left_to_its_address(
    num_chars: int, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"p": "x" * (num_chars - len(json.dumps({"p": ""})))}
    found = environment_of(row, monkeypatch)
    assert ("AREAL_LIKE_ROW" in found) == is_given
    assert found["AREAL_LIKE_ROW_URL"] == "http://h:1/rl/row"


# ---------------------------------------------------------------- verdicts


def verdict_of(session: Any, failure: Any = None, **options: Any) -> tuple[Verdict, Policy]:
    policy = Policy()
    trajectories: Any = [SimpleNamespace(finish_reason="stop", num_sampled=1)]
    made = AgentWorkflow(command=["sh"], **options)._verdict(policy, session, trajectories, failure)  # type: ignore[arg-type]
    return asyncio.run(made), policy


COUNTS = {"turns": 2.0, "agent_rendered_again": 0.0, "agent_without_reasoning": 0.0}


def test_scorers_judge_the_last_answer_and_their_numbers_stand_before_the_counts() -> None:
    session = session_of(counts=Counter(agent_requests=3), reward=(0.25, {}))
    verdict, policy = verdict_of(session)
    assert (policy.scored, verdict.value) == (["7"], 1.0)
    assert verdict.components == {**COUNTS, "agent_requests": 3.0, "correct": 1.0}


@pytest.mark.parametrize("reward", ["agent", "exit"])
def test_reward_of_the_agent_is_the_verdict_and_nothing_is_scored(reward: str) -> None:
    session = session_of(counts=Counter(agent_requests=3), reward=(0.25, {"tests": 2.0}))
    verdict, policy = verdict_of(session, reward=reward)
    assert (policy.scored, verdict.kind, verdict.value, verdict.scorer) == ([], "scored", 0.25, "agent")
    assert verdict.components == {**COUNTS, "agent_requests": 3.0, "tests": 2.0}


@pytest.mark.parametrize("reward", ["scorer", "agent", "exit"])
@pytest.mark.parametrize(
    ("facts", "failure", "kind", "reason"),
    [
        ({}, ("timed_out", "slow"), "timed_out", "slow"),
        (
            {"store": SimpleNamespace(turns=[], num_rendered_again=0, num_without_reasoning=0)},
            ("crashed", "x" * 600),
            "crashed",
            "x" * 500,
        ),
        (
            {"store": SimpleNamespace(turns=[], num_rendered_again=0, num_without_reasoning=0)},
            None,
            "invalid",
            "the program never requested an answer (OPENAI_BASE_URL, ANTHROPIC_BASE_URL)",
        ),
    ],
)
def test_sample_that_failed_has_no_reward_and_says_why(
    reward: Any, facts: Any, failure: Any, kind: str, reason: str
) -> None:
    verdict, policy = verdict_of(session_of(reward=(1.0, {}), **facts), failure, reward=reward)
    assert (verdict.kind, verdict.reason, verdict.value, policy.scored) == (kind, reason, None, [])
    assert (verdict.scorer, verdict.failed_in) == ("agent", "agent")
    assert verdict.components["turns"] == float(len(facts["store"].turns) if facts else 2)


def test_agent_that_was_to_report_its_reward_and_did_not_has_none() -> None:
    verdict, _ = verdict_of(session_of(), reward="agent")
    assert (verdict.kind, verdict.reason) == ("invalid", "the program reported no reward (AREAL_LIKE_REWARD_URL)")


# ---------------------------------------------------------------- formats


def test_template_without_a_notation_of_calls_reads_answers_as_text() -> None:
    policy = Policy(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    chat, why = chat_of(policy.tokens, name=None, where="x")
    assert "format of tool calls in the tokenizer's chat template is unknown" in why
    assert (chat.name, chat.stop_marks) == ("text", ("<|im_end|>",))
    assert chat.read(" <tool_call> 7 ", {}) == Read("<tool_call> 7")


@pytest.mark.parametrize(("named", "name"), [(None, "hermes"), ("mistral", "mistral")])
def test_format_is_the_template_s_or_the_one_that_is_named(named: str | None, name: str) -> None:
    chat, why = chat_of(Policy(template=TEMPLATE).tokens, name=named, where="x")
    assert (chat.name, why) == (name, "")


# ---------------------------------------------------------------- samples


def test_sample_of_an_agent_is_begun_again_on_another_worker() -> None:
    assert not AgentWorkflow.is_resumable, "its program would have to be resumed with it"


def test_sample_without_an_answer_has_one_token() -> None:
    policy = Policy("7<|im_end|>")
    trajectory = asyncio.run(module._one_token(policy))  # type: ignore[arg-type]
    assert policy.limits == [1]
    assert policy.sampled(trajectory) == "7"


@pytest.mark.parametrize("command", ["sh", [], ["sh", 3], [["sh"]]])
def test_command_that_is_no_list_of_words_is_refused(command: Any) -> None:
    with pytest.raises(UserError, match="`command` must be a list of strings"):
        AgentWorkflow(command=command)


@pytest.mark.parametrize(("no_proxy", "written"), [("", "127.0.0.1"), ("a,,b", "a,b,127.0.0.1")])
def test_policy_is_reached_without_a_proxy(no_proxy: str, written: str) -> None:
    assert module._with_loopback(no_proxy) == written
