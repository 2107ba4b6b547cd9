"""Renders the texts for judge models from a template and a sample: Jinja over `prompt`, `response`, `answer` and `row`.

Templates are validated by scorer_options.fault_of_template. Data of a sample is never parsed as a template.
"""

from __future__ import annotations

from typing import Any

from jinja2 import UndefinedError

from areal_like.templates import FILLING_ERRORS, compiled
from services.reward.scorers.port import CannotJudge, ScorerInput


class SampleTemplate:
    """One template, compiled once."""

    def __init__(self, text: str) -> None:
        """Raises jinja2.TemplateError."""
        self._template = compiled(text)

    def fill(self, sample: ScorerInput, max_response_chars: int) -> str:
        """The text for one sample. Raises CannotJudge if the row lacks a name that the template uses."""
        names: dict[str, Any] = {"row": sample.row, "response": sample.response[-max_response_chars:]}
        if (prompt := prompt_of(sample.row)) is not None:
            names["prompt"] = prompt
        if "answer" in sample.row:
            names["answer"] = sample.row["answer"]
        try:
            return self._template.render(names)
        except UndefinedError as error:
            raise CannotJudge(f"the row lacks a field that the template uses: {error}") from error
        except FILLING_ERRORS as error:
            raise CannotJudge(f"the template fails on this row ({type(error).__name__}: {error})") from error


def prompt_of(row: dict[str, Any]) -> str | None:
    """The row's prompt as text; a conversation as its turns, each with its role. None if there is neither."""
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)
