"""The policy sharded over ranks by FSDP2 (`fully_shard`): parameters, gradients and AdamW's state, each 1/N per rank.

It defines AdamW on the shards. Which modules are sharded together, precision and offload are in fsdp_sharding.py.

Each decoder layer is gathered when it runs and released afterwards; embedding, head and final norm stay gathered from
the beginning of a forward pass to the end of its backward pass. AdamW works on each rank's own part of every parameter
as an ordinary tensor that shares its memory: the same arithmetic as in one process, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.backends.fsdp_sharding import (
    is_counted,
    is_split,
    items_of,
    like,
    named_part,
    part_of,
    parts_of_model,
    reshard,
    shard_module,
)
from trainer.backends.policy_module import PolicyModule, both, check_passes
from trainer.backends.port import MOMENTS, ReadMoments, Setup
from trainer.export import named_tensors
from trainer.host_copy import Part, whole_part
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult, learning_rate, make_adamw


@dataclass(frozen=True)
class _Shard:
    """One parameter: the sharded one in the module, and this rank's part of it, which shares its memory. is_counted:
    false if another rank has the same part, and counts it. is_split: by tensor parallelism."""

    name: str
    whole: torch.nn.Parameter
    part: torch.nn.Parameter
    is_counted: bool
    is_split: bool


class FsdpBackend:
    """See trainer.backends.port.Backend."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        self.model, self._setup = model, setup
        self.skipped_updates = 0
        settings = setup.settings
        self._module = PolicyModule(model, setup)
        shard_module(self._module, setup, setup.source)
        self._module.train(model.training)
        is_exact = setup.compute_dtype == torch.float32 or settings.fsdp.reduce_dtype == "float32"
        self._sums_replicas_last = settings.fsdp.replicas > 1 and is_exact
        """Gradients of micro-batches are added in float32 inside each replica, and over replicas once an update."""
        self._shards = [
            _Shard(
                name, parameter, torch.nn.Parameter(part_of(parameter)), is_counted(parameter, setup.ranks),
                is_split(parameter),
            )
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]  # fmt: skip
        with_elements = [shard for shard in self._shards if shard.part.numel()]
        self._adamw = make_adamw(((shard.part, shard.whole.ndim >= 2) for shard in with_elements), settings.optimizer)

    def logprobs(self, packed: PackedSequences, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return both(self._module(packed, with_entropy))

    def greedy(self, packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logprobs_N, is_greedy_N = self._module(packed, False, True)
        return logprobs_N, is_greedy_N

    def zero_grad(self) -> None:
        for shard in self._shards:
            shard.whole.grad = shard.part.grad = None

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        if self._sums_replicas_last:
            assert isinstance(self._module, FSDPModule)
            self._module.set_requires_all_reduce(is_last)
        # FSDP computes the mean over the ranks with the same matrices, and we need the sum
        (loss * (self._setup.ranks.size // self._setup.settings.tensor_parallel)).backward()
        if is_last and self._setup.ranks.splits_matrices:
            self._sum_parts()

    def _sum_parts(self) -> None:
        """Add what each rank of a group computed of the gradients of parameters that are not split."""
        group = self._setup.ranks.sequence_group
        assert group is not None
        for shard in self._shards:
            if not shard.is_split and shard.whole.grad is not None:
                dist.all_reduce(part_of(shard.whole.grad), group=group.group)

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        settings = self._setup.settings.optimizer
        lr = lr_factor * learning_rate(settings, step, self._setup.num_steps)
        for shard in self._shards:
            if shard.whole.grad is not None:
                shard.part.grad = part_of(shard.whole.grad)
        with_gradient = [(shard, shard.part.grad) for shard in self._shards if shard.part.grad is not None]
        gradients = [gradient for _, gradient in with_gradient]
        grad_norm = self._norm([gradient for shard, gradient in with_gradient if shard.is_counted])
        if not math.isfinite(grad_norm):
            self.skipped_updates += 1
            self.zero_grad()
            return UpdateResult(grad_norm, lr, False)
        share = min(1.0, settings.max_grad_norm / (grad_norm + 1e-6))
        if share < 1.0:
            torch._foreach_mul_(gradients, share)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()
        return UpdateResult(grad_norm, lr, True)

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        """2-norm of the global gradient. gradients: those that this rank counts, each element on exactly one rank."""
        device = self._setup.ranks.device
        square = torch.zeros((), dtype=torch.float32, device=device)
        if gradients:
            square += torch.nn.utils.get_total_norm(gradients).to(device).square()
        return float(self._setup.ranks.sum(square).sqrt())

    # ------------------------------------------------------------ full tensors

    def move(self, device: torch.device) -> int:
        assert self._setup.settings.fsdp.cpu_offload or device == self._setup.ranks.device, "validate asks for it"
        reshard(self._module)
        self.zero_grad()
        return 0

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        reshard(self._module)
        whole = {}
        for name, tensor in named_tensors(self.model).items():
            if is_wanted is not None and not is_wanted(name):
                continue
            full = self._gather(tensor)
            if self._setup.ranks.is_leader:
                whole[name] = full
        return whole

    def own_weights(self) -> dict[str, torch.Tensor]:
        reshard(self._module)
        return {shard.name: part_of(shard.whole) for shard in self._shards}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        counted = [shard for shard in self._shards if shard.is_counted]
        return {shard.name: part_of(shard.whole.grad) for shard in counted if shard.whole.grad is not None}

    def parts(self) -> list[Part]:
        reshard(self._module)
        is_leader = self._setup.ranks.is_leader
        found = list(parts_of_model(self.model, self._setup.ranks))
        state = self._adamw.state
        steps = [entry["step"] for entry in state.values()]
        for shard in self._shards if steps else ():
            if shard.part in state and shard.is_counted:
                entry = state[shard.part]
                found += [named_part(f"{kind}/{shard.name}", shard.whole, entry[kind]) for kind in MOMENTS]
            if is_leader:
                found.append(whole_part(f"step/{shard.name}", steps[0]))
        return found

    def load_moments(self, read: ReadMoments) -> None:
        for shard in self._shards:
            entry = read(shard.name, items_of(shard.whole))
            if not entry or not shard.part.numel():
                continue
            state = self._adamw.state[shard.part]
            state["step"] = entry["step"].to(torch.float32).to(shard.part.device)
            for kind in MOMENTS:
                state[kind] = entry[kind].view(shard.part.shape).to(shard.part.device)

    def check(self) -> float:
        """Compare packed log-probs with the model's own, by all ranks together; returns the largest difference in nats.
        Raises UserError."""
        found: list[float] = []
        with torch.no_grad():
            self._module(None, False, work=lambda model: found.append(check_passes(model, self._setup)))
        reshard(self._module)
        return found[0]

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, on the host if its parts are there; on every rank."""
        if not isinstance(tensor, DTensor):
            return tensor
        device = self._setup.ranks.device
        if tensor.to_local().device != device:  # offloaded: collectives need the mesh's device
            tensor = like(tensor, tensor.to_local().to(device))
        full: torch.Tensor = tensor.full_tensor()
        return full
