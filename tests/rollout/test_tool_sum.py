"""The workflow `tool_sum`: what is given after a call, where an episode ends, and who says that it was right."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from rollout.config import BUILT_IN_WORKFLOWS
from rollout.tool_sum import ToolSum
from rollout.transcript import Answer, Transcript
from rollout.workflow import Resumed, load_workflow

EOS = 2


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
        )

    async def generate(self, transcript: Any, *, max_new_tokens: int, stop_token_ids: Any) -> Answer:
        assert [chr(token) for token in stop_token_ids] == [")"]
        self.prompts.append(self.tokens.decode(transcript.tokens_T))
        self.limits.append(max_new_tokens)
        line = self.lines.pop(0)[:max_new_tokens]
        tokens = ids(line.removesuffix("$"))
        tokens = np.append(tokens, np.int32(EOS)) if line.endswith("$") else tokens
        ended_by = "end_of_sequence" if line.endswith("$") else "stop_token" if line.endswith(")") else "length"
        count = len(tokens)
        segment = Segment(tokens.astype(np.int32), np.full(count, -1.0, np.float32), np.zeros(count, np.int32))
        return Answer(segment=segment, finish_reason="length" if ended_by == "length" else "stop", ended_by=ended_by)

    def checkpoint(self, transcript: Any, state: Any) -> None:
        self.checkpoints.append((self.tokens.decode(transcript.tokens_T), list(state)))

    def verdict(self, value: float, *, components: dict[str, float]) -> Verdict:
        return Verdict(kind="scored", value=value, components=components)


def episode(tools: Tools, **options: int) -> Any:
    row = {"prompt": "3+8+5=", "answer": "6"}
    return asyncio.run(ToolSum(**options).run(SimpleNamespace(row=row), tools))  # type: ignore[arg-type]


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
    with pytest.raises(UserError, match="unknown turns"):
        load_workflow("tool_sum", {"turns": 3})
    assert load_workflow("tool_sum", {"max_turns": 1, "episode_tokens": 1}).run
    with pytest.raises(UserError, match="at least 1"):
        load_workflow("tool_sum", {"max_turns": 0})
