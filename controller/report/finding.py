"""One thing worth telling about a run, and how its words are made.

Owns: `Finding` and its kinds, `Rated` (with its place in the order), words for shares and numbers. Refuses: finding
anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

Severity = Literal["bad", "warning", "good", "info"]
"""`bad`: the run fails at its purpose; `warning`: it works and wastes, or will fail; `info`: good to know."""

Kind = Literal[
    # verdicts on a run that nothing is wrong with, or too little is known of
    "healthy", "too_short", "stopped", "evaluation", "supervised", "offline",
    # how a run ended that went wrong; `Finding.cause` has the cause
    "crashed", "failed",
    # the ledger
    "audit_broken", "audit_impossible",
    # the policy
    "policy_collapsed", "policy_worse", "policy_unstable", "updates_skipped", "gradients_aligned",
    "held_out_loss_rises",
    # scores
    "scoring_stalls", "scoring_fails",
    # what can be learned from
    "no_signal", "groups_filtered", "answers_cut", "solved", "length_shift",
    # who waits for whom
    "rollouts_too_few", "trainer_bound", "no_overlap",
    # lost work
    "groups_dropped",
    # the machine
    "processes_lost", "version_not_loaded", "memory_grows", "slow_swaps", "slow_staging", "weights_on_disk",
    "sink_down", "batches_not_full", "damaged_files",
]  # fmt: skip
"""What a finding is about: stable names for programs. A kind keeps its meaning when its words change."""
DEATHS: tuple[Kind, ...] = ("crashed", "failed")
KINDS: tuple[Kind, ...] = get_args(Kind)

_ORDER: dict[Severity, int] = {"bad": 0, "warning": 1, "good": 2, "info": 3}


@dataclass(frozen=True)
class Finding:
    """One finding in plain words; `advice` and `predicted` may be empty."""

    kind: Kind
    severity: Severity
    title: str
    """One sentence with the decisive numbers."""
    detail: str = ""
    """What it rests on."""
    advice: str = ""
    """What to change, with the keys of the configuration."""
    predicted: str = ""
    """What the change would bring, and by which model."""
    cause: str = ""
    """Of a run that crashed or failed: what ended it (ending.Cause); else empty."""


class Weight(IntEnum):
    """Order within one severity: what makes everything below it meaningless comes first."""

    OUTCOME = 100
    """The run is no more: it crashed or failed."""
    AUDIT = 90
    """An invariant of the ledger was broken: no other number can be trusted."""
    POLICY = 80
    """The policy is spoilt: throughput no longer matters."""
    REWARD = 70
    """Scores fail or stall: rollouts and trainer wait for that alone."""
    SIGNAL = 60
    """There is nothing to learn from."""
    WAIT = 50
    """Somebody waits for somebody else."""
    LOSS = 40
    """Work is thrown away."""
    MACHINE = 30
    """Processes, memory, sinks, swaps."""
    REMARK = 10


@dataclass(frozen=True)
class Rated:
    """A finding with its weight; a greater share of the same kind comes first."""

    weight: Weight
    finding: Finding
    share: float = 0.0

    @property
    def order(self) -> tuple[int, int, float]:
        """Sorts the most important first."""
        return _ORDER[self.finding.severity], -int(self.weight), -(self.share if math.isfinite(self.share) else 0.0)


def percent(share: float) -> str:
    """A share of one as per cent, finer where it is small."""
    if not math.isfinite(share):
        return "an unknown share"
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= abs(value) < 0.95 else f"{value:.0f} %"


def figure(value: float) -> str:
    """A number of three digits for people."""
    if not math.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def sentences(*parts: str) -> str:
    """Those that are not empty, as sentences."""
    found = [part.strip() for part in parts if part.strip()]
    return " ".join(part if part[-1] in ".!?:" else part + "." for part in found)


def capital(text: str) -> str:
    """With a capital letter, unless it begins with a key of the configuration."""
    return text if "." in text.split(" ")[0] else text[:1].upper() + text[1:]
