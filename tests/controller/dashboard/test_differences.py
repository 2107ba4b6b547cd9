"""Claims about settings that differ between runs."""

from __future__ import annotations

import pytest
from report_run import report_run

from areal_like.errors import UserError
from controller.dashboard.differences import MAX_RUNS, differences


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, staleness in (("one", 1), ("two", 4)):
        report_run(folder, name, num_steps=1, staleness=staleness, has_pulses=False, has_traces=False, has_ledger=False)
    return folder


def test_keys_that_differ_come_with_a_cell_per_run(runs):
    found = differences(runs, ["one", "two", "one"])
    assert [run["name"] for run in found["runs"]] == ["one", "two"]
    assert {"key": "staleness.max_staleness", "cells": ["1", "4"]} in found["rows"]
    assert not [row for row in found["rows"] if len(set(row["cells"])) == 1]
    assert found["problems"] == []


def test_a_run_without_settings_is_named(runs):
    (runs / "bare").mkdir(exist_ok=True)
    (runs / "bare" / "state.json").write_text("{}")
    assert differences(runs, ["one", "bare"])["problems"] == ["bare: config.yaml is missing"]


@pytest.mark.parametrize("names", [[], ["one"], ["one", "one"], [str(number) for number in range(MAX_RUNS + 1)]])
def test_too_few_and_too_many_runs_are_refused(runs, names):
    with pytest.raises(UserError, match="select 2 to 12"):
        differences(runs, names)


def test_an_unknown_run_is_named(runs):
    with pytest.raises(UserError, match="there is no run 'absent'"):
        differences(runs, ["one", "absent"])
