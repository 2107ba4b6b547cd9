"""Over a thousand pairs of gold answer and response, as people and as cheats write them, judged by a careful reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_counts import num_examples

from services.reward.scorers.maths import MathOptions, MathScorer
from services.reward.scorers.port import ScorerInput

PAIRS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
]
AT_ONCE = 80


TRIED = PAIRS[:: len(PAIRS) // num_examples(len(PAIRS))]


@pytest.mark.parametrize("start", range(0, len(TRIED), AT_ONCE))
def test_a_careful_reader_agrees(start: int) -> None:
    scorer = MathScorer(MathOptions(gold_field="gold"))
    wrong = []
    for pair in TRIED[start : start + AT_ONCE]:
        sample = ScorerInput(row=pair, response=pair["response"], finish_reason="stop", num_tokens=1)
        if scorer.score(sample)["value"] != float(pair["right"]):
            wrong.append(pair)
    assert wrong == []


def test_both_kinds_are_there() -> None:
    num_right = sum(pair["right"] for pair in PAIRS)
    assert num_right > 400
    assert len(PAIRS) - num_right > 400
