"""Claims about which held-out answers are shown, whatever a damaged row contains."""

from __future__ import annotations

import pytest

from controller.report.answers import MAX_CHARS, MAX_PROMPTS, AnswerPair, held_out_answers


def evaluation(version: int, *rows: int, **more) -> dict:
    answers = [{"row": row, "prompt": f"prompt {row}", "answer": f"{version}.{row}", "value": 1.0} for row in rows]
    return {"version": version, "answers": answers, **more}


def words(pairs: list[AnswerPair]) -> list[tuple[str, list[str]]]:
    return [(pair.prompt, [answer.text for answer in pair.answers]) for pair in pairs]


def test_first_and_newest_evaluation_are_compared_on_the_prompts_they_share():
    found = held_out_answers([evaluation(0, 2, 0, 1), evaluation(5, 0), evaluation(9, 1, 2, 3)])
    assert words(found) == [("prompt 1", ["0.1", "9.1"]), ("prompt 2", ["0.2", "9.2"])]
    assert [answer.label for answer in found[0].answers] == ["version 0", "version 9"]


def test_one_evaluation_has_one_answer_a_prompt_and_evaluations_without_answers_are_passed_over():
    only = [{"version": 0}, evaluation(4, 0), {"version": 8, "answers": []}]
    assert words(held_out_answers(only)) == [("prompt 0", ["4.0"])]
    assert held_out_answers([]) == []


@pytest.mark.parametrize("damage", [None, "x", 7, [None], [{"row": 0}], [{"row": [], "prompt": "", "answer": ""}]])
def test_damaged_answers_are_left_out(damage):
    assert held_out_answers([{"version": 0, "answers": damage}]) == []


def test_texts_are_bounded_and_printable():
    row = {"row": 0, "prompt": "\u202e" + "p" * 9999, "answer": ["not", "text"], "value": float("nan")}
    rows = [{**row, "row": place} for place in range(50)]
    found = held_out_answers([{"version": 1, "answers": rows}])
    assert len(found) == MAX_PROMPTS
    assert len(found[0].prompt) == MAX_CHARS
    assert found[0].prompt.startswith("\\u202ep")
    assert (found[0].answers[0].text, found[0].answers[0].score) == ("['not', 'text']", "no score")
