"""Rows for environments that define their own tasks: each row only numbers an episode. The rows are generated, not
files.

The environment draws the task of an episode from its seed, or uses the row's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import pydantic
from pydantic import Field

from areal_like.errors import UserError
from areal_like.settings import Settings
from areal_like.tasks.running_sum import Split

NO_ANSWER = "(known to the environment)"
"""Value of `answer` in rows whose columns have none."""


class EpisodesOptions(Settings):
    """Options of the generator."""

    prompt: str = Field("Task:\n", min_length=1)
    """Prompt of the policy, before the environment's first observation."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """Further columns of every row, for the environment."""


def rows(
    seed: int, split: Split, *, limit: int | None = None, options: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of `prompt`, `answer`, `episode` (from 0), `split` and the columns; endless without a limit.

    `seed` is not used: the environment draws the task. Raises UserError for a bad option.

    Example:
        >>> list(rows(1, "train", limit=1, options={"prompt": "Play."}))
        [{'answer': '(known to the environment)', 'prompt': 'Play.', 'episode': 0, 'split': 'train'}]
    """
    checked = _parsed(options)
    for number in islice(count(), limit):
        own = {"prompt": checked.prompt, "episode": number, "split": split}
        yield {"answer": NO_ANSWER, **checked.columns, **own}


def _parsed(options: Mapping[str, Any] | None) -> EpisodesOptions:
    try:
        return EpisodesOptions.model_validate(dict(options or {}))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(EpisodesOptions.model_fields)
        raise UserError(first["msg"], where=f"episodes options.{key}", remedy=f"options are {known}") from error
