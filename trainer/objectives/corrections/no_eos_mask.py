"""Mask of answers that were truncated at the token limit (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).

It is unknown whether such an answer would have been correct; its reward is noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.objectives.port import Correction, NoOptions, TokenInputs

if TYPE_CHECKING:
    import torch


def factor(tokens: TokenInputs, options: NoOptions) -> torch.Tensor:
    """Keep answers that were not truncated."""
    assert tokens.is_cut_N is not None
    return ~tokens.is_cut_N


CORRECTION = Correction(name="no_eos_mask", factor=factor, is_of_ratio=False)
