"""A label is disputed only by enough answers that agree with one another, as scorer `math` compares them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from controller.runs.labels.disputed import Answers, find_disputed


def judged(label: str, finals: Sequence[str | None], **settings: float) -> list[tuple[str, int, int, int]]:
    settings = {"min_answers": 4, "min_agreement": 0.75, **settings}
    found = find_disputed([Answers("f:1", "", "p", label, finals)], **settings)  # type: ignore[arg-type]
    return [(one.answer, one.num_agree, one.num_answers, one.num_label) for one in found.disputed]


@pytest.mark.parametrize(
    ("label", "finals", "expected"),
    [
        ("5", ["6"] * 4, [("6", 4, 4, 0)]),
        ("5", ["6", "6", "6", "5"], [("6", 3, 4, 1)]),
        ("5", ["6", "6", "7", "5"], []),
        ("5", ["5"] * 4, []),
        ("5", ["6"] * 3, []),
        ("5", ["6", "6", "6", None, None], []),
        ("5", ["6", "6", "6", "6", None], [("6", 4, 4, 0)]),
        ("0.5", [r"\frac{1}{2}", "1/2", "0.5", "0.50"], []),
        ("1/3", ["0.5", "1/2", r"\frac12", "0.50"], [("0.5", 4, 4, 0)]),
    ],
)
def test_only_agreeing_answers_dispute(label: str, finals: list[str | None], expected: list[object]) -> None:
    assert judged(label, finals) == expected


def test_bounds_are_settings() -> None:
    assert judged("5", ["6", "6", "7", "5"], min_agreement=0.5) == [("6", 2, 4, 1)]
    assert judged("5", ["6"] * 2, min_answers=2) == [("6", 2, 2, 0)]


def test_strongest_evidence_comes_first_and_rows_are_counted() -> None:
    rows = [
        Answers("f:1", "", "p", "5", ["6"] * 4), Answers("f:2", "", "p", "5", ["6"] * 16),
        Answers("f:3", "", "p", "5", ["5"] * 8), Answers("f:4", "", "p", "5", ["6"]),
        Answers("f:5", "", "p", "5", ["6"] * 7 + ["5"], [f"{n}.0" for n in range(8)], (3, 9)),
    ]  # fmt: skip
    found = find_disputed(rows, min_answers=4, min_agreement=0.75)
    assert [one.where for one in found.disputed] == ["f:2", "f:1", "f:5"]
    assert (found.num_rows, found.num_judged, found.num_agreeing) == (5, 4, 1)
    assert found.disputed[2].samples == tuple(f"{n}.0" for n in range(7))
    assert found.disputed[2].versions == (3, 9)
