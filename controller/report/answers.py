"""Sample answers of a run as shown: held-out prompts by version, and training answers of one prompt next to each other.

Held-out answers are stored in the rows of evaluations (telemetry/eval_answers.py). Training answers are in the ledger;
the commands read them (runs/answer_pairs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.report.charts import Rows, number
from controller.report.overview import text

MAX_CHARS = 1200
"""Characters of a prompt or an answer; the end of a longer one is left out."""
MAX_PROMPTS = 8


@dataclass(frozen=True)
class Answer:
    """One answer. `label` names the version or the sample; `score` is `scored 0.5`, or `no score`."""

    label: str
    score: str
    text: str

    @staticmethod
    def of(label: str, value: Any, answer: Any) -> Answer:
        """Make text printable and bounded."""
        score = number(value)
        return Answer(text(label, 120), "no score" if score is None else f"scored {score:.3g}", text(answer, MAX_CHARS))


@dataclass(frozen=True)
class AnswerPair:
    """A prompt and answers to it: before and after training, or the one with the highest and the lowest reward."""

    prompt: str
    answers: Sequence[Answer]


def held_out_answers(evals: Rows) -> list[AnswerPair]:
    """Answers to the same held-out prompts by the first and the newest evaluation that stored any, in order of prompts.

    evals: rows of evaluations in order of versions. With one such evaluation each prompt has one answer.
    """
    stored = [(row["version"], found) for row in evals if (found := _by_row(row))]
    if not stored:
        return []
    shown = [stored[0], *stored[1:][-1:]]
    shared = [row for row in stored[0][1] if all(row in answers for _, answers in shown)]
    return [
        AnswerPair(
            prompt=text(shown[0][1][row]["prompt"], MAX_CHARS),
            answers=[
                Answer.of(f"version {version}", answers[row].get("value"), answers[row]["answer"])
                for version, answers in shown
            ],
        )
        for row in sorted(shared)[:MAX_PROMPTS]
    ]


def _by_row(evaluation: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Answers of an evaluation by number of the row; damaged ones are left out."""
    found = evaluation.get("answers")
    return {
        one["row"]: one
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and type(one.get("row")) is int and "prompt" in one and "answer" in one
    }
