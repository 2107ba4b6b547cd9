"""How FSDP2 shards a model's parameters over the ranks, and the ranges of items that each rank has.

It shards a full model, or one on the meta device of which each rank then reads its own part. Training on the shards is
in fsdp.py, models that are not trained are in fsdp_fixed.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.backends.policy_module import PolicyModule
from trainer.backends.port import Setup
from trainer.export import first_named
from trainer.host_copy import Part
from trainer.model.model import all_finite
from trainer.model.outline import SlicedSource


def shard_module(module: PolicyModule, setup: Setup, source: SlicedSource | None, *, keeps_outer: bool = True) -> None:
    """Shard a module over all ranks, or over those of each replica. Collective.

    keeps_outer: embedding, head and final norm stay gathered after a forward pass, for the backward pass. source: of
    the parameters, if they are on the meta device; each rank reads its part only. Raises UserError on all ranks if a
    value is not finite.
    """
    settings, ranks = setup.settings, setup.ranks
    offload = settings.fsdp.cpu_offload
    apply = functools.partial(
        fully_shard,
        mesh=ranks.mesh(settings.fsdp.replicas),
        mp_policy=_precision(setup),
        offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy(),
    )
    for layer in decoder_layers(module.model):
        apply(layer, reshard_after_forward=settings.fsdp.reshard_after_forward)
    apply(module, reshard_after_forward=not keeps_outer)
    if source is not None:
        _materialize(module, torch.device("cpu") if offload else ranks.device)
        _check_finite(module.model, _read(module.model, source), setup)


def _materialize(module: PolicyModule, device: torch.device) -> None:
    """Give every shard memory on `device`; tied parameters stay tied, and buffers that exist stay as they are."""
    seen: dict[int, tuple[torch.nn.Module, str]] = {}
    tied: list[tuple[torch.nn.Module, str, torch.nn.Module, str]] = []
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in seen:
                tied.append((owner, key, *seen[id(parameter)]))
            else:
                seen[id(parameter)] = owner, key
    buffers = [(owner, key, buffer) for owner in module.modules() for key, buffer in owner._buffers.items()]
    for owner, key, _, _ in tied:  # otherwise it would get memory of its own
        owner._parameters[key] = None
    module.to_empty(device=device)
    for owner, key, first, first_key in tied:
        owner._parameters[key] = first._parameters[first_key]
    for owner, key, buffer in buffers:
        if buffer is not None and not buffer.is_meta:
            owner._buffers[key] = buffer


def _read(model: PreTrainedModel, source: SlicedSource) -> list[bool]:
    """Read this rank's part of every tensor; returns for each whether it is finite."""
    finite = []
    for name, tensor in first_named(model).items():
        part = part_of(tensor)
        source.read(name, items_of(tensor)[0] if isinstance(tensor, DTensor) else 0, part)
        finite.append(all_finite(part))
    return finite


def _check_finite(model: PreTrainedModel, finite: list[bool], setup: Setup) -> None:
    """Raise UserError, on every rank, if a part of any rank holds a NaN or an infinity. Collective."""
    flags = setup.ranks.min(torch.tensor(finite, dtype=torch.int32, device=setup.ranks.device))
    bad = [name for name, flag in zip(first_named(model), flags.tolist(), strict=True) if not flag]
    if bad:
        raise UserError(
            f"{len(bad)} tensors contain values that are not finite; the first is {bad[0]}",
            where=str(model.config.name_or_path or type(model).__name__),
            remedy="download the model again if the file is damaged, or use an earlier checkpoint if training had "
            "diverged",
        )


def reshard(module: torch.nn.Module) -> None:
    """Shard parameters again: after a forward pass without a backward pass the outermost modules stay gathered."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


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


# ---------------------------------------------------------------- parts of tensors


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(sharded: torch.Tensor, part: torch.Tensor) -> DTensor:
    """Return a sharded tensor with the placement of `sharded`, of which `part` is this rank's part."""
    assert isinstance(sharded, DTensor)
    placed: DTensor = DTensor.from_local(
        part.detach(), sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape,
        stride=sharded.stride(),
    )  # fmt: skip
    return placed


def named_part(key: str, sharded: torch.Tensor, items: torch.Tensor) -> Part:
    """Return `items` as this rank's part of a tensor that is split like `sharded`."""
    first, last = items_of(sharded)
    assert items.numel() == last - first
    return Part(key, tuple(sharded.shape), first, items.detach())


def items_of(sharded: torch.Tensor) -> tuple[int, int]:
    """Return this rank's first item and the one after its last, in the flattened tensor."""
    assert isinstance(sharded, DTensor)
    mesh, rows = sharded.device_mesh, sharded.shape[0]
    last_dim = mesh.ndim - 1  # with replicas the first one is theirs
    chunk = -(-rows // mesh.size(last_dim))  # chunks of rows have equal size while rows are left
    first = min(mesh.get_local_rank(last_dim) * chunk, rows)
    row_items = math.prod(sharded.shape[1:])
    return first * row_items, min(first + chunk, rows) * row_items


def is_in_first_replica(sharded: torch.Tensor) -> bool:
    """True if this rank's part counts where every item is counted once."""
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def parts_of_model(model: PreTrainedModel, *, is_leader: bool) -> Iterator[Part]:
    """Yield this rank's part of each weight; what is the same on several ranks belongs to the first of them."""
    for name, tensor in first_named(model).items():
        if isinstance(tensor, DTensor):
            if is_in_first_replica(tensor):
                yield named_part(f"weight/{name}", tensor, part_of(tensor))
        elif is_leader:
            yield Part(f"weight/{name}", tuple(tensor.shape), 0, tensor.detach())
