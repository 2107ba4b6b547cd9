"""Minimum amount of data for a finding to be reported as a verdict.

    steps    findings about the policy and what it learns from: MIN_STEPS steps
    groups   findings about discarded groups: MIN_STEPS steps, or as many groups as these need
    pulses   scoring that stalls: MIN_PULSES pulses, which are measurements of all processes at least 2 s apart
    both     findings about waits, and shares of a step: MIN_STEPS steps and MIN_PULSES pulses

All other findings are events that hold for a run of any length: it crashed, a process was lost, an invariant was
broken. A share of answers without a score is a count and has its own minimum in waits.py. A warning about an unstable
policy is given from the third step on while the run is in progress (learning.py), because it would be too late
otherwise; decision 0033 has its rate of false alarms. The cause of a failure needs no minimum, because its reason is
recorded.
"""

from __future__ import annotations

from controller.report.data import RunData, number
from controller.report.finding import Kind

MIN_STEPS = 8
"""Start and end of a run take about a step each, and means over two steps at each end must not overlap by half."""
MIN_PULSES = 5
"""Ten seconds: in less time, shares only describe the start."""
STEPS: frozenset[Kind] = frozenset({
    "policy_collapsed", "policy_worse", "no_signal", "answers_cut", "solved", "length_shift",
    "source_shift", "batches_not_full", "reward_hacked", "length_hacked", "format_hacked", "environment_forged",
})  # fmt: skip
GROUPS: frozenset[Kind] = frozenset({"groups_filtered", "groups_dropped"})
PULSES: frozenset[Kind] = frozenset({"scoring_stalls"})
BOTH: frozenset[Kind] = frozenset({
    "rollouts_too_few", "trainer_bound", "no_overlap", "slow_swaps", "slow_staging", "machine_busy",
})  # fmt: skip


def has_enough(data: RunData, kind: Kind) -> bool:
    """Return whether the run is long enough for a finding of this kind."""
    if kind in STEPS:
        return has_steps(data)
    if kind in GROUPS:
        return has_steps(data) or has_groups(data)
    if kind in PULSES:
        return has_pulses(data)
    return kind not in BOTH or (has_steps(data) and has_pulses(data))


def has_steps(data: RunData) -> bool:
    """Return whether MIN_STEPS steps are done."""
    return len(data.steps) >= MIN_STEPS


def has_groups(data: RunData) -> bool:
    """Return whether as many groups were drawn as MIN_STEPS steps need, whether or not they were used."""
    counts = data.pulses[-1]["counts"] if data.pulses else {}
    drawn = number(data.summary, "groups_drawn", number(counts, "drawn", 0.0))
    return drawn >= MIN_STEPS * number(data.config, "groups_per_step")


def has_pulses(data: RunData) -> bool:
    """Return whether MIN_PULSES pulses are known. Runs of older layouts have none; for them steps and summary are
    used.
    """
    return not data.pulses or len(data.pulses) >= MIN_PULSES
