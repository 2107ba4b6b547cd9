"""Charts of a run from files.

Charts of a run with rollouts are in run_charts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.report.charts import NO_STEPS, STEP, Axis, Chart, Section, Series, column, curve, number, of_steps
from controller.report.data import RunData
from controller.report.flow_charts import memory
from controller.report.run_charts import eval_points, gradient

MEASURES = {
    "sft": "exact match of held-out rows",
    "dpo": "held-out pairs whose chosen answer has the higher reward",
    "reward_model": "held-out pairs whose chosen answer has the higher score",
}
"""Meaning of `accuracy`, by objective."""
ROWS = (("chart-learning", "chart-loss"), ("chart-margin", "chart-gradient"), ("chart-lr", "chart-throughput"))
"""Rows of report.png; charts that a run does not have are left out."""


def sections(data: RunData) -> list[Section]:
    """All charts of a run from files; charts without numbers say why."""
    return [
        Section("learning", "Learning", (accuracy(data), loss(data), *margin(data))),
        Section("optimisation", "Optimisation", (gradient(data), learning_rate(data))),
        Section("speed", "Throughput", (throughput(data), memory(data))),
    ]


def order(found: Sequence[Section]) -> list[list[str]]:
    """Keys of the charts in the rows of report.png."""
    known = {chart.key for section in found for chart in section.charts}
    return [[key for key in row if key in known] for row in ROWS]


def accuracy(data: RunData) -> Chart:
    """The evaluations' accuracy."""
    name = MEASURES.get(str(data.state.get("objective")), "accuracy on held-out rows")
    points = eval_points(data)
    series = [Series(name, [v for v, _ in points], [a for _, a in points], "dots", "c1", "dash")] if points else []
    y = Axis("accuracy", is_share=True, bottom=0.0, top=1.0)
    caption = f"{name[0].upper()}{name[1:]}, by number of steps."
    missing = "there is no evaluation" if data.steps else NO_STEPS
    return Chart("chart-learning", "Accuracy", STEP, y, series, caption, missing)


def loss(data: RunData) -> Chart:
    """Loss of the steps and of the evaluations."""
    series = [curve("rows of the step", column(data.steps, "step"), column(data.steps, "loss"), colour="c0")]
    points = [(float(row["version"]), number(row.get("loss"))) for row in data.evals]
    known = [(version, value) for version, value in points if value is not None]
    series.append(Series("held-out rows", [v for v, _ in known], [y for _, y in known], "dots", "c1", "dash"))
    caption = (
        "The loss that is minimised. If it rises on held-out rows while it falls on training rows, the model memorises "
        "the training rows."
    )
    return Chart("chart-loss", "Loss", STEP, Axis("loss", "nats"), series if data.steps else [], caption, NO_STEPS)


def margin(data: RunData) -> tuple[Chart, ...]:
    """Margin between chosen and rejected answers; None for a run without preferences."""
    points = [(float(row["version"]), number(row.get("margin"))) for row in data.evals]
    known = [(version, value) for version, value in points if value is not None]
    if not known and not any("margin" in row for row in data.steps):
        return ()
    series = [
        curve("pairs of the step", column(data.steps, "step"), column(data.steps, "margin"), colour="c0"),
        Series("held-out pairs", [v for v, _ in known], [y for _, y in known], "dots", "c1", "dash"),
    ]
    caption = "Mean difference between the reward of the chosen answer and that of the rejected one."
    return (Chart("chart-margin", "Margin", STEP, Axis("margin", "nats"), series, caption, NO_STEPS),)


def learning_rate(data: RunData) -> Chart:
    """Learning rate schedule."""
    caption = "Learning rate of each update."
    lines = [("lr", "learning rate", "c2")]
    return of_steps(data.steps, "chart-lr", "Learning rate", Axis("learning rate", bottom=0.0), lines, caption)


def throughput(data: RunData) -> Chart:
    """Tokens per second while a step computes."""
    lines = [("trainer_tokens_per_s", "trained", "c0")]
    caption = "Tokens of a step, divided by its duration without evaluations and checkpoints."
    return of_steps(data.steps, "chart-throughput", "Throughput", Axis("tokens/s", bottom=0.0), lines, caption)
