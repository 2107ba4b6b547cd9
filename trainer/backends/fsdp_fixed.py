"""A policy that is not trained (a reference, a teacher), sharded over the ranks like the trained one (fsdp.py)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from trainer.backends.fsdp_sharding import shard_module
from trainer.backends.policy_module import PolicyModule, both, check_passes
from trainer.backends.port import Setup
from trainer.model.attention import attach
from trainer.model.packed import PackedSequences


class FixedShards:
    """This rank's part of a fixed policy. Every method is collective."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        """model: on the meta device, with `setup.source`. Raises UserError, also if packed log-probs of the model are
        not its own."""
        model.eval().requires_grad_(False)
        attach(model, setup.attention)
        self.model = model
        self._module = PolicyModule(model, setup)
        shard_module(self._module, setup, setup.source, keeps_outer=False)
        self._module.eval()
        with torch.no_grad():
            self._module(None, False, work=lambda one: check_passes(one, setup))

    @torch.no_grad()
    def logprobs(self, packed: PackedSequences) -> torch.Tensor:
        """Compute log-probs [N] of a micro-batch."""
        logprobs_N, _ = both(self._module(packed, False))
        return logprobs_N
