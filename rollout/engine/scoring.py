"""Log-probs of given tokens from logits, a few positions at a time.

Shape legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 128
"""Number of positions whose logits are in memory at once."""


def gathered(logits_of: Callable[[slice], Tensor], tokens_T: Tensor, start: int, temperature: float) -> Tensor:
    """Log-probs [T - start], float32, of tokens_T[start:]: log_softmax(logits / temperature).

    logits_of: logits [n, V] after the positions of a slice. start: at least 1.
    """
    parts = [torch.zeros(0, device=tokens_T.device)]
    for begin in range(start, len(tokens_T), CHUNK):
        end = min(begin + CHUNK, len(tokens_T))
        logprobs = torch.log_softmax(logits_of(slice(begin - 1, end - 1)).float() / temperature, -1)
        parts.append(logprobs.gather(-1, tokens_T[begin:end, None])[:, 0])
    return torch.cat(parts)
