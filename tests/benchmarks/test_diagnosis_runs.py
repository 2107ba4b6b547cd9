"""The benchmark of the diagnosis: its set-ups, and how it judges."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis import counts, result_of
from benchmarks.diagnosis_set_ups import QUICK, SET_UPS
from controller.report.ending import CAUSES
from controller.report.finding import KINDS


def test_there_are_enough_set_ups_of_each_class_short_and_unseen_ones_among_them() -> None:
    sick = [one for one in SET_UPS.values() if one.is_sick]
    healthy = [one for one in SET_UPS.values() if not one.is_sick]
    assert len(sick) >= 12
    assert len(healthy) >= 12
    assert any(one.is_unseen for one in sick)
    assert any(one.is_unseen for one in healthy)
    assert sum(one.expected == ("too_short",) for one in healthy) >= 4
    assert set(QUICK) <= set(SET_UPS)
    assert not any("," in name for name in SET_UPS), "--only is a list with commas"


def test_expected_kinds_are_kinds() -> None:
    for one in SET_UPS.values():
        for expected in one.expected:
            kind, _, cause = expected.partition(":")
            assert kind in KINDS
            assert not cause or cause in CAUSES


@pytest.mark.parametrize(
    ("name", "kind", "severity", "result"),
    [
        ("too few slots", "rollouts_too_few", "bad", "right"),
        ("too few slots", "no_overlap", "warning", "wrong cause"),
        ("too few slots", "healthy", "good", "miss"),
        ("two steps", "too_short", "info", "right"),
        ("two steps", "healthy", "good", "false alarm"),
        ("balanced", "processes_lost", "bad", "false alarm"),
    ],
)
def test_first_finding_is_judged_by_what_was_expected(name: str, kind: str, severity: str, result: str) -> None:
    assert result_of(SET_UPS[name], kind, severity) == result


def test_results_are_counted_by_class() -> None:
    rows = [
        {"is_sick": True, "is_unseen": False, "result": "right"},
        {"is_sick": True, "is_unseen": False, "result": "miss"},
        {"is_sick": False, "is_unseen": True, "result": "right"},
    ]
    assert counts(rows) == {"sick, seen": {"right": 1, "miss": 1}, "healthy, unseen": {"right": 1}}
