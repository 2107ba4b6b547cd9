"""Planted faults: as many as asked for, the same for the same seed, and other rows unchanged."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from areal_like.private_text import is_iban, is_luhn
from benchmarks import data_planting
from benchmarks.data_planting import KINDS, plant, with_other_numbers


def rows(name: str) -> list[dict[str, Any]]:
    text = (
        "Tom buys {} apples and gives some of them to his sister, who then eats a few right away on the way home ({})."
    )
    return [
        {"problem": text.format(number, name), "solution": f"so it is {number} #### {number}", "answer": str(number)}
        for number in range(400)
    ]


def test_kinds_are_planted_as_often_as_asked_and_other_rows_stay() -> None:
    planted = plant(rows("train"), rows("eval"), 10, seed=1)
    assert Counter(planted.kinds.values()) == dict.fromkeys(KINDS, 10)
    originals = {json.dumps(row, ensure_ascii=False).encode() for row in rows("train")}
    unchanged = [line for number, line in enumerate(planted.lines, 1) if number not in planted.kinds]
    assert len(unchanged) == 300
    assert set(unchanged) <= originals
    for number, kind in planted.kinds.items():
        assert kind == "contamination" or planted.lines[number - 1] not in originals or kind == "exact_duplicates"
    assert planted == plant(rows("train"), rows("eval"), 10, seed=1)
    assert planted.lines != plant(rows("train"), rows("eval"), 10, seed=2).lines


def test_account_and_card_numbers_have_right_check_digits() -> None:
    rng = random.Random(1)
    for _ in range(50):
        assert is_iban(data_planting._account(rng))
        assert is_luhn(data_planting._card_number(rng).replace(" ", ""))


def test_copies_with_other_numbers_differ() -> None:
    row = rows("train")[5]
    assert with_other_numbers(row, 0) == row
    assert "buys 8 apples" in with_other_numbers(row, 3)["problem"]
