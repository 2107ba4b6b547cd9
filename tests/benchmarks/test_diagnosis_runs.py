"""The benchmark of the diagnosis: its set-ups, and how it judges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.diagnosis import counts, result_of
from benchmarks.diagnosis_set_ups import FILES, HEALTHY, QUICK, SET_UPS, SICK, UNSEEN_HEALTHY, UNSEEN_SICK, SetUp
from controller.config.loading import load_config
from controller.config.offline_loading import load_offline
from controller.report.ending import CAUSES
from controller.report.finding import KINDS


def test_at_least_twelve_sick_and_twelve_healthy_set_ups_are_unseen_some_of_the_healthy_ones_short() -> None:
    sick = [one for one in SET_UPS.values() if one.is_sick and one.is_unseen]
    healthy = [one for one in SET_UPS.values() if not one.is_sick and one.is_unseen]
    assert len(sick) >= 12
    assert len(healthy) >= 12
    assert sum(one.expected == ("too_short",) for one in healthy) >= 4


def test_each_set_up_has_a_name_of_its_own_that_the_command_line_takes() -> None:
    assert len(SET_UPS) == len(SICK) + len(UNSEEN_SICK) + len(HEALTHY) + len(UNSEEN_HEALTHY)
    assert set(QUICK) <= set(SET_UPS)
    assert not any("," in name for name in SET_UPS), "--only is a list with commas"


@pytest.mark.parametrize("one", SET_UPS.values(), ids=SET_UPS.keys())
def test_a_set_up_is_a_valid_config(one: SetUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # as in a run: the checkout is not the current folder
    load = load_offline if one.command in ("sft", "dpo", "reward-model") else load_config
    name, *overrides = one.words
    load(name, overrides)


@pytest.mark.parametrize("one", SET_UPS.values(), ids=SET_UPS.keys())
def test_the_users_code_and_rows_that_a_set_up_names_exist(one: SetUp) -> None:
    words = " ".join(one.words)
    for module, name in re.findall(r"\b(my_\w+):(\w+)", words):
        names = dict[str, object]()
        exec(FILES[f"{module}.py"], names)
        assert callable(names[name])
    for name in re.findall(r"=(\w+\.jsonl)\b", words):
        rows = [json.loads(line) for line in FILES[name].splitlines()]
        assert len(rows) >= 40


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
        ("balanced", "machine_busy", "info", "not judged"),
        ("too few slots", "machine_busy", "info", "not judged"),
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
