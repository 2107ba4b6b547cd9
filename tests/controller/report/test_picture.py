"""Claims about the layout of the pictures, measured on the drawn sheet."""

from __future__ import annotations

from itertools import combinations

import pytest
from made_run import made_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox
from report_run import HOSTILE, report_run

from controller.report.charts import Axis, Chart, Series
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.picture import draw_chart, run_sheet, sheet
from controller.report.run_charts import sections
from controller.report.timeline import read_timeline


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def sheet_of(data: RunData):
    return drawn(run_sheet(data, diagnose(data), sections(data), read_timeline(data)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The drawn sheet of a run; not to be changed."""
    return sheet_of(RunData.load(report_run(tmp_path_factory.mktemp("plain"))))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Of a run that brings text of its own wherever it may."""
    return sheet_of(RunData.load(report_run(tmp_path_factory.mktemp("hostile"), words=HOSTILE)))


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_nothing_on_the_sheet_overlaps_or_is_cut_off(request, name):
    figure = request.getfixturevalue(name)
    legends = [axes.get_legend() for axes in figure.axes]
    boxes = [
        Bbox.union([axes.get_tightbbox(), *([legend.get_window_extent()] if legend else [])])
        for axes, legend in zip(figure.axes, legends, strict=True)
    ]
    for one, other in combinations(boxes, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert width <= 1 or height <= 1, (one, other)
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1


def test_legends_cover_neither_data_nor_title(plain):
    with_legend = [axes for axes in plain.axes if axes.get_legend() is not None]
    assert len(with_legend) > 10
    for axes in with_legend:
        legend, title = axes.get_legend().get_window_extent(), axes._left_title.get_window_extent()
        assert legend.y0 >= axes.get_window_extent().y1 - 4, axes.get_title("left")
        assert title.y0 >= legend.y1 - 4, axes.get_title("left")


def test_a_long_name_does_not_squeeze_the_charts(hostile):
    widths = [axes.get_window_extent().width for axes in hostile.axes]
    assert min(widths) > 0.2 * hostile.bbox.width


def test_a_run_with_nothing_to_draw_gives_a_small_sheet_in_words():
    figure = sheet_of(made_run(steps=[], pulses=[]))
    assert len(figure.axes) == 2
    assert any("no process has recorded its main activity" in text.get_text() for text in figure.axes[-1].texts)


def test_a_dollar_sign_begins_no_formula():
    chart = Chart("k", "cost $x_{y", Axis("run $\\frac{"), Axis("$"), [Series("$a_{$", [1, 2], [1.0, 2.0])])
    figure = drawn(sheet("100 $ \\alpha$", [], [[chart]]))
    assert figure.axes[1].get_title("left") == "cost \\$x_{y"


def test_one_point_is_seen():
    figure = sheet("t", [], [[Chart("k", "one", Axis("step"), Axis("y"), [Series("s", [1], [2.0])])]])
    assert figure.axes[1].lines[0].get_marker() == "o"


def test_an_empty_chart_says_why():
    figure = sheet("t", [], [[Chart("k", "none", Axis("x"), Axis("y"), missing="nobody came")]])
    draw_chart(figure.axes[1], Chart("k", "none", Axis("x"), Axis("y"), missing="nobody came"))
    assert figure.axes[1].texts[0].get_text() == "nobody came"
