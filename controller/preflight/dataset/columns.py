r"""The columns of prompts, answers and solutions in a set of rows, found as for training (controller/data/table.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.errors import UserError
from controller.config.problems import nearest
from controller.data.table import ANSWER_COLUMNS, PROMPT_COLUMNS

SOLUTION_COLUMNS = ("solution", "answer", "response", "completion", "output", "rationale")
"""Columns in which a solution with its own result is looked for, in this order."""
RESULT_MARKS = ("####", "\\boxed", "\\fbox")
"""Marks of a final result within a solution."""
ROLES = ("prompt", "answer", "solution")


@dataclass(frozen=True)
class Columns:
    """Names of columns; dots address nested ones. answer: None if the rows have no answers."""

    prompt: str
    answer: str | None
    solution: str | None = None

    @staticmethod
    def plan(
        rows: Sequence[Mapping[str, Any]], mapped: Mapping[str, str | None], where: str, *, needs_answer: bool
    ) -> Columns:
        """The columns of a set, from its first rows (at least one) and the user's mapping. Raises UserError.

        mapped: by role (`prompt`, `answer`, `solution`); `answer: None` means that there are no answers. Of the known
        names that one counts first which has a value in one of the rows. needs_answer: refuse rows without a known name
        of the answer.
        """
        here = tuple(dict.fromkeys(name for row in rows for name in row))
        for role in mapped:
            if role not in ROLES:
                near = nearest(role, ROLES, count=1)
                remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(ROLES)}"
                raise UserError(f"`{role}` is not a column role", where="columns", remedy=remedy)
        prompt = mapped.get("prompt") or _first(rows, PROMPT_COLUMNS)
        if prompt is None:
            what = f"there is no column with the prompt (looked for {', '.join(PROMPT_COLUMNS)})"
            raise UserError(what, where=where, remedy=f"use --columns prompt=NAME; existing columns: {', '.join(here)}")
        answer = mapped["answer"] if "answer" in mapped else _first(rows, ANSWER_COLUMNS)
        if answer is None and needs_answer and "answer" not in mapped:
            what = f"there is no column with the answer (looked for {', '.join(ANSWER_COLUMNS)})"
            remedy = (
                "use --columns answer=NAME, or answer=null if there are no answers; existing columns: "
                f"{', '.join(here)}"
            )
            raise UserError(what, where=where, remedy=remedy)
        columns = Columns(prompt, answer, mapped.get("solution"))
        for role, name in mapped.items():
            if name is not None and all(columns.value(row, name) is None for row in rows):
                near = nearest(name, here, count=1)
                remedy = f"did you mean {near[0]}?" if near else f"use one of the existing columns: {', '.join(here)}"
                raise UserError(f"there is no column `{name}` for the {role}", where=where, remedy=remedy)
        return columns

    @property
    def answers(self) -> tuple[str, ...]:
        """Columns in which an answer is looked for."""
        return () if self.answer is None else tuple(dict.fromkeys((self.answer, *ANSWER_COLUMNS)))

    @property
    def solutions(self) -> tuple[str, ...]:
        """Columns in which a solution is looked for."""
        mapped = (self.solution,) if self.solution is not None else ()
        return tuple(dict.fromkeys((*mapped, *SOLUTION_COLUMNS, *self.answers)))

    def value(self, row: Mapping[str, Any], name: str | None) -> Any:
        """The value of a column, or of a nested one by its dotted path; None if it is missing."""
        if name is None:
            return None
        if name in row:
            return row[name]
        value: Any = row
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value


def _first(rows: Sequence[Mapping[str, Any]], known: tuple[str, ...]) -> str | None:
    """The first known name with a value in one of the rows, else the first that is there without one."""
    filled = (name for name in known if any(row.get(name) is not None for row in rows))
    present = (name for name in known if any(name in row for row in rows))
    return next(filled, None) or next(present, None)
