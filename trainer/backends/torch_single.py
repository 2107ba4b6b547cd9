"""The policy in one process, on one device, with plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from trainer.backends.policy_module import policy_greedy, policy_logprobs
from trainer.backends.port import ReadMoments, Setup
from trainer.export import named_tensors
from trainer.host_copy import Part, whole_part
from trainer.model.packed import PackedSequences
from trainer.optimizer import PolicyOptimizer, UpdateResult


class TorchBackend:
    """See trainer.backends.port.Backend."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        assert setup.ranks.size == 1, "plain torch trains in one process"
        self.model, self._setup = model, setup
        self.optimizer = PolicyOptimizer(model, setup.settings.optimizer, setup.num_steps)

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return policy_logprobs(self.model, packed, self._setup, with_entropy=with_entropy)

    def greedy(self, packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
        return policy_greedy(self.model, packed, self._setup)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        return self.optimizer.update(step, lr_factor=lr_factor)

    def move(self, device: torch.device) -> int:
        self.zero_grad()
        moved = sum(tensor.nbytes for tensor in self.model.state_dict().values() if tensor.device != device)
        self.model.to(device)  # type: ignore[arg-type]
        return moved + self.optimizer.move(device)

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        found = named_tensors(self.model).items()
        return {name: tensor for name, tensor in found if is_wanted is None or is_wanted(name)}

    def own_weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def parts(self) -> list[Part]:
        weights = [whole_part(f"weight/{name}", tensor) for name, tensor in named_tensors(self.model).items()]
        moments = self.optimizer.moments()
        return weights + [
            whole_part(f"{kind}/{name}", value) for name, entry in moments.items() for kind, value in entry.items()
        ]

    def load_moments(self, read: ReadMoments) -> None:
        self.optimizer.load_moments(read)
