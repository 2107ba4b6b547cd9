"""The limits of each finding, on answers and verdicts written by hand; no model is made."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.probe_files import ProbeAnswer, ProbeAnswers, TryVerdict
from areal_like.wire.messages import Sampling
from controller.probe.finding import Finding, GoldTry, Seen
from controller.probe.findings import find

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2", "final": 7}, {"prompt": "2+2=", "answer": "4"}]
STOPS: dict[str, Any] = {"stop_tokens": ["<eos>"]}


def answer(row: int, text: str, tokens: list[int], *, is_cut: bool = False, logprob: float = -1.0) -> ProbeAnswer:
    logprobs = [logprob] * len(tokens)
    return ProbeAnswer(row=row, text=text, prompt_P=[9], tokens_R=tokens, logprobs_R=logprobs, is_cut=is_cut)


def scored(value: float) -> TryVerdict:
    return TryVerdict(kind="scored", value=value, correct=None, reason="")


def failed(reason: str) -> TryVerdict:
    return TryVerdict(kind="crashed", value=None, correct=None, reason=reason)


def gold(value: float, column: str = "answer", row: int = 0) -> GoldTry:
    return GoldTry(row, column, "2", scored(value))


ANSWERS = [answer(0, "a", [1]), answer(0, "b", [2]), answer(1, "c", [3]), answer(1, "d", [4])]


def seen_of(
    answers: list[ProbeAnswer] | None = None,
    values: list[float] | None = None,
    *,
    verdicts: list[TryVerdict] | None = None,
    sampling: Sampling | None = None,
    sampled: dict[str, Any] | None = None,
    **more: Any,
) -> Seen:
    """A sound set-up but for what is given."""
    chosen = ANSWERS if answers is None else answers
    given = [1.0, 0.0, 1.0, 0.0] if values is None else values
    made = ProbeAnswers(answers=chosen, **{**STOPS, **(sampled or {})})
    judged = [scored(value) for value in given] if verdicts is None else verdicts
    return Seen(ROWS, made, sampling or Sampling(max_new_tokens=6), judged, **more)


def only(seen: Seen) -> Finding:
    (finding,) = find(seen)
    return finding


def kinds(seen: Seen) -> list[str]:
    return [finding.kind for finding in find(seen)]


def test_sound_setup_has_no_finding() -> None:
    assert find(seen_of(gold=[gold(1.0)], trainer_logprobs=[[-1.0]])) == []


# ---------------------------------------------------------------- tokenizer, template, prompts


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"outside_model": 1, "vocab_size": 50}, "prompts contain tokens beyond the model's vocabulary of 50"),
        (
            {"outside_tokenizer": 1, "tokenizer_size": 40},
            "the model generates tokens beyond the tokenizer's vocabulary of 40",
        ),
        (
            {"are_stops_ordinary": True, "stop_tokens": ["7", "8"]},
            "end-of-sequence token is 7 8, which is an ordinary token of the tokenizer",
        ),
    ],
)
def test_tokenizer_that_is_not_the_models_is_named(facts: dict[str, Any], words: str) -> None:
    finding = only(seen_of(sampled=facts))
    assert finding.kind == "tokenizer"
    assert words in finding.sentence
    assert finding.remedy == "use the tokenizer of this model: set model.tokenizer: from_model"


def test_model_drawn_at_random_may_write_tokens_that_the_tokenizer_lacks() -> None:
    assert kinds(seen_of(sampled={"outside_tokenizer": 1}, is_untrained=True)) == []


def test_prompts_that_cannot_be_written_are_the_tokenizers_fault_only_where_none_can() -> None:
    rejected = {1: "no token for `x`", 2: "too long"}
    finding = find(seen_of([], [], sampled={"rejected": rejected}))[0]
    assert (finding.kind, finding.sentence) == (
        "tokenizer", "The tokenizer cannot encode any prompt: no token for `x`.",
    )  # fmt: skip
    assert kinds(seen_of(sampled={"rejected": rejected})) == []


def test_rows_that_cannot_become_prompts_are_named_by_the_first_reason() -> None:
    finding = only(seen_of([], [], sampled={"rejected": {1: "too long", 2: "empty"}}))
    assert (finding.kind, finding.sentence) == ("prompts", "No row can be converted to a prompt: too long.")
    assert kinds(seen_of(sampled={"rejected": {1: "too long"}})) == []


def test_marks_that_the_tokenizer_has_no_token_for_are_named() -> None:
    finding = only(seen_of(sampled={"unknown_marks": ["<|a|>", "<|b|>"]}))
    assert finding.kind == "template"
    assert "<|a|> <|b|>" in finding.sentence


@pytest.mark.parametrize(
    ("template", "has_chat_template", "num_cut", "is_named"),
    [("{prompt}", True, 4, True), (None, True, 4, False), ("{prompt}", False, 4, False), ("{prompt}", True, 3, False)],
)
def test_template_is_at_fault_where_it_replaces_the_models_own_and_nothing_ends(
    template: str | None, has_chat_template: bool, num_cut: int, is_named: bool
) -> None:
    answers = [answer(0, "a", [number], is_cut=number < num_cut) for number in range(4)]
    seen = seen_of(answers, sampled={"has_chat_template": has_chat_template}, prompt_template=template)
    assert ("template" in kinds(seen)) == is_named


# ---------------------------------------------------------------- end of sequence


def test_answers_that_nothing_ends_are_named() -> None:
    forced = only(seen_of(sampling=Sampling(max_new_tokens=6, ignore_eos=True)))
    assert (forced.kind, forced.remedy) == ("end_of_sequence", "remove sampling.forced_lengths")
    nameless = only(seen_of(sampled={"stop_tokens": []}))
    assert (nameless.kind, nameless.remedy) == (
        "end_of_sequence", "set eos_token_id in the model's generation_config.json",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("passed", "is_named"), [({"<end>": 1}, False), ({"<end>": 2}, True), ({"a": 1, "<end>": 3}, True)]
)
def test_token_that_half_of_the_answers_go_on_behind_is_named(passed: dict[str, int], is_named: bool) -> None:
    seen = seen_of(sampled={"passed_over": passed})
    assert kinds(seen) == (["end_of_sequence"] if is_named else [])
    if is_named:
        assert "Answers continue after <end>; only <eos> ends them." in only(seen).sentence
        assert "add the id of <end> to eos_token_id" in only(seen).remedy
    assert kinds(seen_of(sampled={"passed_over": passed}, is_untrained=True)) == []


def test_no_answers_go_on_behind_nothing() -> None:
    assert kinds(seen_of([], [])) == []


# ---------------------------------------------------------------- scorer and reward


@pytest.mark.parametrize(("num_failed", "is_named"), [(0, False), (1, False), (2, True), (4, True)])
def test_scorer_that_fails_on_half_of_the_answers_is_named(num_failed: int, is_named: bool) -> None:
    verdicts = [failed("it broke") if number < num_failed else scored(number % 2) for number in range(4)]
    seen = seen_of(verdicts=verdicts)
    assert ("scorer" in kinds(seen)) == is_named
    if is_named:
        assert find(seen)[0].sentence == f"{num_failed} of 4 answers got no verdict: it broke."
        assert find(seen)[0].remedy == "correct the scorer"


@pytest.mark.parametrize("reason", ["the row has no `answer`", "KeyError: 'x'", "there is no gold", "no column y"])
def test_scorer_that_misses_a_column_is_another_finding_than_one_that_is_wrong(reason: str) -> None:
    finding = find(seen_of(verdicts=[failed(reason)] * 4))[0]
    assert finding.kind == "reward_column"
    assert "data.train.columns" in finding.remedy


def test_reward_is_judged_by_gold_answers_and_only_where_no_sample_has_one() -> None:
    zeros = [0.0] * 4
    assert kinds(seen_of(values=zeros, gold=[gold(0.0)])) == ["reward_zero"]
    assert kinds(seen_of(values=[0.0, 0.5, 0.0, 0.5], gold=[gold(0.0)])) == []
    assert kinds(seen_of(values=zeros)) == ["too_hard"], "no gold answer was tried"
    assert kinds(seen_of(values=[-1.0, 0.0, -1.0, 0.0], gold=[gold(0.0)])) == [], "rewards below 0 differ as well"
    assert "reward_zero" not in kinds(seen_of(values=[0.5] * 4, gold=[gold(0.0)])), "every sample has a reward"
    assert kinds(seen_of(values=zeros, gold=[gold(0.0), gold(1.0, row=1)])) == ["too_hard"], "one gold answer is right"


def test_column_whose_every_gold_answer_is_right_is_named() -> None:
    zeros = [0.0] * 4
    tries = [gold(0.0), gold(0.5, "final"), gold(1.0, "final", row=1), gold(1.0, "other"), gold(0.0, "other", row=1)]
    finding = only(seen_of(values=zeros, gold=tries))
    assert finding.kind == "reward_column"
    assert "`final`" in finding.sentence
    assert finding.remedy.startswith("set data.train.columns.answer: final")
    assert kinds(seen_of(values=zeros, gold=[gold(0.0), *tries[3:]])) == ["reward_zero"]


@pytest.mark.parametrize(
    ("texts", "is_named"),
    [
        (["it is 7", "b", "b", "b"], True), (["it is 7.", "b", "b", "b"], True), (["$7$", "b", "b", "b"], True),
        (["b"] * 4, False), (["it is 17", "b", "b", "b"], False), (["7 it is", "b", "b", "b"], False),
        (["it is 7", "b", "b", "b", "b"], False),
    ],
)  # fmt: skip
def test_column_that_a_quarter_of_the_samples_end_with_is_named(texts: list[str], is_named: bool) -> None:
    answers = [answer(0, text, [number]) for number, text in enumerate(texts)]
    seen = seen_of(answers, [0.0] * len(texts), gold=[gold(1.0)])
    assert kinds(seen) == (["reward_column"] if is_named else ["too_hard"])
    if is_named:
        assert only(seen).sentence.endswith(", but 1 of 4 samples end with the value of the column `final`.")
        assert only(seen).remedy == "set data.train.columns.answer: final"


def test_prompt_and_answer_are_no_other_columns_and_an_empty_one_matches_nothing() -> None:
    rows = [{"prompt": "7", "messages": "7", "answer": "7", "empty": " "}]
    answers = [answer(0, "it is 7", [number]) for number in range(4)]
    sampled = ProbeAnswers(answers=answers, **STOPS)
    seen = Seen(rows, sampled, Sampling(max_new_tokens=6), [scored(0.0)] * 4, [gold(1.0)])
    assert kinds(seen) == ["too_hard"]


# ---------------------------------------------------------------- log-probs


@pytest.mark.parametrize("is_half", [True, False])
def test_log_probs_may_differ_by_rounding_alone(is_half: bool) -> None:
    limit = 0.1 if is_half else 0.01
    answers = [answer(0, "a", [1], logprob=0.0), answer(0, "b", [2], logprob=0.0)]
    for nats, is_named in ((limit, False), (limit * 1.01, True)):
        seen = seen_of(answers, [1.0, 0.0], trainer_logprobs=[[nats], [-nats]], is_half=is_half)
        assert kinds(seen) == (["logprobs"] if is_named else [])
    assert f"{limit * 1.01:.2g} nat on average (at most {limit * 1.01:.2g})" in only(seen).sentence


def test_different_log_probs_hide_no_symptom_while_every_other_cause_does() -> None:
    zeros = [0.0] * 4
    assert kinds(seen_of(values=zeros, trainer_logprobs=[[-9.0]])) == ["logprobs", "too_hard"]
    assert kinds(seen_of(values=zeros, sampled={"stop_tokens": []})) == ["end_of_sequence"]
    assert kinds(seen_of(values=zeros, sampled={"stop_tokens": []}, trainer_logprobs=[[-9.0]])) == [
        "end_of_sequence", "logprobs",
    ]  # fmt: skip


# ---------------------------------------------------------------- symptoms


def test_groups_of_one_answer_are_named_with_the_temperature_where_it_is_low() -> None:
    answers = [answer(0, "a", [1]), answer(0, "a", [1])]
    for temperature, remedy in ((0.29, "set sampling.temperature: 1.0"), (0.3, "start from a model")):
        seen = seen_of(answers, [1.0, 1.0], sampling=Sampling(temperature=temperature, max_new_tokens=6))
        finding = only(seen)
        assert finding.kind == "greedy"
        assert finding.remedy.startswith(remedy)
        assert (f"sampling.temperature is {temperature:g}" in finding.sentence) == (temperature < 0.3)


@pytest.mark.parametrize(("num_cut", "is_named"), [(1, False), (2, True)])
def test_answers_cut_at_the_limit_are_named_from_a_half_on(num_cut: int, is_named: bool) -> None:
    answers = [answer(0, "a", [number], is_cut=number < num_cut) for number in range(4)]
    seen = seen_of(answers)
    assert kinds(seen) == (["length"] if is_named else [])
    if is_named:
        assert only(seen).sentence == "50% of the answers are truncated at the limit of 6 tokens."
    assert kinds(seen_of(answers, is_untrained=True)) == []


def test_model_that_gets_no_reward_has_a_reason() -> None:
    zeros, tries = [0.0] * 4, [gold(1.0)]
    hard = only(seen_of(values=zeros, gold=tries))
    assert hard.kind == "too_hard"
    assert hard.sentence.startswith("None of 4 samples gets a reward, although the scorer works")
    drawn = only(seen_of(values=zeros, gold=tries, is_untrained=True))
    assert (drawn.kind, "has random weights" in drawn.sentence) == ("too_hard", True)
    assert kinds(seen_of(values=zeros, gold=tries, warm_start_follows=True)) == []
    assert kinds(seen_of(values=[0.0, 0.1, 0.0, 0.0])) == []
    assert kinds(seen_of(values=[-1.0, 0.0, -1.0, 0.0])) == [], "rewards below 0 differ, so there is a signal"
    assert kinds(seen_of(verdicts=[])) == [], "nothing was scored"


def test_groups_of_equal_rewards_are_named_with_the_reward_where_it_is_always_one() -> None:
    same = only(seen_of(values=[0.5] * 4))
    assert same.kind == "equal_groups"
    assert same.sentence.endswith("the reward of each sample is 0.5.")
    assert same.remedy == "use harder prompts, or a scorer that distinguishes between answers"
    apart = only(seen_of(values=[1.0, 1.0, 0.0, 0.0]))
    assert apart.sentence == "In every group all rewards are equal, so every advantage is zero."
    assert apart.remedy == "use prompts of medium difficulty, or a larger group_size"
    assert kinds(seen_of(values=[1.0, 1.0, 0.0, 1.0])) == []
    assert kinds(seen_of(values=[0.5] * 4, warm_start_follows=True)) == []


def test_first_symptom_alone_is_named() -> None:
    answers = [answer(0, "a", [1], is_cut=True), answer(0, "a", [1], is_cut=True)]
    assert kinds(seen_of(answers, [0.0, 0.0])) == ["greedy"]
