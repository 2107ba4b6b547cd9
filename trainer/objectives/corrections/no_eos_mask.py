"""Mask of answers that were cut at the token limit (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).

Whether such an answer would have been right is not known; its reward is noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.objectives.port import Correction, NoOptions, TokenInputs

if TYPE_CHECKING:
    import torch


def factor(tokens: TokenInputs, options: NoOptions) -> torch.Tensor:
    """Keep answers that ended by themselves."""
    assert tokens.is_cut_N is not None
    return ~tokens.is_cut_N


CORRECTION = Correction(name="no_eos_mask", factor=factor, is_of_ratio=False)
