"""Claims about the report of a run from files: its charts, its verdict, no talk of samples."""

from __future__ import annotations

from pathlib import Path

from made_run import made_run

from areal_like.metrics import JsonlLog
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.offline_charts import order, sections
from controller.run_folder.run_folder import RunFolder

STEPS = [{"step": n, "loss": 2.0 / n, "grad_norm": 1.0, "lr": 0.1, "trainer_tokens_per_s": 5.0} for n in (1, 2, 3)]


def run(*losses: float, **more: object) -> RunData:
    evals = [{"version": 3 * n, "accuracy": 0.25 + n / 2, "loss": loss} for n, loss in enumerate(losses)]
    data = made_run(
        steps=[dict(row) for row in STEPS], pulses=[], evals=evals, settings={"data": {"eval": "f"}}, **more
    )
    data.state["objective"] = "sft"
    return data


def test_charts_show_training_and_held_out_loss_side_by_side() -> None:
    charts = {chart.key: chart for section in sections(run(2.0, 0.5)) for chart in section.charts}
    assert [series.name for series in charts["chart-loss"].series] == ["rows of the step", "held-out rows"]
    assert list(charts["chart-loss"].series[1].ys) == [2.0, 0.5]
    assert charts["chart-learning"].series[0].name == "exact match of held-out rows"
    assert {key for row in order(sections(run(2.0))) for key in row} <= set(charts)
    assert "chart-margin" not in charts


def test_preferences_have_a_chart_of_margins() -> None:
    data = run(2.0, 0.5)
    for number, row in enumerate([*data.steps, *data.evals]):
        row["margin"] = float(number)
    charts = {chart.key: chart for section in sections(data) for chart in section.charts}
    assert list(charts["chart-margin"].series[1].ys) == [3.0, 4.0]
    assert ["chart-margin", "chart-gradient"] in order(sections(data))


def test_charts_without_numbers_say_why() -> None:
    charts = {chart.key: chart for section in sections(run()) for chart in section.charts}
    assert charts["chart-learning"].is_empty
    assert charts["chart-learning"].missing == "there is no evaluation"


def test_verdict_compares_the_held_out_rows_before_and_after() -> None:
    found = diagnose(run(2.0, 0.5))[0]
    assert found.severity == "good"
    assert "accuracy 0.250 to 0.750, loss 2.000 to 0.500" in found.detail


def test_a_rising_held_out_loss_is_a_warning() -> None:
    found = diagnose(run(0.5, 2.0))[0]
    assert found.severity == "warning"
    assert "the loss on held-out rows has risen" in found.title
    assert "epochs" in found.advice


def test_a_run_that_failed_says_so_first() -> None:
    found = diagnose(run(2.0, kind="failed", reason="the disk is full"))
    assert "failed" in found[0].title


def test_a_missing_ledger_is_no_problem_of_a_run_from_files(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "r")
    folder.config.write_text("name: r\n")
    folder.write_state("finished", command="sft", objective="sft")
    folder.summary.write_text("{}")
    log = JsonlLog(folder.metrics)
    for row in ({"kind": "offline", "objective": "sft"}, {"kind": "step", **STEPS[0]}):
        log.append(row)
    log.close()
    assert RunData.load(folder).problems == []
