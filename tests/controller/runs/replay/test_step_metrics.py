"""Claims about comparing metrics of a step with its row."""

from __future__ import annotations

from controller.runs.replay.step_metrics import OF_EARLIER_STEPS, compare_metrics


def test_equal_metrics_are_counted_and_times_and_the_rows_own_numbers_are_not() -> None:
    row = {"loss": 0.1, "entropy": None, "step_s": 1.0, "staleness_max": 3, "kind": "step"}
    assert compare_metrics(row, {"loss": 0.1, "entropy": None, "step_s": 2.0, "staleness_max": 1.0}) == (2, None)


def test_smallest_difference_and_a_missing_metric_are_found() -> None:
    assert compare_metrics({"loss": 0.1}, {"loss": 0.1, "grad_norm": 1.0})[1] == ("grad_norm", None, 1.0)
    found = compare_metrics({"loss": 0.1}, {"loss": 0.10000000000000002})[1]
    assert found == ("loss", 0.1, 0.10000000000000002)


def test_metric_that_the_trainer_no_longer_gives_is_found_if_the_record_has_only_its_metrics() -> None:
    row = {"loss": 1.0, "entropy": None, "step_s": 2.0, "versions_mb": 3.0}
    assert compare_metrics(row, {"loss": 1.0})[1] is None, "a row has the controller's metrics as well"
    assert compare_metrics(row, {"loss": 1.0}, OF_EARLIER_STEPS, is_whole=True)[1] == ("entropy", None, None)
    assert compare_metrics(row, {"loss": 1.0, "entropy": None}, OF_EARLIER_STEPS, is_whole=True) == (2, None)


def test_metrics_of_earlier_steps_can_be_left_out() -> None:
    replayed = {"gradient_cosine": 0.5, "loss": 1.0}
    assert compare_metrics({"loss": 1.0}, replayed, OF_EARLIER_STEPS) == (1, None)
    assert compare_metrics({"loss": 1.0}, replayed)[1] == ("gradient_cosine", None, 0.5)
