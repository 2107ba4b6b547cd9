"""Predefined lengths of answers: `sampling.forced_lengths`.

The distributions are in areal_like/emulation/lengths.py. Engines end an answer at its length by max_new_tokens.
"""

from __future__ import annotations

from areal_like.emulation.lengths import NamedDraws
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths

KEY = "sampling.forced_lengths"


def forced_lengths(config: RunConfig) -> NamedDraws | None:
    """Tokens of the answer of (group, sample); None: lengths are not forced. Raises UserError."""
    text = config.sampling.forced_lengths
    if text is None:
        return None
    return NamedDraws(parse_lengths(text, config.sampling.max_new_tokens, KEY), config.seed)
