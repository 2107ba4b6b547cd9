"""Slices in the diagnosis, in the report's page and on a terminal."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from made_run import made_run, titles

from controller.data.eval_slices import Slice
from controller.report.charts import Section
from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.page import run_page
from controller.report.slices import as_text, falls, table
from controller.report.timeline import Timeline
from controller.telemetry.slice_recorder import SliceRecorder

TOPICS = [f"t{place % 8}" for place in range(400)]
ROWS = [{"prompt": f"<b>{place}</b>", "answer": "7"} for place in range(400)]


def evaluations(seed: int, shares: list[dict[str, float]], base: float = 0.75) -> list[dict[str, Any]]:
    """Rows of kind `slices` of one evaluation per entry, 10 versions apart; an entry: share of solved rows by topic, if
    it is not `base`.
    """
    rng = np.random.default_rng(seed)
    recorder = SliceRecorder(lambda: [(Slice("topic", one),) for one in TOPICS], ROWS.__getitem__, names=("topic",))
    found = []
    for place, share in enumerate(shares):
        values = [float(rng.random() < share.get(topic, base)) for topic in TOPICS]
        for number, value in enumerate(values):
            recorder.record(place * 10, number, 5, "wrong" if value == 0 else "right", value)
        fields = recorder.finish(place * 10, values)
        assert fields is not None
        found.append({"kind": "slices", "version": place * 10, **fields})
    return found


def run(seed: int, shares: list[dict[str, float]]) -> RunData:
    return made_run(kind="running", slices=evaluations(seed, shares))


def kinds(data: RunData) -> set[str]:
    return {finding.kind for finding in diagnose(data)}


def test_a_planted_weakness_is_named_before_the_run_ends_in_nine_of_ten_runs():
    named = [titles(diagnose(run(seed, [{"t3": 0.35}] * 3))) for seed in range(10)]
    assert sum("weak in 1 slice of the evaluation: topic t3 is solved in" in words for words in named) >= 9


def test_a_slice_that_becomes_worse_is_named_in_nine_of_ten_runs():
    found = [kinds(run(seed, [{"t3": 0.9}, {"t3": 0.9}, {"t3": 0.35}])) for seed in range(10)]
    assert sum("slice_worse" in one for one in found) >= 9


def test_no_slice_is_named_in_nine_of_ten_sound_runs():
    found = [kinds(run(seed, [{}] * 5)) for seed in range(20)]
    assert sum(not one & {"slice_weak", "slice_worse"} for one in found) >= 18


def test_evaluations_of_other_rows_are_not_compared():
    """800 rows of which the first 200, those of periodic evaluations, are easier in one topic."""
    is_easy = [topic == "t3" and place < 200 for place, topic in enumerate(TOPICS * 2)]
    slices = [(Slice("topic", topic),) for topic in TOPICS * 2]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        recorder = SliceRecorder(lambda: slices, lambda number: ROWS[number % 400], names=("topic",))
        found = []
        for version, num_rows in ((0, 800), (10, 200), (20, 200), (30, 800)):
            values = [float(rng.random() < (0.98 if is_easy[number] else 0.5)) for number in range(num_rows)]
            for number, value in enumerate(values):
                recorder.record(version, number, 5, "", value)
            found.append({"kind": "slices", "version": version, **(recorder.finish(version, values) or {})})
        assert falls(found) == []
        assert all("since version 0" in line.change for line in table(found))
        assert all("since version 10" in line.change for line in table(found[:3]))
        assert all(not line.change for line in table(found[:2]))


def test_a_policy_that_becomes_worse_everywhere_has_no_slice_that_does():
    found = [falls(evaluations(seed, [{}]) + evaluations(seed, [{}, {}], base=0.3)[1:]) for seed in range(10)]
    assert sum(not one for one in found) >= 9


def test_a_weak_slice_is_the_verdict_of_an_evaluation():
    data = run(0, [{"t3": 0.2}])
    data.state["command"] = "eval"
    assert diagnose(data)[0].kind == "slice_weak"


def test_the_table_begins_with_weak_slices_and_says_what_changed():
    lines = table(evaluations(0, [{}, {"t5": 0.2}]))
    assert [line.is_weak for line in lines] == [True] + [False] * 7
    assert lines[0].name == "topic t5"
    assert "since version 0" in lines[0].change
    assert table([]) == []
    assert table([{"version": 0, "slices": [{"by": 1}, "x", {"by": "a", "value": "b", "is_weak": True}]}]) == []


def test_page_and_terminal_show_the_slices_and_examples_as_text():
    data = run(0, [{"t3": 0.2}])
    page = run_page(data, diagnose(data), [Section("learning", "Learning", [])], Timeline())
    assert '<section id="slices">' in page
    assert re.search(r"<pre>&lt;b&gt;\d+&lt;/b&gt;</pre><pre>wrong</pre>", page)
    assert not re.search(r"<b>\d+</b></pre>", page)
    words = as_text(data.slices[-1])
    assert "! topic t3" in words
    assert "expected: 7" in words
    assert "No slice is solved less often" in as_text(evaluations(0, [{}])[0])
    assert as_text({"slices": []}) == "no property of the rows divides the evaluation into slices\n"


def test_a_run_without_slices_has_no_section():
    data = made_run()
    page = run_page(data, diagnose(data), [Section("learning", "Learning", [])], Timeline())
    assert 'id="slices"' not in page
