"""Claims about the answers that are shown before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.telemetry.eval_answers import MAX_CHARS, NUM_ANSWERS, EvalAnswers


def evaluated(answers: EvalAnswers, version: int, *rows: int) -> list[int]:
    for row in rows:
        answers.record(version, row, {"prompt": f"p{row}"}, f"a{row} of {version}", float(version))
    return [one["row"] for one in answers.finish(version)]


def test_only_the_first_rows_are_kept_in_their_order() -> None:
    assert evaluated(EvalAnswers(), 0, NUM_ANSWERS, 2, 0, 1) == [0, 1, 2]


def test_before_is_version_0_and_after_the_newest_on_the_prompts_that_both_have() -> None:
    answers = EvalAnswers()
    assert answers.before_and_after() == []
    evaluated(answers, 0, 0, 1)
    assert answers.before_and_after() == []
    evaluated(answers, 20, 0, 1)
    evaluated(answers, 40, 1, 2)
    (found,) = answers.before_and_after()
    assert found == {
        "prompt": "p1", "before": "a1 of 0", "value_before": 0.0, "after": "a1 of 40", "value_after": 40.0,
    }  # fmt: skip


def test_an_evaluation_of_another_version_than_0_is_no_before() -> None:
    answers = EvalAnswers()
    evaluated(answers, 20, 0)
    evaluated(answers, 40, 0)
    assert answers.before_and_after() == []


def test_answers_of_an_evaluation_that_was_given_up_are_forgotten() -> None:
    answers = EvalAnswers()
    answers.record(0, 0, {"prompt": "p"}, "a", 1.0)
    evaluated(answers, 20, 0)
    assert answers.finish(0) == []


def test_a_resumed_run_finds_what_its_checkpoint_covers_and_half_a_line_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first, answers = EvalAnswers(), EvalAnswers()
    answers.restore(path, 40)
    lines = []
    for version in (0, 20, 40, 60):
        first.record(version, 0, {"prompt": "p"}, f"a of {version}", 1.0)
        row = {"kind": "eval", "version": version, "answers": first.finish(version)}
        lines.append(json.dumps(row, separators=(",", ":")))
    path.write_text("\n".join([*lines, '{"kind":"eval","version":2,"answers":[{', '{"kind":"note"}']))
    answers.restore(path, 40)
    (found,) = answers.before_and_after()
    assert (found["before"], found["after"]) == ("a of 0", "a of 40")


@pytest.mark.parametrize(
    ("data", "answer", "prompt"),
    [
        ({"prompt": "p"}, "a", "p"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "a", "u"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a", None),
        ({"terms": [1]}, "a", None),
        ({"prompt": "p"}, "", None),
        ({"prompt": "p" * (MAX_CHARS + 1)}, "a", "p" * MAX_CHARS + " ..."),
    ],
)
def test_a_prompt_is_text_and_is_not_long(data: dict[str, object], answer: str, prompt: str | None) -> None:
    answers = EvalAnswers()
    answers.record(0, 0, data, answer, None)
    assert [one["prompt"] for one in answers.finish(0)] == ([] if prompt is None else [prompt])
