"""Claims about what the charts of a run hold, before anything is drawn."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import made_run, stats, step_rows
from report_run import report_run

from areal_like.verdict import COUNTED
from controller.report import colours
from controller.report.charts import MAX_POINTS, Chart, clock, column, curve, elapsed_s, number, running_mean
from controller.report.data import RunData
from controller.report.flow_charts import MAX_LINES, staleness_classes, staleness_over_time
from controller.report.run_charts import evaluations, sections


@pytest.fixture(scope="module")
def charts(tmp_path_factory) -> dict[str, Chart]:
    data = RunData.load(report_run(tmp_path_factory.mktemp("runs")))
    return {chart.key: chart for section in sections(data) for chart in section.charts}


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.1."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_chart_of_a_whole_run_has_numbers_and_labelled_axes(charts):
    for chart in charts.values():
        assert not chart.is_empty, chart.key
        assert chart.x.label, chart.key
        assert chart.y.label, chart.key
        assert chart.caption, chart.key


def test_every_number_of_a_chart_is_finite_or_a_gap(charts):
    for chart in charts.values():
        for series in chart.series:
            assert len(series.xs) == len(series.ys)
            assert all(y is None or math.isfinite(y) for y in series.ys), (chart.key, series.name)


def test_times_lengths_and_divergences_have_a_unit(charts):
    units = {key: charts[key].y.unit for key in ("chart-kl", "chart-entropy", "chart-lengths", "chart-memory")}
    assert units == {"chart-kl": "nats per token", "chart-entropy": "nats per token", "chart-lengths": "tokens",
                     "chart-memory": "MB"}  # fmt: skip
    assert charts["chart-flight"].x.unit == "s"


def test_no_two_series_of_a_chart_look_alike(charts):
    for chart in charts.values():
        looks = [(series.colour, series.dash, series.emphasis) for series in chart.drawn]
        assert len(set(looks)) == len(looks), chart.key


def test_every_colour_a_chart_names_is_in_both_palettes(charts):
    named = {series.colour for chart in charts.values() for series in chart.series}
    named |= {colours.activity_colour(name) for name in ("generate", "wait:batch", "unknown", "idle")}
    assert named <= set(colours.LIGHT)
    assert set(colours.LIGHT) == set(colours.DARK)


@pytest.mark.parametrize("palette", [colours.LIGHT, colours.DARK])
def test_categories_and_words_stand_out_from_the_paper(palette):
    for name, value in palette.items():
        if name.startswith("c") or name in ("bad", "warn"):
            assert contrast(value, palette["paper"]) >= 3.0, name
        if name in ("ink", "muted"):
            assert contrast(value, palette["paper"]) >= 4.5, name


def test_a_run_without_steps_says_so_in_each_chart():
    data = made_run(steps=[], pulses=[])
    for section in sections(data):
        for chart in section.charts:
            assert chart.is_empty, chart.key
            assert chart.missing, chart.key


def test_damaged_values_become_gaps():
    values = [None, "x", True, 10**400, math.nan, 2]
    assert column([{"loss": value} for value in values], "loss") == [None, None, None, None, None, 2.0]
    assert number(-math.inf) is None


def test_a_long_series_is_thinned_and_keeps_its_peaks():
    ys = [0.0] * 10_000
    ys[4321] = 7.0
    thin = curve("norm", [float(n) for n in range(10_000)], list(ys), by=max)
    assert len(thin.xs) <= MAX_POINTS
    assert max(y for y in thin.ys if y is not None) == 7.0


def test_a_run_with_a_critic_alone_has_its_charts():
    rows = step_rows(3)
    keys = {c.key for s in sections(made_run(steps=rows)) for c in s.charts}
    critics = {"chart-value-loss", "chart-critic"}
    assert not keys & critics
    more = {"value_loss": 0.5, "explained_variance": 0.1, "value_clip_fraction": 0.0}
    found = sections(made_run(steps=[{**row, **more} for row in rows]))
    assert {c.key for s in found for c in s.charts} == keys | critics


def test_several_sets_and_answers_per_row_have_a_chart_of_their_own():
    plain = {"kind": "eval", "version": 1, "accuracy": 0.5}
    more = {**plain, "accuracy/math": 0.4, "pass_at_4": 0.8, "pass_at_4/math": 0.7}
    for row, names in ((plain, []), (more, ["accuracy/math", "pass_at_4", "pass_at_4/math"])):
        found = evaluations(dataclasses.replace(made_run(steps=step_rows(3)), evals=[row]))
        assert [series.name for chart in found for series in chart.series] == names
        assert all(series.ys for chart in found for series in chart.series)


def test_a_run_of_several_turns_alone_has_their_chart():
    single = {"turns_mean": 1.0, "turns_max": 1.0, "trajectories_per_sample": 1.0}
    for numbers, is_there in ((single, False), ({**single, "turns_max": 3.0}, True)):
        found = sections(made_run(steps=[{**row, **numbers} for row in step_rows(3)]))
        assert ("chart-turns" in {c.key for s in found for c in s.charts}) == is_there


def charts_of(by_step: dict[str, list[tuple[int, float]]]) -> dict[str, Chart]:
    samples = stats(np.zeros(8), components_by_step=by_step)
    found = sections(made_run(steps=step_rows(3), samples=samples))
    return {chart.key: chart for section in found for chart in section.charts}


def test_counts_of_an_agent_do_not_take_the_place_of_reward_components():
    counts = {name: [(1, 2.0)] for name in (*COUNTED, "turns", "tool_s", "agent_rendered_again")}
    found = charts_of({**counts, "correct": [(1, 0.5), (2, 0.75)], "style": [(1, 0.25)]})
    shown = found["chart-components"]
    assert [(series.name, list(series.ys)) for series in shown.series] == [("correct", [0.5, 0.75]), ("style", [0.25])]
    assert "not shown" not in shown.caption
    assert charts_of(counts)["chart-components"].is_empty


def test_components_that_do_not_fit_the_chart_are_counted_and_named():
    found = charts_of({f"part_{number}": [(1, 0.5)] for number in range(10)})["chart-components"]
    assert [series.name for series in found.series] == [f"part_{number}" for number in range(8)]
    assert found.caption.endswith("2 more components are not shown: part_8, part_9.")
    many = charts_of({f"part_{number}": [(1, 0.5)] for number in range(30)})["chart-components"]
    assert "22 more components are not shown: part_8," in many.caption
    assert many.caption.endswith("part_15 and others.")


def test_calls_of_tools_and_their_time_have_charts_where_there_are_calls():
    ran = {"tool_calls": [(1, 3.0), (2, 4.0)], "tool_raised": [(1, 1.0), (2, 0.0)], "tool_unknown": [(1, 0.5)],
           "tool_truncated": [(1, 0.0)], "tool_s": [(1, 0.5), (2, 0.25)]}  # fmt: skip
    found = charts_of(ran)
    calls = {series.name: (list(series.xs), list(series.ys)) for series in found["chart-tools"].series}
    assert calls == {
        "calls": ([1.0, 2.0], [3.0, 4.0]), "failed calls": ([1.0, 2.0], [1.5, 0.0]), "truncated results": ([1.0], [0.0])
    }  # fmt: skip
    assert list(found["chart-tool-time"].series[0].ys) == [0.5, 0.25]
    agent = charts_of({"agent_tool_calls": [(1, 3.0)], "agent_malformed_calls": [(1, 1.0)]})
    assert [list(series.ys) for series in agent["chart-tools"].series] == [[4.0], [1.0], []]
    assert "chart-tool-time" not in agent
    for without in ({}, {"agent_tool_calls": [(1, 0.0)], "agent_malformed_calls": [(1, 0.0)]}):
        assert "chart-tools" not in charts_of(without)


def test_a_thinned_chart_says_so():
    chart = next(
        c for s in sections(made_run(steps=step_rows(3 * MAX_POINTS))) for c in s.charts if c.key == "chart-loss"
    )
    assert "Each point stands for 3 steps." in chart.caption


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=40), st.integers(1, 12))
def test_running_mean_is_the_mean_of_what_is_known(ys, window):
    for place, mean in enumerate(running_mean(ys, window)):
        known = [y for y in ys[max(0, place + 1 - window) : place + 1] if y is not None]
        assert mean == (pytest.approx(sum(known) / len(known)) if known else None)


@given(st.integers(0, 10**6))
def test_classes_of_staleness_are_few_and_cover_every_value_once(highest):
    classes = staleness_classes(highest)
    assert len(classes) <= colours.NUM_RAMP
    assert classes[0][0] == 0
    assert classes[-1][1] >= highest
    assert all(after[0] == before[1] + 1 for before, after in pairwise(classes))


def test_shares_of_staleness_add_up_in_every_bar():
    steps = [{"step": n + 1, "staleness": [n % 5, n % 40, 3]} for n in range(500)]
    chart = staleness_over_time(steps)
    for shares in zip(*(series.ys for series in chart.series), strict=True):
        assert sum(shares) == pytest.approx(1.0, abs=1e-4)
    widths = {round(after - before, 6) for before, after in pairwise(chart.series[0].xs)}
    assert len(widths) == 1


def test_the_clock_of_a_resumed_run_goes_on():
    assert elapsed_s([1, 5, 9, 2, 4]) == [1, 5, 9, 11, 13]
    axis, times = clock([0.0, 3600.0, 60.0])
    assert (axis.unit, times) == ("min", [0.0, 60.0, 61.0])


def test_memory_of_many_processes_draws_the_largest_and_says_how_many_are_left_out(tmp_path):
    data = RunData.load(report_run(tmp_path, num_workers=12, has_traces=False, has_ledger=False, num_steps=5))
    chart = next(c for s in sections(data) for c in s.charts if c.key == "chart-memory")
    assert len(chart.series) == MAX_LINES
    assert "6 more are omitted" in chart.caption
