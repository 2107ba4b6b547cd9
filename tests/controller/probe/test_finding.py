"""The numbers that follow from what a probe saw, against answers and verdicts written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal_like.probe_files import ProbeAnswer, ProbeAnswers, TryVerdict
from areal_like.wire.messages import Sampling
from controller.probe.finding import GoldTry, Seen

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def answer(row: int, tokens: list[int], *, is_cut: bool = False, logprobs: list[float] | None = None) -> ProbeAnswer:
    found = [-1.0] * len(tokens) if logprobs is None else logprobs
    return ProbeAnswer(row=row, text=str(tokens), prompt_P=[9], tokens_R=tokens, logprobs_R=found, is_cut=is_cut)


def scored(value: float | None, correct: float | None = None) -> TryVerdict:
    return TryVerdict(kind="scored", value=value, correct=correct, reason="")


FAILED = TryVerdict(kind="crashed", value=5.0, correct=1.0, reason="no answer")


def seen_of(answers: list[ProbeAnswer], verdicts: list[TryVerdict], **more: Any) -> Seen:
    return Seen(ROWS, ProbeAnswers(answers=answers), Sampling(), verdicts, **more)


def test_nothing_is_known_of_no_answers() -> None:
    seen = seen_of([], [])
    assert (seen.pass_rate, seen.signal_share, seen.cut_share, seen.logprob_difference) == (None, None, None, None)
    assert (seen.values, seen.groups, seen.gold_values, seen.are_groups_identical) == ([], [], {}, False)


def test_defaults_claim_nothing_about_the_model() -> None:
    seen = seen_of([], [])
    assert (seen.is_half, seen.is_untrained, seen.warm_start_follows) == (False, False, False)


def test_only_scored_answers_count_and_each_belongs_to_its_own_prompt() -> None:
    answers = [answer(0, [1]), answer(0, [2]), answer(1, [3]), answer(1, [4])]
    seen = seen_of(answers, [scored(1.0), FAILED, scored(0.0), scored(-0.5)])
    assert seen.values == [1.0, 0.0, -0.5]
    assert seen.groups == [[1.0], [0.0, -0.5]]
    assert seen_of(answers, [scored(None), scored(0.25)]).values == [0.25], "scored without a value has none"
    assert seen_of(answers, [scored(None), scored(0.25)]).groups == [[0.25]]


@pytest.mark.parametrize(
    ("verdict", "is_passed"),
    [
        (scored(0.1), True),
        (scored(0.0), False),
        (scored(-1.0), False),
        (scored(None), False),
        (scored(0.0, correct=1.0), True),
        (scored(0.0, correct=1.5), True),
        (scored(1.0, correct=0.99), False),
        (scored(1.0, correct=0.0), False),
    ],
)
def test_an_answer_passes_by_correct_or_else_by_a_reward_above_zero(verdict: TryVerdict, is_passed: bool) -> None:
    assert seen_of([answer(0, [1])], [verdict]).pass_rate == float(is_passed)


def test_shares_are_of_what_was_scored_and_of_all_answers() -> None:
    answers = [answer(0, [1], is_cut=True), answer(0, [2]), answer(1, [3]), answer(1, [4])]
    seen = seen_of(answers, [scored(1.0), scored(0.0), FAILED, scored(1.0)])
    assert seen.pass_rate == pytest.approx(2 / 3)
    assert seen.cut_share == 0.25
    assert seen_of(answers, [FAILED] * 4).pass_rate is None


def test_signal_is_the_share_of_groups_of_several_whose_rewards_differ() -> None:
    answers = [answer(0, [1]), answer(0, [2]), answer(1, [3]), answer(1, [4])]
    assert seen_of(answers, [scored(1.0), scored(0.0), scored(0.5), scored(0.5)]).signal_share == 0.5
    assert seen_of(answers, [scored(1.0), scored(0.0), scored(0.5), scored(-0.5)]).signal_share == 1.0
    assert seen_of(answers, [scored(1.0), scored(0.0), scored(0.5), FAILED]).signal_share == 1.0
    assert seen_of(answers, [scored(1.0), FAILED, scored(0.5), FAILED]).signal_share is None


def test_gold_values_are_the_best_form_of_each_row_and_column() -> None:
    gold = [
        GoldTry(0, "answer", "2", scored(0.0)),
        GoldTry(0, "answer", "#### 2", scored(1.0)),
        GoldTry(0, "answer", "#2", scored(0.5)),
        GoldTry(1, "answer", "4", scored(-1.0)),
        GoldTry(1, "answer", "#### 4", FAILED),
        GoldTry(1, "answer", "#4", scored(None)),
        GoldTry(0, "other", "2", scored(0.25)),
    ]
    assert seen_of([], [], gold=gold).gold_values == {"answer": [1.0, -1.0], "other": [0.25]}
    assert seen_of([], [], gold=[GoldTry(0, "answer", "2", FAILED)]).gold_values.get("answer", []) == []


def test_log_probs_are_compared_token_by_token_over_all_answers_that_the_trainer_computed() -> None:
    answers = [
        answer(0, [1, 2], logprobs=[-1.0, -2.0]),
        answer(0, [], logprobs=[]),
        answer(1, [3], logprobs=[-3.0]),
        answer(1, [4], logprobs=[-100.0]),
    ]
    seen = seen_of(answers, [], trainer_logprobs=[[-1.5, -2.0], [], [-2.0]])
    mean, largest = seen.logprob_difference or (0.0, 0.0)
    assert mean == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert largest == pytest.approx(1.0)
    assert replace(seen, trainer_logprobs=[[], []]).logprob_difference is None


def test_groups_are_identical_only_where_every_group_of_several_has_one_answer() -> None:
    same, other = [answer(0, [1, 2]), answer(0, [1, 2])], [answer(1, [3]), answer(1, [3, 4])]
    assert seen_of(same, []).are_groups_identical
    assert seen_of([*same, answer(1, [3])], []).are_groups_identical, "one answer alone says nothing"
    assert not seen_of([*same, *other], []).are_groups_identical
    assert not seen_of([answer(0, [1]), answer(1, [1])], []).are_groups_identical
