"""The two parts of a token's importance ratio, if the trainer recalls the version that sampled it.

This is the arithmetic of arXiv 2605.12070, section 3.1. The log-probs are computed in trainer/version_recall.py.
Imports no torch.

With b the engine's log-prob, o the trainer's under the version that sampled the token, and p0 that at the start of the
step:

    p0 - b  =  (o - b)  +  (p0 - o)
    both       mismatch    staleness

A token whose version is not kept counts as sampled by the policy at the start of the step: o = p0, so that its whole
ratio is mismatch, as without recalled versions.

Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.objectives.port import Correction, Part, SumOverRanks, TokenInputs

if TYPE_CHECKING:
    import torch


def with_version_logprobs(tokens: TokenInputs, start_N: torch.Tensor) -> TokenInputs:
    """Add version_N and mixture_N if versions were recalled. start_N: log-probs at the start of the step, without
    gradient."""
    recalled = tokens.recalled
    if recalled is None:
        return tokens
    version_N = recalled.own_N.where(recalled.is_recalled_N, start_N)
    mixture_N = recalled.mixture_N
    if mixture_N is not None and recalled.start_share > 0:
        mixture_N = mixture_N.logaddexp(start_N + math.log(recalled.start_share))
    return replace(tokens, version_N=version_N, mixture_N=mixture_N)


def tokens_of_part(tokens: TokenInputs, part: Part) -> TokenInputs:
    """Return the inputs of a correction of one part of the ratio: the two policies between which it is.

    tokens: with version_N and drift_N; current_N if there is a current policy.
    """
    if part == "both":
        return tokens
    version_N = tokens.version_N
    assert version_N is not None, "trainer.version_logprobs is missing"
    if part == "mismatch":
        return replace(
            tokens, drift_N=version_N - tokens.behaviour_N, current_N=version_N, proximal_N=version_N
        )  # fmt: skip
    start_N = tokens.current_N if tokens.proximal_N is None else tokens.proximal_N
    assert start_N is not None
    return replace(tokens, behaviour_N=version_N, drift_N=start_N - version_N)


def of_part(correction: Correction, part: Part) -> Correction:
    """Turn a correction of the whole ratio into one of a part of it, with its own name."""
    if part == "both":
        return correction
    name = f"{correction.name}_{part}"

    def factor(tokens: TokenInputs, options: Any) -> torch.Tensor:
        own = {**tokens.step, correction.name: tokens.step.get(name, {})}
        return correction.factor(tokens_of_part(replace(tokens, step=own), part), options)

    def statistics(parts: Sequence[TokenInputs], sum_over_ranks: SumOverRanks, options: Any) -> Mapping[str, float]:
        assert correction.statistics is not None
        return correction.statistics([tokens_of_part(one, part) for one in parts], sum_over_ranks, options)

    return replace(
        correction,
        name=name,
        factor=factor,
        part=part,
        needs=replace(correction.needs, versions=True),
        statistics=None if correction.statistics is None else statistics,
    )
