"""Wrong answers are grouped by their form, and by phrases of prompts that are solved less often than others."""

from __future__ import annotations

import numpy as np
import pytest

from controller.data import error_clusters
from controller.data.error_clusters import MIN_WRONG, by_form, by_phrase, form_of, phrases

NOUNS = ["apples", "pears", "coins", "books"]


@pytest.mark.parametrize(
    ("answer", "expected", "form"),
    [
        ("", "4", "empty"), ("so it is -4", "4", "the opposite sign"), ("the answer is 5", "4", "wrong by one"),
        ("about 4,000", "4", "wrong by a power of ten"), ("I do not know", "4", "no number"),
        ("4 of 7 it is 9", "4", "the right number is not the last one"), ("a cat", "a dog", ""), ("7", "4", ""),
        ("x = 4.0", "4", "the right number, in a form that is not accepted"), ("0", "4", ""),
        ("on and on and on and on and on", "4", "repeats itself"), ("1" * 400, "4", ""),
        ("0." + "0" * 400 + "1", "4", ""),
    ],
)  # fmt: skip
def test_form_of_an_answer(answer, expected, form):
    assert form_of(answer, expected) == form


def test_forms_are_clusters_if_they_are_frequent_enough():
    forms = dict.fromkeys(range(60), "") | dict.fromkeys(range(5), "empty") | {7: "no number", 8: "no number"}
    found = by_form(forms)
    assert [(one.name, one.wrong, one.members) for one in found] == [("empty", 5, (0, 1, 2, 3, 4))]
    assert by_form(dict.fromkeys(range(MIN_WRONG), "empty"))[0].wrong == MIN_WRONG
    assert by_form(dict.fromkeys(range(MIN_WRONG - 1), "empty")) == []


def rows(seed: int, weak: dict[str, float], num: int = 300) -> tuple[list[str], np.ndarray]:
    """Prompts with a noun and numbers; solved in 80 %, but rows with a phrase of `weak` in that share."""
    rng = np.random.default_rng(seed)
    prompts = [
        f"Tom has {rng.integers(2, 99)} {rng.choice(NOUNS)} and {rng.choice(['finds', 'loses', 'gives away'])} "
        f"{rng.integers(2, 99)} more."
        for _ in range(num)
    ]
    shares = [min((share for phrase, share in weak.items() if phrase in prompt), default=0.8) for prompt in prompts]
    return prompts, rng.random(num) < np.array(shares)


def test_planted_phrases_are_found_in_nine_of_ten_evaluations_and_nothing_else():
    found = [by_phrase(*rows(seed, {"gives away": 0.3})) for seed in range(10)]
    assert sum(bool(one) and "gives" in one[0].name for one in found) >= 9
    assert sum(len(one) for one in found) <= 11
    both = by_phrase(*rows(0, {"gives away": 0.2, "coins": 0.2}, num=800))
    assert {word for one in both for word in ("gives", "coins") if word in one.name} == {"gives", "coins"}


def test_sound_evaluations_have_no_phrase():
    assert sum(bool(by_phrase(*rows(seed, {}))) for seed in range(20)) <= 1


def test_members_of_a_phrase_are_its_wrong_rows_and_its_rows_are_counted():
    prompts, is_solved = rows(3, {"gives away": 0.2})
    first = by_phrase(prompts, is_solved)[0]
    has_it = [first.name in set(phrases(prompt)) for prompt in prompts]
    assert all(has_it[place] and not is_solved[place] for place in first.members)
    assert (first.wrong, first.wrong + first.solved) == (len(first.members), sum(has_it))


def test_phrases_have_a_word_and_numbers_are_alike():
    assert list(phrases("Add 12 apples")) == ["add", "apples", "add #", "# apples", "add # apples"]
    assert list(phrases("1+2=")) == []


def test_less_of_each_prompt_is_read_if_there_are_many(monkeypatch):
    prompts, is_solved = rows(0, {"gives away": 0.2})
    hidden = ["x" * 50 + " " + prompt for prompt in prompts]
    assert by_phrase(hidden, is_solved)
    monkeypatch.setattr(error_clusters, "MAX_ALL_CHARS", 50 * len(prompts))
    assert by_phrase(hidden, is_solved) == []
