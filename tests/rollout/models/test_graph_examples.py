"""The example workflows of configs/graphs, with models that say their lines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from configs.graphs import critic, judge, nim
from rollout.models.port import TokenLogprobs
from rollout.transcript import Answer
from rollout.workflow import check_models, load_workflow


def ids(text: str) -> np.ndarray:
    return np.array([ord(one) for one in text], np.int32)


class Line:
    """A model that says its lines and remembers what it saw."""

    def __init__(self, name: str, lines: list[str], *, is_trained: bool = True) -> None:
        self.name, self.lines, self.is_trained, self.seen = name, lines, is_trained, []

    async def generate(self, prompt: Any, **_: Any) -> Answer:
        tokens = prompt if isinstance(prompt, np.ndarray) else prompt.tokens_T
        self.seen.append("".join(map(chr, tokens)))
        said = ids(self.lines.pop(0))
        segment = Segment(said, np.full(len(said), -1.0, np.float32), np.zeros(len(said), np.int32))
        number = len(self.seen) - 1 + 100 * (self.name == "second" or self.name == "critic")
        return Answer(
            segment=segment, finish_reason="stop", ended_by="stop_token", number=number, model=self.name,
            is_trainable=self.is_trained,
        )  # fmt: skip

    async def logprobs(self, prompt: Any, tokens: np.ndarray) -> TokenLogprobs:
        return TokenLogprobs(logprobs_R=np.full(len(tokens), -3.0, np.float32), model=self.name, version=0)


def played(workflow: Any, row: dict[str, Any], *models: Line, policy: Line | None = None) -> Any:
    tools = SimpleNamespace(
        models={model.name: model for model in models},
        generate=policy.generate if policy is not None else None,
        tokens=SimpleNamespace(
            prompt=lambda row: ids(row["prompt"]), encode=ids, decode=lambda tokens: "".join(map(chr, tokens))
        ),
        verdict=lambda value, **more: Verdict(kind="scored", value=value, components=more.get("components", {})),
    )
    return asyncio.run(workflow.run(SimpleNamespace(row=row), tools))


def words(trajectory: Any, mask: bool) -> str:
    return "".join(map(chr, trajectory.tokens_T[trajectory.loss_mask_T == mask]))


@pytest.mark.parametrize(
    ("stones", "ours", "theirs", "won", "text"),
    [
        (6, ["2?", "3?"], ["1?"], 1.0, "06:2?04:1?03:3?"),
        (6, ["2?"], ["4?"], 1.0, "06:2?04:4?"),
        (6, ["x?"], [], 0.0, "06:x?"),
        (5, ["2?"], ["3?"], 0.0, "05:2?03:3?"),
    ],
)
def test_who_takes_the_last_stone_wins_and_who_breaks_the_rules_loses(
    stones: int, ours: list[str], theirs: list[str], won: float, text: str
) -> None:
    policy, rival = Line("", ours), Line("rival", theirs, is_trained=False)
    row = {"prompt": f"{stones:02d}:", "stones": stones}
    sample = played(nim.AgainstRival(), row, rival, policy=policy)
    assert (sample.verdict.value, sample.response_text) == (won, text)
    assert [one.model for one in sample.trajectory.sources] == ["rival"] * len(rival.seen)
    assert rival.seen == ["04:"] * bool(stones == 6 and rival.seen) + ["03:"] * (stones == 5)


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_in_self_play_each_side_has_a_trajectory_and_a_reward_of_its_own(trained: tuple[bool, bool]) -> None:
    first = Line("first", ["2?", "3?"], is_trained=trained[0])
    second = Line("second", ["1?"], is_trained=trained[1])
    sample = played(nim.SelfPlay(), {"prompt": "06:", "stones": 6}, first, second)
    assert first.seen == ["06:", "06:2?1?03:"]
    assert second.seen == ["04:"]
    assert sample.verdict.value == 1.0
    assert sample.verdict.components == {"correct": 1.0, "good_moves": 1.0, "turns": 3.0}
    found = [(words(one, True), float(one.turn_rewards_K[0])) for one in (sample.trajectory, *sample.others)]
    both = [("2?3?", 1.0), ("1?", -1.0)]
    assert found == [pair for pair, is_trained in zip(both, trained, strict=True) if is_trained]


def test_a_critic_reads_the_draft_and_the_generator_the_critique() -> None:
    generator, reader = Line("generator", ["4;", "5;"]), Line("critic", ["5;"])
    row = {"prompt": "7+8=", "answer": "5"}
    sample = played(critic.DraftCritiqueRevise(), row, generator, reader)
    assert generator.seen == ["7+8=", "7+8=4;5;"]
    assert reader.seen == ["?7+8=4;"]
    work, review = sample.trajectory, sample.others[0]
    assert (words(work, True), words(review, True)) == ("4;5;", "5;")
    assert (float(work.turn_rewards_K[0]), float(review.turn_rewards_K[0])) == (1.0, 1.0)
    assert sample.verdict.components == {"correct": 1.0, "draft": 0.0, "critique": 1.0}


@pytest.mark.parametrize(
    ("said", "votes", "value", "agreement"),
    [("#6", ["#6", "#6", "#1"], 1.0, 2 / 3), ("#1", ["#6", "#6", "#1"], 0.0, 2 / 3), ("#6", ["6", "", "##"], 0.0, 0.0)],
)
def test_the_judge_is_right_where_most_of_its_answers_agree(
    said: str, votes: list[str], value: float, agreement: float
) -> None:
    policy, frozen = Line("", [said]), Line("judge", votes, is_trained=False)
    sample = played(judge.JudgedSum(votes=3), {"prompt": "3+3=", "answer": "6"}, frozen, policy=policy)
    assert sample.verdict.value == value
    assert sample.verdict.components == {"correct": float(said == "#6"), "agreement": agreement, "drift": 2.0}
    assert frozen.seen == ["3+3="] * 3


def test_rows_and_demonstrations_follow_the_rules() -> None:
    games = list(nim.demonstrations(1, "train", limit=50, options={}))
    for game in games:
        left, mover = int(game["prompt"][:-1]), True
        for text, is_trained in game["spans"]:
            assert is_trained is mover
            left -= int(text[0]) if mover else 0
            assert mover or text == nim.state(left)
            mover = not mover
        assert left == 0
    assert [row["stones"] for row in nim.rows(1, "eval", limit=9, options={})] == [*range(5, 13), 5]
    rows = list(critic.rows(1, "eval", limit=100, options={}))
    assert len({row["prompt"] for row in rows}) == 100
    right = [one for one in critic.demonstrations(1, "train", limit=300, options={"noise": 0.0})]
    assert {span[0] for one in right if one["prompt"].endswith("7+8=") for span in one["spans"]} == {"5;"}


def test_the_examples_name_the_models_that_they_call() -> None:
    check_models(load_workflow("configs.graphs.nim:SelfPlay"), ["second", "first"])
    check_models(load_workflow("configs.graphs.judge:JudgedSum", {"votes": 2}), ["judge"])
