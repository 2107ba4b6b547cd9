"""The port every scorer sits behind.

Owns: the sample a scorer sees, what it gives back, the error for a sample it cannot judge. Refuses: processes, time
limits (a scorer may hang or die: it is killed from outside), weights and sums (composition).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class ScorerInput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and what is known of it. row: the data row; num_tokens: length of the answer in tokens."""

    row: dict[str, Any]
    response: str
    finish_reason: str
    num_tokens: int


class CannotJudge(Exception):
    """This sample cannot be judged by this scorer (no gold answer in the row, ...): the verdict is `invalid`."""


class TookTooLong(Exception):
    """What the scorer waits for did not come within the scorer's own deadline: the verdict is `timed_out`."""


class Scorer(Protocol):
    """Judges one answer at a time, in a process of its own pool.

    `score` gives the value under the key "value" and may add named components; `correct` (0 or 1) is what evaluation
    averages; a text under "remark" becomes the verdict's reason. It may raise CannotJudge or TookTooLong; any
    other exception is a crash of this one sample. A scorer with an attribute `is_deterministic` that is False (a judge
    that samples, a score that depends on the time) is never answered from the cache of exact duplicates.
    """

    version: str

    def warm_up(self) -> None:
        """Load and compile what the first sample would otherwise wait for."""
        ...

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        """Judge one answer.

        Args:
            sample: the data row, the text of the answer and how it ended.

        Returns:
            The value under "value", named components, and a text under "remark" where there is one.

        Raises:
            CannotJudge: the row has nothing to compare with; the verdict is `invalid`.
            TookTooLong: the scorer's own deadline passed; the verdict is `timed_out`.

        Example:
            A scorer that accepts answers which contain the gold answer:

                def score(self, sample):
                    return {"value": float(sample.row["answer"] in sample.response)}
        """
        ...
