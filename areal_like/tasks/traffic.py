"""Rows of the workflow `traffic`: each stands for a conversation that a client will have. They have no content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from areal_like.errors import UserError

NOTHING = "(a conversation of a client)"
"""Value of `prompt` and `answer`, which every row must have."""


def rows(*, limit: int | None = None, options: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `answer` and `conversation` (from 0); endless without a limit. Raises UserError for an option:
    there is none.

    Example:
        >>> list(rows(limit=1))
        [{'prompt': '(a conversation of a client)', 'answer': '(a conversation of a client)', 'conversation': 0}]
    """
    if options:
        raise UserError(
            "the task `traffic` has no options",
            where=f"traffic options.{next(iter(options))}",
            remedy="remove this option",
        )
    for number in islice(count(), limit):
        yield {"prompt": NOTHING, "answer": NOTHING, "conversation": number}
