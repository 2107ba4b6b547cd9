"""The outcome of scoring one answer. Errors are not zeros (`verdicts-not-zeros`): only `scored` has a number.

The coordinator's policy decides what other kinds mean for a group.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

VerdictKind = Literal["scored", "timed_out", "crashed", "invalid", "refused"]
FORGED_TEXT = "forged_text"
"""Component of the verdict of an answer with text that only its environment or the chat template should write
(rollout/forged_text.py)."""
FAILED_CALLS = (
    "agent_malformed_calls", "tool_malformed", "tool_unknown", "tool_wrong_arguments", "tool_raised", "tool_timed_out",
)  # fmt: skip
"""Components that count calls of tools that failed, by kind."""
COUNTED = (
    "agent_requests", "agent_refused", "agent_retries", "agent_disconnects", "agent_tool_calls", "tool_calls",
    "tool_truncated", "observation_over_context", *FAILED_CALLS,
)  # fmt: skip
"""Components that are counts and no parts of a reward: calls, and errors of agents, tools and policies. They are also
counters of the worker, over all samples, with or without a reward."""
MAX_REASON_CHARS = 500
"""Longest reason that services and rollout workers create."""


REFUSED: VerdictKind = "refused"
"""A stage of `rollout.safety` refuses the answer: it is not trained on, and it has no reward."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of scoring one answer.

    value: the reward, finite, only for `scored` (None otherwise). components: named parts of the value, unweighted.
    reason: why there is no score, or a note. wall_s: seconds spent scoring. scorer: name and version.
    failed_in: name of the scorer that failed, empty if unknown. attempts: number of attempts; 0 for a score from the
    cache of exact duplicates.

    Raises:
        ValueError: a `scored` verdict has no finite `value`, or another kind has one.

    Example:
        >>> Verdict(kind="scored", value=1.0).is_scored, Verdict(kind="timed_out").value
        (True, None)
    """

    kind: VerdictKind
    value: float | None = None
    components: dict[str, float] = {}
    reason: str = ""
    wall_s: float = 0.0
    scorer: str = ""
    failed_in: str = ""
    attempts: int = 1

    def __post_init__(self) -> None:
        if self.kind == "scored":
            if self.value is None or not math.isfinite(self.value):
                raise ValueError(f"a verdict of kind `scored` must have a finite value, not {self.value}")
        elif self.value is not None:
            raise ValueError(f"a verdict of kind {self.kind} must not have a value")

    @property
    def is_scored(self) -> bool:
        """True if the verdict has a reward."""
        return self.kind == "scored"
