"""The quickstart's task: the running sum of digits modulo 10, step by step. The rows are generated, not files.

    prompt "3+8+5="        right answer "3+8=1,1+5=6;#6"

The end-of-sequence token is not part of the texts.

The number of terms is 2 + Geometric(`pgeo`), at most `max_terms`: lengths have a long tail, for which asynchronous
training is meant. A prompt belongs to one of the parts `sft`, `train`, `eval` by a hash of its text alone, whatever the
seed, so a held-out prompt occurs in neither kind of training. Short prompts are few (100 of two terms, a quarter of all
draws): `sft` and `train` therefore draw with repetition, as from a distribution, while `eval` gives distinct prompts,
and so has fewer short ones than training and is the harder part.

Demonstrations are wrong on purpose, so that RL has something to correct: a share `bias` of the 100 digit pairs has one
fixed wrong result most of the time, and the other pairs get a random digit with probability `noise`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, get_args

import pydantic
from pydantic import Field

from areal_like import limits
from areal_like.errors import UserError
from areal_like.settings import Settings

Split = Literal["sft", "train", "eval"]
CHARACTERS = "0123456789+=,;#"
"""All characters of prompts and answers."""
DEFAULT_EVAL_ROWS = 1000

_SHARES: dict[Split, float] = {"sft": 0.4, "train": 0.4}
"""Share of all prompts; `eval` has the rest."""
_TABLE_SEED = 99
_MAX_CONSECUTIVE_REPEATS = 10_000


class RunningSumOptions(Settings):
    """Options of the generator."""

    pgeo: float = Field(0.25, gt=0, le=1)
    """Probability that a prompt ends after each term from the second on."""
    max_terms: int = Field(16, ge=2, le=limits.TOKENS)
    """Largest number of terms of a prompt."""
    bias: float = Field(0.45, ge=0, le=1)
    """Demonstrations: share of the 100 digit pairs with a fixed wrong result."""
    bias_right: float = Field(0.35, ge=0, le=1)
    """Demonstrations: probability that such a pair is nevertheless added correctly."""
    noise: float = Field(0.1, ge=0, le=1)
    """Demonstrations: probability of a random digit for any other pair."""

    @staticmethod
    def parse(options: Mapping[str, Any] | RunningSumOptions | None) -> RunningSumOptions:
        """Check options as they come from YAML. Raises UserError."""
        if isinstance(options, RunningSumOptions):
            return options
        try:
            return RunningSumOptions.model_validate(dict(options or {}))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(RunningSumOptions.model_fields)
            raise UserError(first["msg"], where=f"running_sum options.{key}", remedy=f"options are {known}") from error


def part_of(prompt: str) -> Split:
    """The part a prompt belongs to: a function of its text alone."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"running_sum").digest()
    position = int.from_bytes(digest, "big") / 2**64
    for split, share in _SHARES.items():
        if position < share:
            return split
        position -= share
    return "eval"


def make_row(terms: list[int]) -> dict[str, Any]:
    """The data row of these digits: `prompt`, `answer` (one digit, as text), `terms`."""
    return {"prompt": "+".join(map(str, terms)) + "=", "answer": str(sum(terms) % 10), "terms": terms}


def rows(
    seed: int,
    split: Split,
    *,
    limit: int | None = None,
    options: Mapping[str, Any] | RunningSumOptions | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of one part, a function of seed, split and options; a longer limit extends a shorter one.

    `sft` and `train` are endless without a limit. `eval` has distinct prompts: 1,000 without a limit, fewer if the
    options do not allow as many. Raises UserError for an unknown split, a bad option or a negative limit.
    """
    if split not in get_args(Split):
        raise UserError(
            f"unknown split {split!r}", where="running_sum split", remedy="use the split sft, train or eval"
        )
    if limit is not None and limit < 0:
        raise UserError(
            f"the limit must be at least 0, not {limit}", where="running_sum limit", remedy="set a limit of 0 or more"
        )
    checked = RunningSumOptions.parse(options)
    draws = _draws(random.Random(f"running_sum/{split}/{seed}"), split, checked)
    if split != "eval":
        return islice(draws, limit)
    return islice(_distinct(draws), DEFAULT_EVAL_ROWS if limit is None else limit)


def _draws(rng: random.Random, split: Split, options: RunningSumOptions) -> Iterator[dict[str, Any]]:
    repeats = 0
    while (
        repeats < _MAX_CONSECUTIVE_REPEATS
    ):  # if there are few possible prompts, the hash may assign none to this part
        num_terms = 2
        while num_terms < options.max_terms and rng.random() >= options.pgeo:
            num_terms += 1
        row = make_row([rng.randrange(10) for _ in range(num_terms)])
        if part_of(row["prompt"]) == split:
            repeats = 0
            yield row
        else:
            repeats += 1


def _distinct(draws: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    repeats = 0
    for row in draws:
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            repeats = 0
            yield row
        else:
            repeats += 1
            if repeats >= _MAX_CONSECUTIVE_REPEATS:
                return


def demonstrations(
    seed: int,
    options: Mapping[str, Any] | RunningSumOptions | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, str]]:
    """Deliberately wrong `{"prompt", "response"}` pairs from the `sft` part, endless without a limit.

    The final answer agrees with the (wrong) steps: demonstrations teach the right format and wrong sums.
    """
    checked = RunningSumOptions.parse(options)
    rng = random.Random(f"running_sum/demonstrations/{seed}")
    return ({"prompt": row["prompt"], "response": _work(row["terms"], checked, rng)}
            for row in rows(seed, "sft", limit=limit, options=checked))  # fmt: skip


@lru_cache(maxsize=8)
def wrong_table(bias: float) -> Mapping[tuple[int, int], int]:
    """The digit pairs that demonstrations add incorrectly, with the wrong result; the same in every run."""
    rng = random.Random(_TABLE_SEED)
    table = {}
    for left in range(10):
        for right in range(10):
            if rng.random() < bias:
                table[left, right] = (left + right + rng.randrange(1, 10)) % 10
    return table


def _work(terms: list[int], options: RunningSumOptions | None, rng: random.Random | None) -> str:
    """The steps of `terms`: correct without options, else as in demonstrations."""
    total, steps = terms[0], []
    for term in terms[1:]:
        result = (total + term) % 10
        if options is not None and rng is not None:
            wrong = wrong_table(options.bias).get((total, term))
            if wrong is not None:
                result = result if rng.random() < options.bias_right else wrong
            elif rng.random() < options.noise:
                result = rng.randrange(10)
        steps.append(f"{total}+{term}={result}")
        total = result
    return f"{','.join(steps)};#{total}"


def solve(prompt: str) -> str:
    """The correct answer to a prompt: `solve("3+8+5=")` is `"3+8=1,1+5=6;#6"`. Raises ValueError on another text."""
    body = prompt.removesuffix("=")
    terms = body.split("+")
    if body == prompt or len(terms) < 2 or not all(len(term) == 1 and term in "0123456789" for term in terms):
        raise ValueError(f"the prompt is not a running sum: {prompt!r}")
    return _work([int(term) for term in terms], None, None)


def is_correct(row: Mapping[str, Any], response: str, finish_reason: str = "stop") -> bool:
    """True if the text after the last `#` is the row's answer and the model ended its answer."""
    _, mark, answer = response.rpartition("#")
    return finish_reason == "stop" and bool(mark) and answer == str(row["answer"])
