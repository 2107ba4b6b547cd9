"""The workflow `tool_sum`: what is given after a call, where an episode ends, and who says that it was right; and the
same task as an environment.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.environment import as_step
from areal_like.errors import UserError
from areal_like.tasks import tool_sum
from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from areal_like.wire.messages import EnvironmentReply
from rollout.config import BUILT_IN_WORKFLOWS
from rollout.environment_client import EnvironmentClient
from rollout.episode import EnvironmentWorkflow
from rollout.tool_sum import ToolSum
from rollout.transcript import Answer, Transcript
from rollout.workflow import Resumed, load_workflow

EOS = 2
ROW = {"prompt": "3+8+5=", "answer": "6"}


def ids(text: str) -> np.ndarray:
    return np.array([ord(one) for one in text], np.int32)


class Tools:
    """A policy that says its lines; `$` is the end of sequence."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.prompts, self.limits = list(lines), [], []
        self.resumed, self.checkpoints = None, []
        self.tokens = SimpleNamespace(
            prompt=lambda row: ids(row["prompt"]),
            encode=ids,
            decode=lambda tokens: "".join(chr(token) for token in tokens if token != EOS),
            max_context=1000,
        )

    async def generate(self, transcript: Any, *, max_new_tokens: int | None, stop_token_ids: Any) -> Answer:
        assert [chr(token) for token in stop_token_ids] == [")"]
        self.prompts.append(self.tokens.decode(transcript.tokens_T))
        self.limits.append(max_new_tokens)
        line = self.lines.pop(0)[:max_new_tokens]
        tokens = ids(line.removesuffix("$"))
        tokens = np.append(tokens, np.int32(EOS)) if line.endswith("$") else tokens
        ended_by = "end_of_sequence" if line.endswith("$") else "stop_token" if line.endswith(")") else "length"
        count = len(tokens)
        segment = Segment(tokens.astype(np.int32), np.full(count, -1.0, np.float32), np.zeros(count, np.int32))
        return Answer(
            segment=segment, finish_reason="length" if ended_by == "length" else "stop", ended_by=ended_by,
            stop_token=None if ended_by == "length" else int(tokens[-1]),
        )  # fmt: skip

    def checkpoint(self, transcript: Any, state: Any) -> None:
        self.checkpoints.append((self.tokens.decode(transcript.tokens_T), list(state)))

    def environment(self, record: Any) -> Any:
        client = EnvironmentClient(name="r0", seed=1, total_deadline_s=5.0)
        client.links.append(Service(client))
        return client.episode(SimpleNamespace(row=ROW, purpose="eval"), record)  # type: ignore[arg-type]

    def verdict(self, value: float, *, components: dict[str, float]) -> Verdict:
        return Verdict(kind="scored", value=value, components=components)


class Service:
    """A reward service that runs one environment in this process."""

    accepts_requests = True

    def __init__(self, client: EnvironmentClient) -> None:
        self.client, self.environment = client, tool_sum.ToolSum()

    async def send(self, message: Any) -> None:
        is_reset = message.turn == 0
        made = self.environment.reset(ROW, 0) if is_reset else self.environment.step(message.action)
        step = as_step(made, is_reset=is_reset, max_bytes=1000)
        reply = EnvironmentReply(episode_id=message.episode_id, turn=message.turn, status="answered", step=step)
        self.client.resolve(reply)


def episode(tools: Tools, **options: int) -> Any:
    return asyncio.run(ToolSum(**options).run(SimpleNamespace(row=ROW), tools))  # type: ignore[arg-type]


def through_environment(tools: Tools) -> Any:
    workflow = EnvironmentWorkflow(max_turns=25, stop=")")
    return asyncio.run(workflow.run(SimpleNamespace(row=ROW), tools))  # type: ignore[arg-type]


def test_the_tools_output_follows_a_call_and_is_not_trained_on() -> None:
    tools = Tools("(3+8)", "(1+5)", "#6$")
    sample = episode(tools)
    assert tools.prompts == ["3+8+5=", "3+8+5=(3+8)1;", "3+8+5=(3+8)1;(1+5)6;"]
    assert sample.response_text == "(3+8)1;(1+5)6;#6"
    trained = sample.trajectory.tokens_T[sample.trajectory.loss_mask_T]
    assert tools.tokens.decode(trained) == "(3+8)(1+5)#6"
    assert sample.trajectory.finish_reason == "stop"
    assert (sample.verdict.value, sample.verdict.components) == (1.0, {"correct": 1.0, "calls": 2, "tool_share": 1.0})


