"""The policy sharded over ranks by FSDP2 (`fully_shard`): parameters, gradients and AdamW's state, each 1/N per rank.

It defines which modules are sharded together, precision, offload, and AdamW on the shards.

Each decoder layer is gathered when it runs and released afterwards; embedding, head and final norm stay gathered from
the beginning of a forward pass to the end of its backward pass. AdamW works on each rank's own part of every parameter
as an ordinary tensor that shares its memory: the same arithmetic as in one process, element by element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.backends.policy_module import PolicyModule, both
from trainer.backends.port import MOMENTS, ReadMoments, Setup
from trainer.export import named_tensors
from trainer.host_copy import Part, whole_part
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult, learning_rate, make_adamw


@dataclass(frozen=True)
class _Shard:
    """One parameter: the sharded one in the module, and this rank's part of it, which shares its memory."""

    name: str
    whole: torch.nn.Parameter
    part: torch.nn.Parameter


class FsdpBackend:
    """See trainer.backends.port.Backend."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        self.model, self._setup = model, setup
        self.skipped_updates = 0
        settings, ranks = setup.settings, setup.ranks
        self._module = PolicyModule(model, setup)
        offload = settings.fsdp.cpu_offload
        shard = functools.partial(
            fully_shard,
            mesh=init_device_mesh(ranks.device.type, (ranks.size,)),
            mp_policy=_precision(setup),
            offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy(),
        )
        for layer in decoder_layers(model):
            shard(layer, reshard_after_forward=settings.fsdp.reshard_after_forward)
        shard(self._module, reshard_after_forward=False)
        self._module.train(model.training)
        self._shards = [
            _Shard(name, parameter, torch.nn.Parameter(_part(parameter)))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
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
        (loss * self._setup.ranks.size).backward()  # FSDP computes the mean over ranks, and we need the sum

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        settings = self._setup.settings.optimizer
        lr = lr_factor * learning_rate(settings, step, self._setup.num_steps)
        for shard in self._shards:
            if shard.whole.grad is not None:
                shard.part.grad = _part(shard.whole.grad)
        gradients = [shard.part.grad for shard in self._shards if shard.part.grad is not None]
        grad_norm = self._norm(gradients)
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
        """2-norm of the global gradient: every element is on exactly one rank."""
        device = self._setup.ranks.device
        square = torch.zeros((), dtype=torch.float32, device=device)
        if gradients:
            square += torch.nn.utils.get_total_norm(gradients).to(device).square()
        return float(self._setup.ranks.sum(square).sqrt())

    # ------------------------------------------------------------ full tensors

    def move(self, device: torch.device) -> int:
        assert self._setup.settings.fsdp.cpu_offload or device == self._setup.ranks.device, "validate asks for it"
        self._reshard()
        self.zero_grad()
        return 0

    def full_weights(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
        self._reshard()
        whole = {}
        for name, tensor in named_tensors(self.model).items():
            if is_wanted is not None and not is_wanted(name):
                continue
            full = self._gather(tensor)
            if self._setup.ranks.is_leader:
                whole[name] = full
        return whole

    def own_weights(self) -> dict[str, torch.Tensor]:
        self._reshard()
        return {shard.name: _part(shard.whole) for shard in self._shards}

    def own_gradients(self) -> dict[str, torch.Tensor]:
        return {shard.name: _part(shard.whole.grad) for shard in self._shards if shard.whole.grad is not None}

    def parts(self) -> list[Part]:
        self._reshard()
        is_leader = self._setup.ranks.is_leader
        found = []
        for name, tensor in named_tensors(self.model).items():
            if isinstance(tensor, DTensor):
                found.append(_part_of(f"weight/{name}", tensor, _part(tensor)))
            elif is_leader:  # the same on every rank
                found.append(whole_part(f"weight/{name}", tensor))
        state = self._adamw.state
        steps = [entry["step"] for entry in state.values()]
        for shard in self._shards if steps else ():
            if shard.part in state:
                entry = state[shard.part]
                found += [_part_of(f"{kind}/{shard.name}", shard.whole, entry[kind]) for kind in MOMENTS]
            if is_leader:
                found.append(whole_part(f"step/{shard.name}", steps[0]))
        return found

    def load_moments(self, read: ReadMoments) -> None:
        for shard in self._shards:
            entry = read(shard.name)
            if not entry or not shard.part.numel():
                continue
            state = self._adamw.state[shard.part]
            state["step"] = entry["step"].to(torch.float32).to(shard.part.device)
            for kind in MOMENTS:
                state[kind] = _cut(entry[kind], shard.whole).to(shard.part.device).clone()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, on the host if its parts are there; on every rank."""
        if not isinstance(tensor, DTensor):
            return tensor
        device = self._setup.ranks.device
        if tensor.to_local().device != device:  # offloaded: collectives need the mesh's device
            tensor = _like(tensor, tensor.to_local().to(device))
        full: torch.Tensor = tensor.full_tensor()
        return full

    def _reshard(self) -> None:
        """Shard parameters again: after a forward pass without a backward pass the outermost modules stay gathered."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that transformers says must not be split, or else the longest list of modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if layers:
        return layers
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def _precision(setup: Setup) -> MixedPrecisionPolicy:
    """Return the policy: parameters are gathered in the compute dtype; their shards, and thus AdamW, stay float32."""
    if setup.compute_dtype == torch.float32:
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float32 if setup.settings.fsdp.reduce_dtype == "float32" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=setup.compute_dtype, reduce_dtype=reduce_dtype)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(sharded: torch.Tensor, part: torch.Tensor) -> DTensor:
    """Return a sharded tensor with the placement of `sharded`, of which `part` is this rank's part."""
    assert isinstance(sharded, DTensor)
    placed: DTensor = DTensor.from_local(
        part.detach(), sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape,
        stride=sharded.stride(),
    )  # fmt: skip
    return placed


def _cut(full: torch.Tensor, sharded: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, split like `sharded`: along its first dimension, in equal chunks."""
    first, last = _rows(sharded)
    part = full[first:last]
    assert part.shape == _part(sharded).shape
    return part


def _part_of(key: str, sharded: torch.Tensor, items: torch.Tensor) -> Part:
    """Return `items` as this rank's part of a tensor that is split like `sharded`."""
    first, last = _rows(sharded)
    row_items = math.prod(sharded.shape[1:])
    assert items.numel() == (last - first) * row_items
    return Part(key, tuple(sharded.shape), first * row_items, items.detach())


def _rows(sharded: torch.Tensor) -> tuple[int, int]:
    """Return this rank's first row and the one after its last: chunks have equal size while rows are left."""
    assert isinstance(sharded, DTensor)
    mesh, rows = sharded.device_mesh, sharded.shape[0]
    chunk = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * chunk, rows)
    return first, min(first + chunk, rows)
