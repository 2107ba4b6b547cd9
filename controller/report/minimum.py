"""How much of a run must be known before a finding may be a verdict.

Owns: the minimum of steps and pulses, which kinds need which. Refuses: finding anything.

    steps    findings about the policy and what it learns from: MIN_STEPS steps
    groups   findings about groups that were thrown away: MIN_STEPS steps, or as many groups as these need
    pulses   scoring that stalls: MIN_PULSES pulses, looks at all processes that are 2 s apart or more
    both     findings about who waits for whom, and shares of a step: MIN_STEPS steps and MIN_PULSES pulses

Everything else is an event that is true however short the run is: it crashed, a process was lost, an invariant was
broken; and so is a share of answers without a score, which is a count (waits.py has its own minimum). An unstable
policy is warned of from the third step on while the run goes on (learning.py): the warning comes too late else, and
decision 0033 has its false alarms. The cause of a failure needs no minimum either: its reason is recorded.
"""

from __future__ import annotations

from controller.report.data import RunData, number
from controller.report.finding import Kind

MIN_STEPS = 8
"""Start and end of a run cost about a step each, and means over two steps at each end must not overlap by half."""
MIN_PULSES = 5
"""Ten seconds: shares of less are shares of a start."""
STEPS: frozenset[Kind] = frozenset({
    "policy_collapsed", "policy_worse", "no_signal", "answers_cut", "solved", "length_shift", "batches_not_full",
})  # fmt: skip
GROUPS: frozenset[Kind] = frozenset({"groups_filtered", "groups_dropped"})
PULSES: frozenset[Kind] = frozenset({"scoring_stalls"})
BOTH: frozenset[Kind] = frozenset({"rollouts_too_few", "trainer_bound", "no_overlap", "slow_swaps", "slow_staging"})


def has_enough(data: RunData, kind: Kind) -> bool:
    """The run is long enough for a finding of this kind."""
    if kind in STEPS:
        return has_steps(data)
    if kind in GROUPS:
        return has_steps(data) or has_groups(data)
    if kind in PULSES:
        return has_pulses(data)
    return kind not in BOTH or (has_steps(data) and has_pulses(data))


def has_steps(data: RunData) -> bool:
    """MIN_STEPS steps are done."""
    return len(data.steps) >= MIN_STEPS


def has_groups(data: RunData) -> bool:
    """As many groups were drawn as MIN_STEPS steps need, whatever became of them."""
    counts = data.pulses[-1]["counts"] if data.pulses else {}
    drawn = number(data.summary, "groups_drawn", number(counts, "drawn", 0.0))
    return drawn >= MIN_STEPS * number(data.config, "groups_per_step")


def has_pulses(data: RunData) -> bool:
    """MIN_PULSES pulses are known. Runs of older layouts have none, and are judged by their steps and summary."""
    return not data.pulses or len(data.pulses) >= MIN_PULSES
