"""Answers of the policy to the first held-out prompts, before training and after.

Values of whole evaluations are in summary.py; training answers are stored in the ledger.

Always the first rows of the evaluation are used, so that prompts are not selected. The answers of a finished evaluation
are stored in its row of metrics.jsonl, where a resumed run finds the first and the newest of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.telemetry.journal import rows_of

NUM_ANSWERS = 3
MAX_CHARS = 2000
"""Maximum characters of a prompt or an answer in the summary."""


class EvalAnswers:
    """Collects answers. Call `record` for each answer and `finish` for each evaluation."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, dict[str, Any]]] = {}
        """Answers by row, for evaluations in progress by version."""
        self._done: dict[int, Sequence[Mapping[str, Any]]] = {}
        """Answers of the first and the newest evaluation that have any."""

    def record(self, version: int, row: int, data: Mapping[str, Any], answer: str, value: float | None) -> None:
        """Record that row number `row` with content `data` was answered by `version` and scored `value` (None: no
        score).
        """
        if row < NUM_ANSWERS and (prompt := _prompt(data)) and answer:
            found = {"row": row, "prompt": _short(prompt), "answer": _short(answer), "value": value}
            self._open.setdefault(version, {})[row] = found

    def finish(self, version: int) -> Sequence[Mapping[str, Any]]:
        """Return the answers of a finished evaluation, in order of rows."""
        rows = self._open.pop(version, {})
        for older in [other for other in self._open if other < version]:
            del self._open[older]  # dropped
        answers = [rows[row] for row in sorted(rows)]
        self._keep(version, answers)
        return answers

    def restore(self, metrics: Path, last_version: int) -> None:
        """Restore answers from metrics.jsonl of earlier sessions, up to `last_version`."""
        for row in rows_of(metrics, "eval"):
            with contextlib.suppress(KeyError, TypeError):
                if row["version"] <= last_version:
                    self._keep(row["version"], row["answers"])

    def _keep(self, version: int, answers: Sequence[Mapping[str, Any]]) -> None:
        if answers:
            self._done[version] = answers
            first, newest = min(self._done), max(self._done)
            self._done = {one: self._done[one] for one in (first, newest)}

    def before_and_after(self) -> list[dict[str, Any]]:
        """Prompts that the first and the newest evaluation share; empty unless the first is of version 0."""
        if 0 not in self._done or len(self._done) < 2:
            return []
        first, newest = self._done[0], self._done[max(self._done)]
        after = {one["row"]: one for one in newest}
        return [
            {
                "prompt": one["prompt"],
                "before": one["answer"], "value_before": one["value"],
                "after": after[one["row"]]["answer"], "value_after": after[one["row"]]["value"],
            }
            for one in first
            if one["row"] in after
        ]  # fmt: skip


def _prompt(data: Mapping[str, Any]) -> str:
    """The text of a row's prompt: `prompt`, or the last of its messages."""
    if isinstance(prompt := data.get("prompt"), str):
        return prompt
    messages = data.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content")
        return content if isinstance(content, str) else ""
    return ""


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."
