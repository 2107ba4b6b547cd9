"""One finding about a run, and helpers for its text.

`Rated` adds the place in the order. Findings are made in waits.py, learning.py, teaching.py and upkeep.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

Severity = Literal["bad", "warning", "good", "info"]
"""`bad`: the run does not achieve its purpose; `warning`: it works but wastes resources, or will fail; `info`: useful
to know.
"""

Kind = Literal[
    # verdicts on a run without problems, or with too little data
    "healthy", "too_short", "stopped", "evaluation", "supervised", "offline",
    # the end of a crashed or failed run; `Finding.cause` is the cause
    "crashed", "failed",
    # the ledger
    "audit_broken", "audit_impossible",
    # the policy
    "policy_collapsed", "policy_worse", "policy_unstable", "updates_skipped", "gradients_aligned",
    "held_out_loss_rises", "reward_hacked", "length_hacked", "format_hacked", "environment_forged",
    # scores
    "scoring_stalls", "scoring_fails",
    # what the samples can teach
    "no_signal", "groups_filtered", "answers_cut", "solved", "length_shift", "source_shift",
    # parts of the evaluation
    "slice_weak", "slice_worse",
    # waits
    "rollouts_too_few", "trainer_bound", "no_overlap",
    # lost work
    "groups_dropped",
    # the machine
    "processes_lost", "version_not_loaded", "memory_grows", "slow_swaps", "slow_staging", "weights_on_disk",
    "sink_down", "batches_not_full", "damaged_files", "machine_busy", "workers_scaled",
]  # fmt: skip
"""Subject of a finding: stable names for programs. A kind keeps its meaning when its text changes."""
DEATHS: tuple[Kind, ...] = ("crashed", "failed")
KINDS: tuple[Kind, ...] = get_args(Kind)

_ORDER: dict[Severity, int] = {"bad": 0, "warning": 1, "good": 2, "info": 3}


@dataclass(frozen=True)
class Finding:
    """One finding as text; `advice` and `predicted` may be empty."""

    kind: Kind
    severity: Severity
    title: str
    """One sentence with the decisive numbers."""
    detail: str = ""
    """The evidence."""
    advice: str = ""
    """What to change, with the keys of the configuration."""
    predicted: str = ""
    """Predicted effect of the change, and the model."""
    cause: str = ""
    """For a run that crashed or failed: the cause (ending.Cause); else empty."""


class Weight(IntEnum):
    """Order within one severity: a finding that makes the ones below it meaningless comes first."""

    OUTCOME = 100
    """The run crashed or failed."""
    AUDIT = 90
    """An invariant of the ledger was broken: no other number can be trusted."""
    POLICY = 80
    """The policy is ruined: throughput no longer matters."""
    REWARD = 70
    """Scores fail or stall: rollouts and trainer wait only for that."""
    SIGNAL = 60
    """The samples teach nothing."""
    WAIT = 50
    """A part of the run waits for another."""
    LOSS = 40
    """Work is discarded."""
    MACHINE = 30
    """Processes, memory, sinks, swaps."""
    REMARK = 10


@dataclass(frozen=True)
class Rated:
    """A finding with its weight; of the same weight, a greater share comes first."""

    weight: Weight
    finding: Finding
    share: float = 0.0

    @property
    def order(self) -> tuple[int, int, float]:
        """Sort key: most important first."""
        return _ORDER[self.finding.severity], -int(self.weight), -(self.share if math.isfinite(self.share) else 0.0)


def percent(share: float) -> str:
    """A share as percent, with more digits if it is small."""
    if not math.isfinite(share):
        return "an unknown share"
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= abs(value) < 0.95 else f"{value:.0f} %"


def figure(value: float) -> str:
    """A number with three significant digits."""
    if not math.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sentences(*parts: str) -> str:
    """Join the non-empty texts as sentences."""
    found = [part.strip() for part in parts if part.strip()]
    return " ".join(part if part[-1] in ".!?:" else part + "." for part in found)


def capital(text: str) -> str:
    """Capitalise the text, unless it begins with a key of the configuration."""
    return text if "." in text.split(" ")[0] else text[:1].upper() + text[1:]
