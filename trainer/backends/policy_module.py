"""The whole forward pass, from tokens to log-probs, as one function and as one module.

Owns: `policy_logprobs`, `PolicyModule`. Refuses: how the module is spread over ranks.

Backends that shard parameters hang on a module's forward: parameters are gathered when it begins and let go when it
ends. Log-probs need the output head inside that (they multiply with its weight themselves), so the module they wrap is
ours, around the transformers model.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from trainer.backends.port import Setup
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.model.values import token_values


def policy_logprobs(
    model: PreTrainedModel, packed: PackedSequences, setup: Setup, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """token_logprobs at the precision of `setup`; of a critic its values [T] (Backend.logprobs)."""
    with torch.autocast(packed.tokens_T.device.type, torch.bfloat16, enabled=setup.compute_dtype == torch.bfloat16):
        if setup.is_critic:
            return token_values(model, packed), None
        return token_logprobs(
            model,
            packed,
            temperature=setup.temperature,
            chunk_tokens=setup.settings.logprob_chunk_tokens,
            with_entropy=with_entropy,
        )


class PolicyModule(torch.nn.Module):
    """A model whose forward pass ends in log-probs, or in values."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        super().__init__()
        self.model, self._setup = model, setup

    def forward(self, packed: PackedSequences, with_entropy: bool) -> tuple[torch.Tensor, ...]:
        """Log-probs [N], then entropies [N] where asked for; or values [T]."""
        logprobs_N, entropy_N = policy_logprobs(self.model, packed, self._setup, with_entropy=with_entropy)
        # clone: backends hang their hooks on what comes out, and warn of views
        return tuple(output_N.clone() for output_N in (logprobs_N, entropy_N) if output_N is not None)


def both(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `PolicyModule` returned, as `policy_logprobs` returns it."""
    return output[0], output[1] if len(output) > 1 else None
