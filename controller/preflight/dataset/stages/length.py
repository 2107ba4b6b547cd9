"""Stage `length`: prompts and answers that are too short or too long."""

from __future__ import annotations

from pydantic import Field

from areal_like.settings import Settings
from controller.preflight.dataset.port import Finding, Row, RowStage


class LengthOptions(Settings):
    """Options of stage `length`, in characters without surrounding spaces."""

    min_prompt: int = Field(10, ge=0)
    """Shortest prompt that is kept."""
    max_prompt: int = Field(10_000, gt=0)
    """Longest prompt that is kept."""
    max_answer: int = Field(2_000, gt=0)
    """Longest final answer that is kept."""
    max_solution: int = Field(50_000, gt=0)
    """Longest solution that is kept."""


class Length(RowStage[LengthOptions]):
    """See the module."""

    name = "length"
    Options = LengthOptions

    def check(self, row: Row) -> Finding | None:
        options = self.options
        length = len(row.prompt.strip())
        if length < options.min_prompt:
            return Finding(
                "short prompt", f"the prompt has {length} characters, but the minimum is {options.min_prompt}"
            )
        for what, text, most in (
            ("prompt", row.prompt, options.max_prompt),
            ("answer", row.answer, options.max_answer),
            ("solution", row.solution, options.max_solution),
        ):
            if len(text.strip()) > most:
                return Finding(f"long {what}", f"{len(text.strip()):,} characters, but the maximum is {most:,}")
        return None
