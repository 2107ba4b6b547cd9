"""Rows that only number the episodes of an environment."""

from __future__ import annotations

from itertools import islice

import pytest

from areal_like.errors import UserError
from areal_like.tasks.episodes import NO_ANSWER, rows


def test_rows_are_numbered_and_carry_their_part_and_columns() -> None:
    made = list(rows(1, "eval", limit=2, options={"prompt": "Play.", "columns": {"level": 3, "episode": 9}}))
    own = {"prompt": "Play.", "split": "eval", "level": 3, "answer": NO_ANSWER}
    assert made == [{**own, "episode": 0}, {**own, "episode": 1}]
    assert next(rows(1, "train", options={"columns": {"answer": "7"}}))["answer"] == "7"


def test_rows_do_not_end_without_a_limit_and_do_not_depend_on_the_seed() -> None:
    assert list(islice(rows(1, "train"), 300)) == list(islice(rows(2, "train"), 300))


@pytest.mark.parametrize("options", [{"prompt": ""}, {"columns": 3}, {"seed": 1}])
def test_a_bad_option_is_named(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"episodes options.{next(iter(options))}"):
        list(rows(1, "train", options=options))