def test_an_episode_goes_on_from_its_last_call() -> None:
    whole = Tools("(3+8)", "(1+5)", "#6$")
    expected = episode(whole)
    assert whole.checkpoints == [
        ("3+8+5=(3+8)1;", ["(3+8)"]), ("3+8+5=(3+8)1;(1+5)6;", ["(3+8)", "(1+5)"])
    ]  # fmt: skip
    first = Transcript(ids("3+8+5="), encode=ids)
    first.sampled(asyncio.run(Tools("(3+8)").generate(first, max_new_tokens=9, stop_token_ids=ids(")"))))
    first.given("1;")
    rest = Tools("(1+5)", "#6$")
    rest.resumed = Resumed(transcript=first, state=["(3+8)"])  # type: ignore[assignment]
    sample = episode(rest)
    assert rest.prompts == whole.prompts[1:]
    assert sample.response_text == expected.response_text
    assert sample.verdict == expected.verdict
    assert sample.trajectory.loss_mask_T.tolist() == expected.trajectory.loss_mask_T.tolist()


@pytest.mark.parametrize(
    ("lines", "value", "share"),
    [
        (["3+8:1;1+5:6;#6$"], 1.0, 0.0),
        (["3+8:1;(1+5)", "#6$"], 1.0, 0.5),
        (["(3+8)", "#5$"], 0.0, 1.0),
        (["(3+8)", "#6"], 0.0, 1.0),
        (["#6(3+8)", "$"], 0.0, 1.0),
    ],
    ids=["in the head", "both", "wrong", "no end", "an earlier answer does not count"],
)
def test_only_the_last_words_decide(lines: list[str], value: float, share: float) -> None:
    sample = episode(Tools(*lines))
    assert (sample.verdict.value, sample.verdict.components["tool_share"]) == (value, share)


@pytest.mark.parametrize(
    "lines",
    [
        ["(3+8)", "(1+5)", "#6$"], ["3+8:1;(1+5)", "#6$"], ["(3+8)", "#5$"], ["(3+)", "#6$"], ["#6(3+8)", "$"],
        ["(3+8)", "#6"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_environment_gives_the_same_samples_as_the_workflow(lines: list[str]) -> None:
    ours, theirs = Tools(*lines), Tools(*lines)
    one, other = episode(ours), through_environment(theirs)
    assert theirs.prompts == ours.prompts
    assert other.response_text == one.response_text
    for name in ("tokens_T", "loss_mask_T", "logprobs_T"):
        assert getattr(other.trajectory, name).tolist() == getattr(one.trajectory, name).tolist()
    assert other.verdict.value == one.verdict.value
    has_ended = lines[-1].endswith("$")
    assert other.trajectory.finish_reason == ("environment" if has_ended else "length")
    if has_ended:  # the environment does not see a turn that was cut
        assert one.verdict.components.items() <= other.verdict.components.items()


def test_an_episode_is_over_after_so_many_calls_or_tokens() -> None:
    assert episode(Tools(*["(1+1)"] * 9), max_turns=3).verdict.components["calls"] == 3
    tools = Tools(*["(1+1)"] * 9)
    sample = episode(tools, episode_tokens=12)
    assert tools.limits == [12, 5]
    assert (sample.trajectory.finish_reason, len(sample.trajectory)) == ("length", 6 + 14)


def test_it_is_loaded_by_its_name_with_its_options() -> None:
    assert isinstance(load_workflow("tool_sum", {"max_turns": 3}), ToolSum)
    needed: dict[str, dict[str, Any]] = {"agent": {"command": ["sh"]}, "traffic": {"port": 8001}}
    others = BUILT_IN_WORKFLOWS.keys() - {"verifiers"}  # which needs its package
    assert all(load_workflow(name, needed.get(name)).run for name in others)
    with pytest.raises(UserError, match="unknown: turns"):
        load_workflow("tool_sum", {"turns": 3})
    assert load_workflow("tool_sum", {"max_turns": 1, "episode_tokens": 1}).run
    with pytest.raises(UserError, match="at least 1"):
        load_workflow("tool_sum", {"max_turns": 0})
