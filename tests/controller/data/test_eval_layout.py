"""Numbers of an evaluation's answers."""

from __future__ import annotations

from controller.data.eval_layout import EvalItem, EvalLayout, SetSize


def test_one_set_with_one_answer_per_row_is_numbered_as_its_rows() -> None:
    layout = EvalLayout({"": SetSize(9, 7, 3)})
    assert [layout[number] for number in range(7)] == [EvalItem("", row, 0) for row in range(7)]
    assert [layout.table_row(number) for number in range(7)] == list(range(7))
    assert (layout.num_final, layout.num_periodic, layout.is_plain) == (7, 3, True)


def test_a_periodic_evaluation_is_the_first_answers_of_a_final_one() -> None:
    sizes = {"a": SetSize(5, 3, 2), "b": SetSize(9, 4, 1), "c": SetSize(2, 2, 2)}
    layout = EvalLayout(sizes, num_samples=4)
    items = [layout[number] for number in range(layout.num_final)]
    assert len(set(items)) == len(items) == 9 * 4
    assert not layout.is_plain
    periodic = items[: layout.num_periodic]
    assert {(name, row) for name, row, _ in periodic} == {("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1)}
    starts = {"a": 0, "b": 5, "c": 14}
    for number, (name, row, sample) in enumerate(items):
        assert layout.table_row(number) == starts[name] + row
        assert sample == number % 4
