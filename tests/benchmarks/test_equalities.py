"""The comparison of runs that must end with the same weights; no run is started."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from benchmarks import equalities
from benchmarks.tables import TABLES

ROW: dict[str, Any] = {
    "seed": 1,
    "policies": {"sync": "a" * 64, "sync, killed": "a" * 64, "bound 0": "a" * 64, "bound 0, killed": "a" * 64},
    "kills": {"sync, killed": ["trainer after step 3"], "bound 0, killed": ["controller after step 1"]},
    "replays": {"sync, killed": True, "bound 0, killed": True},
}


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ({}, True),
        ({"policies": {**ROW["policies"], "bound 0": "b" * 64}}, False),
        ({"replays": {"sync, killed": True, "bound 0, killed": False}}, False),
    ],
)
def test_every_policy_and_every_replay_must_be_equal(change: dict[str, Any], is_equal: bool) -> None:
    row = {**ROW, **change}
    assert equalities.is_equal(row) is is_equal
    assert ("DIFFERENT" in equalities.words(row)) is not is_equal
    assert "controller after step 1" in equalities.words(row)


def test_the_table_names_the_digest_or_says_that_there_are_several() -> None:
    other = {**ROW, "seed": 2, "policies": {**ROW["policies"], "sync": "b" * 64}}
    text = TABLES["equalities"]({"seeds": [ROW, other]})
    assert "`aaaaaaaaaaaaaaaa`" in text
    assert "DIFFERENT" in text
    assert "2 of 2" in text


class Run:
    """A run whose controller cannot be killed."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        self.waited: list[int] = []

    def wait_for_step(self, step: int) -> None:
        self.waited.append(step)

    def watch(self, seconds: float) -> None:
        assert 0 <= seconds <= equalities.SPREAD_S

    def kill(self, kind: str) -> None:
        self.kills[kind] += kind != "controller"


def test_each_kind_is_killed_once_and_only_real_kills_are_listed() -> None:
    run = Run()
    done = equalities.kill_all(run, random.Random(3))  # type: ignore[arg-type]
    assert set(run.kills) == set(equalities.KILLED)
    assert run.waited == sorted(set(run.waited))
    assert all(1 <= step < equalities.NUM_STEPS for step in run.waited)
    assert sorted(words.split()[0] for words in done) == ["rollout", "trainer"]
