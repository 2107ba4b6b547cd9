r"""Claims about `\boxed{...}`."""

from __future__ import annotations

import pytest

from areal_like.tasks.boxed import final_boxes, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{3} and then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{3}, no, \boxed{4", "3"),
        (r"\boxed{\boxed{3} + 1}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{(0, 1\}}", r"(0, 1\}"),
        (r"\boxed{\{0, 1)}", r"\{0, 1)"),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{\begin{pmatrix} 1 \\ {2} \end{pmatrix}}", r"\begin{pmatrix} 1 \\ {2} \end{pmatrix}"),
        (r"\boxed{}", ""),
        (r"$\boxed 5$.", "5"),
        (r"$\boxed5$.", "5"),
        (r"\fbox 5", "5"),
        (r"\boxedtext", None),
        (r"\boxed{", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_complete_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_endless_open_boxes_cost_no_time() -> None:
    assert last_boxed(r"\boxed{" * 20_000) is None


@pytest.mark.parametrize(("num_open", "content"), [(19, "5"), (20, None)])
def test_a_complete_box_counts_behind_nineteen_that_are_never_closed(num_open: int, content: str | None) -> None:
    assert last_boxed(r"\boxed{5}" + r" \boxed{" * num_open) == content


def test_boxes_that_touch_are_one_answer_and_of_nested_ones_the_innermost_counts() -> None:
    assert final_boxes(r"\boxed{1}\boxed{2}") == ["1", "2"]
    assert final_boxes(r"\boxed{1 \boxed{2}}") == ["2"]
    assert final_boxes(r"\boxed{1} or \boxed{2}, maybe $\boxed{3}$") == ["1", "2", "3"]
    assert final_boxes(r"\boxed{1} but rather \boxed{2}") == ["2"]
    assert final_boxes(r"it is \boxed 5") == ["5"]
    assert final_boxes("nothing") == []
