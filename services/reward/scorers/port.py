"""The interface of scorers.

A scorer may hang or die, because it is killed from outside. Weights and sums are in composition.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class ScorerInput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer with its metadata. row: the data row; num_tokens: length of the answer in tokens."""

    row: dict[str, Any]
    response: str
    finish_reason: str
    num_tokens: int


class CannotJudge(Exception):
    """This sample cannot be judged by this scorer (no gold answer in the row, ...): the verdict is `invalid`."""


class TookTooLong(Exception):
    """The scorer's own deadline passed while it waited: the verdict is `timed_out`."""


class Scorer(Protocol):
    """Judges one answer at a time, in a process of the pool.

    `score` returns the value under the key "value" and may add named components; evaluation averages `correct` (0 or
    1); a text under "remark" becomes the verdict's reason. It may raise CannotJudge or TookTooLong; any
    other exception is a crash of this one sample. A scorer with an attribute `is_deterministic` that is False (a judge
    that samples, a score that depends on the time) is never answered from the cache of exact duplicates.
    """

    version: str

    def warm_up(self) -> None:
        """Load and compile what the first sample would otherwise have to wait for."""
        ...

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        """Judge one answer.

        Args:
            sample: the data row, the text of the answer and its finish reason.

        Returns:
            The value under "value", named components, and optionally a text under "remark".

        Raises:
            CannotJudge: the row lacks what the scorer needs; the verdict is `invalid`.
            TookTooLong: the scorer's own deadline passed; the verdict is `timed_out`.

        Example:
            A scorer that accepts answers which contain the gold answer:

                def score(self, sample):
                    return {"value": float(sample.row["answer"] in sample.response)}
        """
        ...
