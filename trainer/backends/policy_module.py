"""The complete forward pass, from tokens to log-probs, as a function and as a module.

Backends that shard parameters hook into a module's forward: parameters are gathered when it begins and released when it
ends. Log-probs need the output head inside it (they multiply with its weight), so backends wrap this module around the
transformers model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from trainer.backends.port import Setup
from trainer.model import agreement
from trainer.model.logprobs import greedy_logprobs, token_logprobs
from trainer.model.packed import PackedSequences
from trainer.model.row_parts import part_of
from trainer.model.tensor_split import split_of
from trainer.model.values import token_values


def policy_logprobs(
    model: PreTrainedModel, packed: PackedSequences, setup: Setup, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute token_logprobs at the precision of `setup`; of a critic its values [T] (Backend.logprobs).

    With a sequence group this rank computes those of its part of the tokens, and gathers the others. Collective.
    """
    group = setup.ranks.sequence_group
    part = None if group is None else part_of(packed, group, is_gathered=split_of(model) is not None)
    own = packed if part is None else part.packed
    with torch.autocast(packed.tokens_T.device.type, torch.bfloat16, enabled=setup.compute_dtype == torch.bfloat16):
        if setup.is_critic:
            values_T = token_values(model, own)
            return values_T if part is None else part.gather_tokens(values_T, packed.num_tokens), None
        logprobs_N, entropy_N = token_logprobs(
            model,
            own,
            temperature=setup.temperature,
            chunk_tokens=setup.settings.logprob_chunk_tokens,
            with_entropy=with_entropy,
        )
    if part is None:
        return logprobs_N, entropy_N
    return part.gather(logprobs_N), None if entropy_N is None else part.gather(entropy_N)


def policy_greedy(model: PreTrainedModel, packed: PackedSequences, setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute greedy_logprobs at the precision of `setup` (Backend.greedy)."""
    assert setup.ranks.sequence_group is None, "training from files has no sequence groups"
    with torch.autocast(packed.tokens_T.device.type, torch.bfloat16, enabled=setup.compute_dtype == torch.bfloat16):
        return greedy_logprobs(model, packed, chunk_tokens=setup.settings.logprob_chunk_tokens)


def check_passes(model: PreTrainedModel, setup: Setup) -> float:
    """Compare packed log-probs with the model's own, as training computes them (trainer.model.agreement.check)."""

    def logprobs(packed: PackedSequences) -> torch.Tensor:
        return policy_logprobs(model, packed, setup, with_entropy=False)[0]

    return agreement.check(
        model, setup.attention, setup.compute_dtype, setup.temperature, setup.max_context,
        compute=None if split_of(model) is None else logprobs,
    )  # fmt: skip


class PolicyModule(torch.nn.Module):
    """A model whose forward pass returns log-probs, or values."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        super().__init__()
        self.model, self._setup = model, setup

    def forward(
        self,
        packed: PackedSequences | None,
        with_entropy: bool,
        is_greedy: bool = False,
        work: Callable[[PreTrainedModel], object] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probs [N], then entropies [N] if requested; or values [T]; or the results of `policy_greedy`.

        work: called with the model instead, while its parameters are gathered; nothing is returned.
        """
        if work is not None:
            work(self.model)
            return ()
        assert packed is not None
        if is_greedy:
            return policy_greedy(self.model, packed, self._setup)
        logprobs_N, entropy_N = policy_logprobs(self.model, packed, self._setup, with_entropy=with_entropy)
        # clone: backends attach hooks to the outputs, and warn about views
        return tuple(output_N.clone() for output_N in (logprobs_N, entropy_N) if output_N is not None)


def both(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convert the result of `PolicyModule` to that of `policy_logprobs`."""
    return output[0], output[1] if len(output) > 1 else None
