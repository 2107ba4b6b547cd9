"""The charts of a live page: the report's charts that need no samples, and staleness with its bound.

The charts are defined in report/run_charts.py and report/flow_charts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.report import flow_charts as flow
from controller.report import offline_charts, run_charts
from controller.report.charts import Axis, Chart, Rows, Section, column, level, number, of_steps
from controller.report.data import RunData
from controller.run_folder.run_folder import is_from_files


@dataclass(frozen=True)
class PulseCharts:
    """The charts over time, which change with each pulse and not with each step."""

    in_flight: Chart
    machine: Sequence[Chart]

    @staticmethod
    def of(data: RunData) -> PulseCharts:
        """Make the charts."""
        return PulseCharts(
            flow.in_flight(data), (flow.memory(data), flow.processor_time(data), flow.reward_queue(data))
        )


def sections(data: RunData, every_step: RunData, per_bin: int, pulses: PulseCharts) -> list[Section]:
    """Sections with at least one chart that has numbers.

    Args:
        data: steps merged into bins.
        every_step: the same with each step's reward, for the running mean.
        per_bin: steps of a bin; captions name it.
        pulses: the charts over time.
    """
    if is_from_files(data.state):
        found = offline_charts.sections(data)
    else:
        steps = data.steps
        found = [
            Section("learning", "Learning", (run_charts.learning(every_step),)),
            Section("speed", "Throughput", (flow.throughput(steps), flow.samples_rate(steps), flow.waiting(steps),
                                            flow.step_time(steps), pulses.in_flight)),
            Section("staleness", "Staleness", (staleness(data), flow.staleness_over_time(steps))),
            Section("answers", "Answers", (run_charts.lengths(data), run_charts.cut_share(steps),
                                           *run_charts.turns(steps))),
            Section("optimisation", "Optimisation", (run_charts.entropy(steps), run_charts.kl(steps),
                                                     run_charts.clip_fraction(steps),
                                                     run_charts.effective_samples(steps), run_charts.gradient(data),
                                                     run_charts.loss(steps), *run_charts.critic(steps))),
            Section("machine", "Memory and cores", pulses.machine),
        ]  # fmt: skip
    kept = [Section(one.key, one.title, [_said(c, per_bin) for c in one.charts if not c.is_empty]) for one in found]
    return [section for section in kept if section.charts]


def staleness(data: RunData) -> Chart:
    """Staleness of the groups of each step, and its bound."""
    lines = [("staleness_max", "highest", "c1"), ("staleness_mean", "mean", "c0")]
    bound = number(data.setting("staleness.max_staleness"))
    y = Axis("staleness", "versions", bottom=0.0)
    caption = "Versions by which the groups of a step were behind the policy it trained."
    more = level("bound", column(data.steps, "step"), bound)
    return of_steps(data.steps, "chart-staleness-bound", "Staleness and its bound", y, lines, caption, more=more)


def _said(chart: Chart, per_bin: int) -> Chart:
    """Add a sentence about merged steps to the captions."""
    is_merged = per_bin > 1 and chart.x.label == "step" and chart.key not in ("chart-learning",)
    return replace(chart, caption=f"{chart.caption} Each point stands for {per_bin} steps.") if is_merged else chart


def last(rows: Rows, key: str) -> float | None:
    """The newest number of a field."""
    return next((value for value in map(number, (row.get(key) for row in reversed(rows))) if value is not None), None)
