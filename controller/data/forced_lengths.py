"""Answers of a length that was drawn before: what `sampling.forced_lengths` says.

Owns: making the draws of a config. Refuses: the distributions (areal_like/emulation/lengths.py), ending an answer (the
engines do, at max_new_tokens).
"""

from __future__ import annotations

from areal_like.emulation.lengths import NamedDraws
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths

KEY = "sampling.forced_lengths"


def forced_lengths(config: RunConfig) -> NamedDraws | None:
    """Tokens of the answer of (group, sample); None: answers end where they end. Raises UserError."""
    text = config.sampling.forced_lengths
    if text is None:
        return None
    return NamedDraws(parse_lengths(text, config.sampling.max_new_tokens, KEY), config.seed)
