"""What a scorer says of one answer. Errors are not zeros (`verdicts-not-zeros`): only `scored` carries a number.

Owns: the verdict type and its checks. Refuses: deciding what a non-score does to its group (the coordinator's policy).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

VerdictKind = Literal["scored", "timed_out", "crashed", "invalid"]
MAX_REASON_CHARS = 500
"""Of a reason, as services and rollout workers make one."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of scoring one answer.

    value: the reward, finite, only for `scored` (None otherwise). components: named parts of the value, unweighted.
    reason: why there is no score, or a remark. wall_s: seconds spent scoring. scorer: name and version.
    failed_in: name of the scorer that gave no score, empty where it is not known. attempts: how many times it was
    tried; 0 for a score out of the cache of exact duplicates.

    Raises:
        ValueError: `value` is not finite where it is `scored`, or is given where it is not.

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
                raise ValueError(f"a scored verdict needs a finite value, not {self.value}")
        elif self.value is not None:
            raise ValueError(f"a verdict of kind {self.kind} carries no value")

    @property
    def is_scored(self) -> bool:
        """True where the verdict carries a reward."""
        return self.kind == "scored"
