"""benchmarks/reward.py and reward_rates.py: what they score, and what they make of the verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reward, reward_rates, spreads
from benchmarks.program_mutants import bare_verdict, mutants_of
from services.reward.scorers.maths import MathOptions, MathScorer
from services.reward.scorers.port import ScorerInput


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reward, "DATA", tmp_path)


@pytest.mark.usefixtures("without_data")
def test_made_up_word_problems_are_half_right() -> None:
    scorer = MathScorer(MathOptions())
    values = [
        scorer.score(ScorerInput(row=row, response=response, finish_reason="stop", num_tokens=1))["value"]
        for row, response in reward.word_problems()
    ]
    assert values == [0.0, 1.0] * 250
    assert (reward.expressions(), reward.published()) == ([], [])


def test_a_spread_is_middle_and_ends() -> None:
    assert spreads.median_spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_a_rate_names_whatever_is_not_as_it_must_be() -> None:
    expected = [
        {"id": name, "verdict": "scored", "value": value, "reason": "why"}
        for name, value in zip("abc", (1.0, 0.0, 1.0), strict=True)
    ]
    expected.append({"id": "d", "verdict": "timed_out", "value": None, "reason": "slow"})
    result = reward_rates.rate("x", expected, [1.0, 1.0, 0.0, 0.0])
    assert (result["rows"], result["as_they_must_be"]) == (4, 1)
    assert result["others"] == ["b: scored 0.0 why", "c: scored 1.0 why", "d: timed_out None slow"]


@pytest.mark.processes
def test_mutants_differ_and_a_bare_python_tells_them_apart(tmp_path: Path) -> None:
    source = "def f(x):\n    return x + 1"
    mutants = mutants_of(source, 4, seed=1)
    assert len({*mutants, source}) == 5
    assert bare_verdict(source, "assert f(1) == 2", tmp_path, 20.0)
    assert not bare_verdict("def f(x):\n    return x - 1", "assert f(1) == 2", tmp_path, 20.0)
    assert not bare_verdict("import os\nos._exit(0)", "", tmp_path, 20.0)


def test_missing_data_sets_are_reported_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_rates, "DATA", tmp_path)
    monkeypatch.setattr("sys.argv", ["reward_rates"])
    with pytest.raises(SystemExit, match=r"AREAL_LIKE_TEST_DATA names a folder with .* lacks gsm8k/train.jsonl"):
        reward_rates.main()
