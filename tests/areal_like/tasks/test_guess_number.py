"""The guessing game: what is answered, what it is worth, and what demonstrations show."""

from __future__ import annotations

import hashlib
import json
from itertools import islice

import pytest

from areal_like.errors import UserError
from areal_like.tasks import guess_number
from areal_like.tasks.guess_number import GuessNumber, GuessNumberOptions, answer_to
from areal_like.tasks.running_sum import Split


@pytest.mark.parametrize(
    ("guess", "said"),
    [
        ("07?", ">"), ("11?", "="), ("12?", "<"), ("11", "="), ("?", "!"), ("=?", "!"), ("1 1?", "!"), ("-1?", "!"),
        ("٣?", "!"), ("11?=", "!"), ("11??", "!"), ("1" * 5000, "!"),
    ],
)  # fmt: skip
def test_only_a_number_is_a_guess(guess: str, said: str) -> None:
    assert answer_to(guess, 11) == said


def test_the_number_is_worth_less_with_each_guess_and_ends_the_game() -> None:
    game = GuessNumber(par=2)
    game.reset({"size": 16, "answer": "11"}, seed=0)
    steps = [game.step(guess) for guess in ("3?", "x", "11?")]
    assert [step.reward for step in steps] == pytest.approx([0.0, 0.0, 0.8])
    assert [step.is_done for step in steps] == [False, False, True]
    assert steps[-1].components == {"correct": 0.0, "guesses": 3.0}, "found, but not within par"


def test_par_is_what_halving_needs_at_worst() -> None:
    for number in range(16):
        game = GuessNumber()
        game.reset({"size": 16, "answer": str(number)}, seed=0)
        low, high, step = 0, 15, None
        while step is None or not step.is_done:
            guess = (low + high) // 2
            step = game.step(f"{guess}?")
            low, high = (guess + 1, high) if step.observation == ">" else (low, guess - 1)
        assert step.components["correct"] == 1.0


def test_without_a_number_the_seed_draws_it() -> None:
    def found(seed: int) -> list[int]:
        game = GuessNumber()
        game.reset({"size": 8}, seed)
        return [number for number in range(8) if game.step(f"{number}?").is_done]

    assert found(1) == found(1)
    assert len({found(seed)[0] for seed in range(20)}) > 1


def test_rows_and_demonstrations_depend_on_the_seed_alone() -> None:
    assert list(guess_number.rows(1, "train", limit=20)) == list(islice(guess_number.rows(1, "train"), 20))
    assert list(guess_number.rows(1, "train", limit=20)) != list(guess_number.rows(2, "train", limit=20))
    assert [row["answer"] for row in guess_number.rows(1, "eval", limit=17)] == [*map(str, range(16)), "0"]
    assert list(guess_number.demonstrations(1, limit=9)) == list(guess_number.demonstrations(1, limit=12))[:9]
    with pytest.raises(UserError, match=r"guess_number options.siz"):
        next(guess_number.rows(1, "train", options={"siz": 1}))


def test_demonstrations_train_the_guesses_alone_and_the_answers_are_right() -> None:
    for row in guess_number.demonstrations(3, {"careless": 0.5}, 200):
        spans = row["spans"]
        assert [is_trained for _, is_trained in spans] == [True, False] * (len(spans) // 2)
        said = [answer for answer, _ in spans[1::2]]
        assert "=" not in said[:-1]
        assert set(row["prompt"] + "".join(text for text, _ in spans)) <= set(guess_number.CHARACTERS)
        if said[-1] == "=":
            number = int(spans[-2][0].removesuffix("?"))
            assert said == [answer_to(guess, number) for guess, _ in spans[::2]]


def test_careful_demonstrations_never_guess_what_is_ruled_out() -> None:
    for row in guess_number.demonstrations(3, {"careless": 0.0}, 100):
        guesses = [guess for guess, _ in row["spans"][::2]]
        assert len(guesses) == len(set(guesses))


def fingerprint(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("split", "all_300"), [("train", "803c124cf097a092"), ("eval", "293aefeaaaf1343d"), ("sft", "057f62fc26e0d9c2")]
)
def test_rows_of_a_seed_are_those_of_every_release(split: Split, all_300: str) -> None:
    """A run that is resumed after an update goes on with the rows it had; published scores stay comparable."""
    assert fingerprint(list(islice(guess_number.rows(3, split), 300))) == all_300


def test_demonstrations_of_a_seed_are_those_of_every_release() -> None:
    assert fingerprint(list(islice(guess_number.demonstrations(3), 300))) == "83ac4a06cbb03ed0"


def test_evaluation_has_200_rows_unless_more_are_asked_for() -> None:
    assert len(list(guess_number.rows(1, "eval"))) == 200
    assert len(list(guess_number.rows(1, "eval", limit=201))) == 201


@pytest.mark.parametrize(
    ("key", "least", "most", "wrong"),
    [("size", 2, 100, (1, 101)), ("careless", 0.0, 1.0, (-0.1, 1.1)), ("most_guesses", 1, 100, (0, 101))],
)
def test_options_have_bounds(key: str, least: float, most: float, wrong: tuple[float, float]) -> None:
    for value in (least, most):
        assert getattr(GuessNumberOptions.parse({key: value}), key) == value
    for value in wrong:
        with pytest.raises(UserError) as refused:
            GuessNumberOptions.parse({key: value})
        assert refused.value.where == f"guess_number options.{key}"
        assert refused.value.remedy == "options are size, careless, most_guesses"


@pytest.mark.parametrize(("guesses_before", "worth"), [(0, 1.0), (1, 0.9), (9, 0.1), (10, 0.0), (11, 0.0)])
def test_guess_that_finds_the_number_is_never_worth_less_than_nothing(guesses_before: int, worth: float) -> None:
    game = GuessNumber()
    game.reset({"size": 16, "answer": "11"}, seed=0)
    for _ in range(guesses_before):
        assert game.step("3?").reward == 0.0
    assert game.step("11?").reward == pytest.approx(worth)


def test_number_found_within_par_is_correct() -> None:
    for par, correct in ((1, 0.0), (2, 1.0)):
        game = GuessNumber(par=par)
        game.reset({"size": 16, "answer": 11}, seed=0)
        game.step("3?")
        assert game.step("11?").components["correct"] == correct


def test_each_guess_is_counted_and_numbers_have_up_to_three_digits() -> None:
    game = GuessNumber()
    game.reset({"size": 2, "answer": 1}, seed=0)
    assert [game.step(text).components["guesses"] for text in ("0?", "x")] == [1.0, 2.0]
    assert [game.step(text).observation for text in ("999?", "1000?")] == ["<", "!"]


def test_longest_demonstration_is_bounded_by_the_option() -> None:
    made = list(guess_number.demonstrations(1, {"most_guesses": 2, "size": 100, "careless": 1.0}, 50))
    assert {len(row["spans"]) for row in made} == {4}
    assert {row["prompt"] for row in made} == {"100:"}
