"""Claims about measured speeds: tokens per busy second, up at once and down slowly."""

from __future__ import annotations

import pytest

from controller.runtime.throughput_gauge import SpeedGauge


def read(gauge: SpeedGauge, tokens: float, busy_s: float, incarnation: str = "a") -> float | None:
    found = gauge.read("w", incarnation, {"tokens": tokens, "busy_s": busy_s})
    return found[0] if found else None


def test_idle_time_does_not_make_a_worker_slow() -> None:
    gauge = SpeedGauge()
    assert read(gauge, 0, 0) is None
    assert read(gauge, 300, 2.0) == 150
    assert read(gauge, 300, 2.0) is None, "nothing new"


def test_small_batch_lowers_the_speed_only_slowly() -> None:
    gauge = SpeedGauge()
    read(gauge, 0, 0)
    read(gauge, 1000, 1.0)
    assert read(gauge, 1010, 2.0) == pytest.approx(901)
    assert read(gauge, 3010, 3.0) == 2000, "up at once"


def test_change_too_small_to_matter_is_no_news() -> None:
    gauge = SpeedGauge()
    read(gauge, 0, 0)
    assert read(gauge, 1000, 1.0) == 1000
    assert read(gauge, 2030, 2.0) is None


def test_steps_per_second_are_those_of_the_smallest_batch_lately() -> None:
    gauge = SpeedGauge()
    found = None
    for tokens, steps, busy_s in ((0.0, 0.0, 0.0), (6400.0, 20.0, 1.0), (6700.0, 120.0, 2.0), (7000.0, 200.0, 3.0)):
        found = gauge.read("w", "a", {"tokens": tokens, "steps": steps, "busy_s": busy_s})
    assert found is not None
    assert found[0] == pytest.approx(0.9 * (0.9 * 6400 + 30) + 30), "tokens of the full batch fade"
    assert found[1] == pytest.approx(98), "steps of the small batches count"


def test_restarted_process_starts_again() -> None:
    gauge = SpeedGauge()
    read(gauge, 0, 0)
    read(gauge, 1000, 1.0)
    assert read(gauge, 50, 1.0, "b") is None
    assert read(gauge, 150, 2.0, "b") == 100


def test_counters_without_tokens_give_no_speed() -> None:
    gauge = SpeedGauge()
    for number in range(5):
        assert gauge.read("w", "a", {"steps": 10.0 * number, "busy_s": float(number)}) is None


def test_the_first_speed_is_news_however_low_it_is() -> None:
    gauge = SpeedGauge()
    assert gauge.read("w", "a", {"tokens": 0.0, "steps": 0.0, "busy_s": 0.0}) is None
    assert gauge.read("w", "a", {"tokens": 1.0, "steps": 1.0, "busy_s": 1.0}) == (1.0, 1.0)


def test_counters_that_are_missing_are_zero() -> None:
    gauge = SpeedGauge()
    assert gauge.read("w", "a", {}) is None
    assert gauge.read("w", "a", {"tokens": 300.0, "busy_s": 2.0}) == (150.0, 0.0)


def test_busy_time_is_gathered_until_a_second_of_it_is_there() -> None:
    gauge = SpeedGauge()
    read(gauge, 0, 0)
    assert read(gauge, 500, 0.5) is None
    assert read(gauge, 1000, 0.9375) is None
    assert read(gauge, 1200, 1.0) == 1200


def test_each_worker_has_a_speed_of_its_own() -> None:
    gauge = SpeedGauge()
    for name in ("w0", "w1"):
        assert gauge.read(name, "a", {"tokens": 0.0, "busy_s": 0.0}) is None
    assert gauge.read("w0", "a", {"tokens": 100.0, "busy_s": 1.0}) == (100.0, 0.0)
    assert gauge.read("w1", "a", {"tokens": 300.0, "busy_s": 1.0}) == (300.0, 0.0)


def test_change_is_news_beyond_the_share_and_counted_from_what_was_reported_last() -> None:
    gauge = SpeedGauge()
    read(gauge, 0, 0)
    assert read(gauge, 1000, 1.0) == 1000
    assert read(gauge, 2050, 2.0) is None, "a twentieth is not more than a twentieth"
    assert read(gauge, 3101, 3.0) == 1051, "two small changes are a large one together"


def test_steps_alone_may_be_the_news() -> None:
    gauge = SpeedGauge()
    for tokens, steps, busy_s in ((0.0, 0.0, 0.0), (100.0, 10.0, 1.0)):
        gauge.read("w", "a", {"tokens": tokens, "steps": steps, "busy_s": busy_s})
    assert gauge.read("w", "a", {"tokens": 200.0, "steps": 30.0, "busy_s": 2.0}) == (100.0, 20.0)
