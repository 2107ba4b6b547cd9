"""Claims about rows merged as they come."""

from __future__ import annotations

import numpy as np
import pytest

from controller.dashboard.condensed import MAX_LIST, Condensed, ThinnedPulses, merged


def rows(count):
    generator = np.random.default_rng(5)
    return [
        {"kind": "step", "step": step, "time_s": 2.0 * step, "loss": float(loss), "grad_norm_max": float(norm),
         "ess": float(ess), "staleness": [step % 3, 1]}
        for step, (loss, norm, ess) in enumerate(generator.random((count, 3)), 1)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 100, 1000])
def test_bins_hold_means_extremes_and_last_steps_of_their_rows(count):
    given = rows(count)
    condensed = Condensed(max_bins=8)
    for row in given:
        condensed.add(row)
    width, bins = condensed.per_bin, condensed.rows
    assert len(bins) == -(-count // width) <= 8
    assert width == 1 or count > 4 * width
    for place, found in enumerate(bins):
        mine = given[place * width : (place + 1) * width]
        assert found["step"] == mine[-1]["step"]
        assert found["time_s"] == mine[-1]["time_s"]
        assert found["loss"] == pytest.approx(np.mean([row["loss"] for row in mine]))
        assert found["grad_norm_max"] == max(row["grad_norm_max"] for row in mine)
        assert found["ess"] == min(row["ess"] for row in mine)
        if 2 * width <= MAX_LIST:
            assert found["staleness"] == [value for row in mine for value in row["staleness"]]


def test_bins_before_the_last_do_not_change_until_all_are_halved():
    condensed = Condensed(max_bins=8)
    given = rows(200)
    for row in given[:100]:
        condensed.add(row)
    width, before = condensed.per_bin, [dict(row) for row in condensed.rows]
    condensed.add(given[100])
    assert condensed.per_bin == width
    assert list(condensed.rows)[: len(before) - 1] == before[:-1]


def test_damaged_and_missing_values_spoil_no_mean():
    row = merged({"loss": 1.0, "kl": None, "words": "a"}, 1, {"loss": None, "kl": 3.0, "new": 2.0, "words": "b"}, 1)
    assert (row["loss"], row["kl"], row["new"], row["words"]) == (1.0, 3.0, 2.0, "b")


def test_a_long_list_stays_bounded_and_keeps_its_shares():
    generator = np.random.default_rng(7)
    given = [{"step": step, "staleness": generator.choice(3, 256, p=(0.2, 0.5, 0.3)).tolist()} for step in range(12)]
    row, steps = dict(given[0]), 1
    for other in given[1:]:
        row, steps = merged(row, steps, other, 1), steps + 1
        assert len(row["staleness"]) <= MAX_LIST
    shares = [row["staleness"].count(value) / len(row["staleness"]) for value in range(3)]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.08)


def test_steps_that_a_list_stands_for_are_its_weight():
    row = merged({"staleness": [0] * MAX_LIST}, 3, {"staleness": [1] * MAX_LIST}, 1)
    assert row["staleness"].count(1) == MAX_LIST // 4


def test_damaged_values_in_a_list_are_left_out():
    row = merged({"staleness": [0, None, "x"] * MAX_LIST}, 1, {"staleness": [None] * MAX_LIST}, 1)
    assert set(row["staleness"]) == {0}


def test_pulses_are_thinned_evenly_and_the_newest_is_always_there():
    pulses = ThinnedPulses(max_pulses=10)
    assert pulses.rows == []
    for number in range(1000):
        pulses.add({"number": number})
        assert pulses.rows[-1]["number"] == number
        assert len(pulses.rows) <= 20
    numbers = [row["number"] for row in pulses.rows]
    gaps = set(np.diff(numbers[:-1]))
    assert len(gaps) == 1
    assert numbers[0] == 0
