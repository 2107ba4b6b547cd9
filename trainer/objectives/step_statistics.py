"""Numbers of a whole step that a loss or a correction needs: bounds and thresholds that depend on all its tokens.

The log-probs are computed in trainer/step.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer.objectives.port import Statistics, SumOverRanks, TokenInputs
from trainer.objectives.registry import ChosenLoss
from trainer.objectives.versions import with_version_logprobs


def needs_statistics(chosen: ChosenLoss) -> bool:
    """True if the log-probs of the whole step are needed before its first update."""
    return any(_statistics_of(chosen))


@torch.no_grad()
def step_statistics(
    chosen: ChosenLoss, parts: Sequence[TokenInputs], sum_over_ranks: SumOverRanks
) -> dict[str, Mapping[str, float]]:
    """Compute the statistics of the loss and its corrections, by their names. Collective.

    parts: this rank's micro-batches with proximal_N, the log-probs at the start of the step.
    """
    drifting = []
    for part in parts:
        assert part.proximal_N is not None
        part = with_version_logprobs(part, part.proximal_N)
        drifting.append(replace(part, drift_N=part.proximal_N - part.behaviour_N))  # type: ignore[operator]
    return {name: compute(drifting, sum_over_ranks, options) for name, compute, options in _statistics_of(chosen)}


def _statistics_of(chosen: ChosenLoss) -> Iterator[tuple[str, Statistics, Any]]:
    if chosen.objective.statistics is not None:
        yield chosen.objective.name, chosen.objective.statistics, chosen.options
    for correction, options in chosen.corrections:
        if correction.statistics is not None:
            yield correction.name, correction.statistics, options
