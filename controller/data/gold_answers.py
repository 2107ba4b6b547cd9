"""Reference answers of data rows in the forms that a model may write, to test whether a scorer can give a reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "#{}", "The answer is {}.", "<answer>{}</answer>", "```python\n{}\n```")
"""Texts in which common scorers find a final answer."""
MAX_ROWS, MAX_COLUMNS, MAX_CHARS = 3, 4, 20_000
CODE_COLUMNS = ("code", "canonical_solution", "solution")
"""Columns with the reference answer of rows of programs."""


def gold_answers(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, str]]:
    """(row, column, response) to test, for the first rows. A reference program counts as column `answer`."""
    for number, row in enumerate(rows[:MAX_ROWS]):
        texts = {name: text for name, value in row.items() if (text := _text(value))}
        names = [name for name in texts if name != "answer"][:MAX_COLUMNS]
        for column in ["answer", *names] if "answer" in texts else names:
            for form in FORMS:
                yield number, column, form.format(texts[column])
        if "answer" not in texts:
            for column in CODE_COLUMNS:
                if column in texts:
                    yield number, "answer", FORMS[-1].format(texts[column])


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(value).strip()
    return text if len(text) <= MAX_CHARS else ""
