"""How the comparison with TRL tunes both sides, and what it makes of its rows."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import peer_trl
from benchmarks.measured import Measured
from benchmarks.steady import crossing


def test_seed_that_never_got_there_is_named_and_has_no_ratio():
    def one(side, seed, time_s, rate):
        return {"side": side, "seed": seed, "time_to_s": time_s, "samples_per_s": rate}

    rows = [one("ours", 1, 10.0, 8.0), one("trl", 1, 50.0, 2.0), one("ours", 2, 10.0, 8.0), one("trl", 2, None, 2.0)]
    result = peer_trl.compare(rows)
    assert result["time_ratio"]["pairs"] == [5.0]
    assert result["samples_ratio"]["pairs"] == [4.0, 4.0]
    assert result["never"] == [{"side": "trl", "seed": 2}]


@pytest.mark.processes
def test_both_sides_are_tuned_and_what_was_tried_is_kept(tmp_path, monkeypatch):
    def measured(side, seed, settings, num_batches=0):
        if settings.get("is_continuous"):
            return {"failed": "no such backend"}
        time_s = {"2e-4": 9.0, "4e-4": 5.0, "8e-4": None}[settings["lr"]]
        slower = 2.0 if settings["mini_batches"] == 2 and side == "ours" else 0.5
        time_s = time_s and time_s * (slower if settings["mini_batches"] == 2 else 1.0)
        time_s = time_s and time_s * (0.9 if settings.get("max_staleness") == 1 else 1.0)
        if seed == peer_trl.TUNING_SEEDS[1] and settings.get("max_staleness") == 1:
            time_s = None  # what was best on the first seed fails on the second
        return {"time_to_s": time_s, "samples_per_s": float(settings.get("micro_batch", 1)), "best": 0.5}

    contest = peer_trl.Contest(0.9, 90, tmp_path, Measured(None))
    monkeypatch.setattr(contest, "_ours", partial(measured, "ours"))
    monkeypatch.setattr(contest, "_trl", partial(measured, "trl"))
    assert contest.tuned("ours", peer_trl.RATES) == {
        "mini_batches": 1, "proximal": "behaviour", "dual_clip": 3, "lr": "4e-4"
    }  # fmt: skip
    assert contest.tuned("trl", peer_trl.RATES) == {
        "mini_batches": 2, "micro_batch": 192, "is_continuous": False, "lr": "4e-4"
    }  # fmt: skip
    assert len(contest.tried) == (7 + 2) + 4 + (5 + 2)
    assert [row["failed"] for row in contest.tried if "failed" in row] == ["no such backend"]


def test_a_run_is_enough_once_an_evaluation_is_there(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert not peer_trl.has_reached(tmp_path, 0.9)
    metrics.write_text(
        '{"kind":"eval","accuracy":null}\n{"kind":"eval","accuracy":0.85}\n{"kind":"eval","accuracy":0.9'
    )
    assert not peer_trl.has_reached(tmp_path, 0.9)  # the last line is not all there yet
    with metrics.open("a") as file:
        file.write("5}\n")
    assert peer_trl.has_reached(tmp_path, 0.9)


def test_accuracy_is_reached_on_a_straight_line_between_evaluations():
    curve = [(5, 10.0, 0.5), (10, 20.0, 0.8), (15, 40.0, 1.0), (20, 50.0, 0.6)]
    assert crossing(curve, 0.9) == pytest.approx(30.0)
    assert crossing(curve, 0.8) == pytest.approx(20.0)
    assert crossing(curve, 0.4) == 10.0  # nobody looked before
    assert crossing(curve[:2], 0.9) is None
