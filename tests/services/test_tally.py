"""Claims about what the service counts: every verdict once, seconds where scoring took any, latencies of late."""

from __future__ import annotations

import pytest

from areal_like.verdict import Verdict
from services.reward.tally import WINDOW, Tally, percentiles


@pytest.mark.parametrize(
    ("values", "p50", "p95", "p99"),
    [
        ((), 0.0, 0.0, 0.0),
        ((3.0,), 3.0, 3.0, 3.0),
        ((4.0, 1.0, 3.0, 2.0), 3.0, 4.0, 4.0),
        (tuple(float(number) for number in range(100, 0, -1)), 51.0, 96.0, 100.0),
    ],
)
def test_percentiles_are_values_that_were_seen(values: tuple[float, ...], p50: float, p95: float, p99: float) -> None:
    assert percentiles(values) == {"p50_s": p50, "p95_s": p95, "p99_s": p99}


def test_every_kind_of_verdict_is_counted_from_zero() -> None:
    tally = Tally()
    assert {kind: tally.counters()[kind] for kind in ("scored", "timed_out", "crashed", "invalid")} == dict.fromkeys(
        ("scored", "timed_out", "crashed", "invalid"), 0
    )
    tally.add_verdict(Verdict(kind="scored", value=1.0, wall_s=2.0), queue_s=0.5)
    tally.add_verdict(Verdict(kind="scored", value=1.0, wall_s=4.0), queue_s=1.5)
    tally.add_verdict(Verdict(kind="crashed", wall_s=1.0), queue_s=0.0)
    found = tally.counters()
    assert (found["scored"], found["crashed"], found["invalid"]) == (2, 1, 0)
    assert found["busy_s"] == 7.0
    assert (found["score_p50_s"], found["score_p99_s"]) == (2.0, 4.0)
    assert (found["queue_p50_s"], found["queue_p99_s"]) == (0.5, 1.5)


def test_score_out_of_the_cache_waited_in_the_queue_but_took_no_scoring() -> None:
    tally = Tally()
    tally.add_verdict(Verdict(kind="scored", value=1.0, wall_s=9.0, attempts=0), queue_s=3.0)
    found = tally.counters()
    assert found["scored"] == 1
    assert "busy_s" not in found
    assert (found["score_p99_s"], found["queue_p99_s"]) == (0.0, 3.0)


def test_seconds_and_failures_are_counted_by_scorer() -> None:
    tally = Tally()
    tally.add_attempt("scored", "", {"a": 1.0, "b": 2.0})
    tally.add_attempt("crashed", "b", {"a": 3.0, "b": 0.5})
    tally.add_attempt("timed_out", "", {})
    found = tally.counters()
    assert (found["scorer.a.answers"], found["scorer.a.busy_s"], found["scorer.a.p99_s"]) == (2, 4.0, 3.0)
    assert (found["scorer.b.answers"], found["scorer.b.busy_s"]) == (2, 2.5)
    assert found["scorer.b.crashed"] == 1
    assert not {"scorer.a.crashed", "scorer.a.scored", "scorer..timed_out"} & found.keys()


def test_latencies_are_those_of_late() -> None:
    tally = Tally()
    tally.add_verdict(Verdict(kind="scored", value=1.0, wall_s=100.0), queue_s=100.0)
    tally.add_attempt("scored", "", {"a": 100.0})
    for _ in range(WINDOW):
        tally.add_verdict(Verdict(kind="scored", value=1.0, wall_s=1.0), queue_s=2.0)
        tally.add_attempt("scored", "", {"a": 3.0})
    found = tally.counters()
    assert (found["score_p99_s"], found["queue_p99_s"], found["scorer.a.p99_s"]) == (1.0, 2.0, 3.0)
    assert found["busy_s"] == 100.0 + WINDOW, "sums are of the whole life"


def test_other_counters_rise_by_one() -> None:
    tally = Tally()
    tally.count("duplicates")
    tally.count("duplicates")
    assert tally.counters()["duplicates"] == 2
