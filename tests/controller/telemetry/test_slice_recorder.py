"""What is recorded of an evaluation's slices, and when a weak slice is named."""

from __future__ import annotations

import json
from typing import Any

from controller.data.eval_slices import Slice
from controller.report.slices import as_text
from controller.telemetry.slice_recorder import MAX_EXAMPLES, MAX_KEPT, SliceRecorder

ROWS = [{"prompt": f"p{place}", "answer": "7", "topic": "ab"[place % 2]} for place in range(80)]


def recorder(names: tuple[str, ...] = ("topic",), num_samples: int = 1) -> SliceRecorder:
    return SliceRecorder(
        lambda: [(Slice("topic", row["topic"]),) for row in ROWS], lambda number: ROWS[number // num_samples],
        names=names, num_samples=num_samples,
    )  # fmt: skip


def evaluate(one: SliceRecorder, version: int, values: list[float | None]) -> dict | None:
    for number, value in enumerate(values):
        one.record(version, number, number + 1, f"answer {number}", value)
    return one.finish(version, values)


def test_a_weak_slice_has_its_first_wrong_answers_as_examples():
    values = [float(place % 2 == 0 or place >= 60) for place in range(80)]
    found = evaluate(recorder(), 4, values)
    assert found is not None
    json.dumps(found)
    strong, weak = found["slices"]
    assert (strong["value"], strong["accuracy"], strong["is_weak"]) == ("a", 1.0, False)
    assert "examples" not in strong
    assert (weak["value"], weak["rows"], weak["solved"], weak["is_weak"]) == ("b", 40, 10, True)
    assert weak["low"] < 0.25 < weak["high"]
    assert len(weak["examples"]) == MAX_EXAMPLES
    assert weak["examples"][0] == {"row": 1, "prompt": "p1", "answer": "answer 1", "expected": "7"}


def test_a_slice_is_named_once_when_it_is_weak_twice_in_succession_and_one_of_answer_lengths_never():
    one = recorder(("topic", "answer_length"))
    values = [float(place % 2 == 0 and place < 60) for place in range(80)]
    found = evaluate(one, 1, values)
    assert found is not None
    assert any(part["by"] == "answer_length" and part["is_weak"] for part in found["slices"])
    sound = {"slices": []}
    assert one.new_weak(found) == []
    assert one.new_weak(sound) == []
    assert one.new_weak(found) == [], "not in succession"
    again = evaluate(one, 2, values)
    assert again is not None
    assert [words.partition(" is solved")[0] for words in one.new_weak(again)] == ["evaluation: topic b"]
    assert one.new_weak(again) == []


def test_a_resumed_run_knows_the_weak_slices_of_earlier_sessions():
    values = [float(place % 2 == 0) for place in range(80)]
    found = evaluate(recorder(), 1, values)
    assert found is not None
    rows = [{"version": 0, "slices": [{"by": 1}, "x"]}, {"version": "x"}, *({"version": n, **found} for n in (1, 2))]
    for last_version, num_named in ((0, 0), (1, 1), (2, 0)):  # not weak before, once, and already named
        one = recorder()
        one.restore(rows, last_version)
        assert len(one.new_weak(found)) == num_named


def test_wrong_answers_are_grouped_with_examples():
    one = recorder(num_samples=2)
    for number in range(160):
        one.record(3, number, 1, "" if number % 4 == 0 else "it is 8", float(number % 2))
    found = one.finish(3, [float(number % 2) for number in range(160)])
    assert found is not None
    assert [(group["kind"], group["name"], group["wrong"]) for group in found["clusters"]] == [
        ("form", "empty", 40), ("form", "wrong by one", 40)
    ]  # fmt: skip
    assert found["clusters"][0]["examples"][0] == {"row": 0, "prompt": "p0", "answer": "", "expected": "7"}
    assert len(found["clusters"][0]["examples"]) == MAX_EXAMPLES
    words = as_text(found)
    assert "answer: wrong by one: 40 answers wrong" in words
    assert "answer:   it is 8" in words


def test_a_row_whose_prompt_has_a_phrase_is_wrong_if_most_of_its_answers_are():
    rows = [{"prompt": f"{'carry' if place < 30 else 'plain'} {place}", "answer": "7"} for place in range(120)]
    one = SliceRecorder(
        lambda: [(Slice("x", str(n % 2)),) for n in range(120)], rows_of(rows), names=("x",), num_samples=3
    )
    values = [float(number // 3 >= 30 or number % 3 == 0) for number in range(360)]
    found = evaluate(one, 1, values)
    assert found is not None
    (group,) = [group for group in found["clusters"] if group["kind"] == "phrase"]
    assert (group["name"], group["wrong"], group["solved"]) == ("carry #", 30, 0)
    assert group["examples"][0]["prompt"] == "carry 0"


def rows_of(rows: list[dict]) -> Any:
    return lambda number: rows[number // 3]


def test_answers_without_a_score_do_not_count_and_the_rows_of_several_answers_do_once():
    values = [None if place < 8 else float(place % 3 == 0) for place in range(160)]
    found = evaluate(recorder(num_samples=2), 1, values)
    assert found is not None
    assert sum(one["answers"] for one in found["slices"]) == 152
    assert sum(one["rows"] for one in found["slices"]) == 76
    assert found["slices"][0]["by"] == "topic"


def test_an_evaluation_is_reported_once_and_what_was_dropped_is_forgotten():
    one = recorder()
    one.record(1, 0, 5, "dropped", 0.0)
    values: list[float | None] = [1.0] * 80
    assert evaluate(one, 2, values) is not None
    assert one.finish(2, values) is None, "the final evaluation uses the results of the last one"
    assert one.finish(1, values) is None
    assert evaluate(one, 3, [None] * 80) is None


def test_examples_are_bounded():
    one = recorder()
    for number in range(MAX_KEPT + 100):
        one.record(1, number, 1, "x" * 5_000, 0.0)
    assert len(one._wrong[1]) == MAX_KEPT
    assert all(len(text) < 600 for text in one._wrong[1].values())
