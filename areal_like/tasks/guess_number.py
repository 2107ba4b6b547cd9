"""Guess a number that an environment has drawn: the built-in example of an environment. The rows are generated, not
files.

    prompt "16:"    model "07?"  environment ">"    model "11?"  environment "="

`>`: the number is greater, `<`: smaller, `=`: found, which ends the episode, `!`: not a valid guess. All prompts of one
size are equal: the number is in the row, which only the environment sees. In demonstrations a share `careless` of the
guesses is random and ignores the answers; the others are among the remaining numbers. So the warm start teaches the
format, and RL has to learn that halving the remaining range pays.

The guess that finds the number has the reward 1 - 0.1 (guesses before it), every other one 0. A reward of -0.1 for each
other guess would have the same sum, but then not guessing pays: a policy learned to write turns without an end, which
are truncated and cost nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import pydantic
from pydantic import Field

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.settings import Settings
from areal_like.tasks.running_sum import Split

CHARACTERS = "0123456789:?<>=!"
"""All characters of prompts, guesses and the environment's answers."""
GUESS_END = "?"
"""Ends a guess."""
DEFAULT_EVAL_ROWS = 200


class GuessNumberOptions(Settings):
    """Options of the generator."""

    size: int = Field(16, ge=2, le=100)
    """The number is between 0 and `size` - 1."""
    careless: float = Field(0.5, ge=0, le=1)
    """Demonstrations: share of the guesses that ignore the answers."""
    most_guesses: int = Field(10, ge=1, le=100)
    """Demonstrations: largest number of guesses."""

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> GuessNumberOptions:
        """Check options as they come from YAML. Raises UserError."""
        try:
            return GuessNumberOptions.model_validate(dict(options or {}))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(GuessNumberOptions.model_fields)
            raise UserError(first["msg"], where=f"guess_number options.{key}", remedy=f"options are {known}") from error


class GuessNumber:
    """The environment. The number is taken from its row."""

    def __init__(self, *, par: int | None = None) -> None:
        """Args:
        par: largest number of guesses for which `correct` is 1; None: the worst case of halving.
        """
        self._par, self._given_par = 0, par
        self._number = self._size = self._guesses = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the row's number, or draw one if it has none."""
        self._size = int(row["size"])
        number = row.get("answer")
        self._number = random.Random(seed).randrange(self._size) if number is None else int(number)
        self._par = self._given_par or math.ceil(math.log2(self._size + 1))

    def step(self, action: str) -> Step:
        """Answer one guess."""
        self._guesses += 1
        said = answer_to(action, self._number)
        is_found = said == "="
        reward = max(1.0 - 0.1 * (self._guesses - 1), 0.0) if is_found else 0.0
        parts = {"correct": float(is_found and self._guesses <= self._par), "guesses": float(self._guesses)}
        return Step(observation=said, reward=reward, is_done=is_found, components=parts)


def answer_to(action: str, number: int) -> str:
    """The environment's answer to a guess. The whole text must be a guess, so the policy cannot forge an answer within
    it.

    Example:
        >>> answer_to("07?", 11), answer_to("11?", 11), answer_to("07?>11?=", 11)
        ('>', '=', '!')
    """
    digits = action.removesuffix(GUESS_END)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 3):
        return "!"
    guess = int(digits)
    return "=" if guess == number else ">" if guess < number else "<"


def rows(
    seed: int, split: Split, *, limit: int | None = None, options: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `size` and `answer`, the number; endless without a limit, except for `eval`, which has each
    number once. Raises UserError for a bad option.
    """
    size = GuessNumberOptions.parse(options).size
    rng = random.Random(f"guess_number/{split}/{seed}")
    numbers = (place % size if split == "eval" else rng.randrange(size) for place in count())
    made = ({"prompt": f"{size}:", "size": size, "answer": str(number)} for number in numbers)
    return islice(made, DEFAULT_EVAL_ROWS if split == "eval" and limit is None else limit)


def demonstrations(
    seed: int, options: Mapping[str, Any] | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of `prompt` and `spans`, endless without a limit; the environment's answers are not trained."""
    checked = GuessNumberOptions.parse(options)
    rng = random.Random(f"guess_number/demonstrations/{seed}")
    return ({"prompt": f"{checked.size}:", "spans": _game(checked, rng)} for _ in islice(count(), limit))


def _game(options: GuessNumberOptions, rng: random.Random) -> list[list[Any]]:
    number, low, high = rng.randrange(options.size), 0, options.size - 1
    spans: list[list[Any]] = []
    for _ in range(options.most_guesses):
        is_careless = rng.random() < options.careless
        guess = rng.randrange(options.size) if is_careless else rng.randint(low, high)
        said = answer_to(f"{guess}{GUESS_END}", number)
        spans += [[f"{guess:02d}{GUESS_END}", True], [said, False]]
        if said == "=":
            break
        low, high = (max(low, guess + 1), high) if said == ">" else (low, min(high, guess - 1))
    return spans
