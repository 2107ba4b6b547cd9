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
from trainer.host_copy import Items, Part
from trainer.model.model import all_finite
from trainer.model.outline import SlicedSource
from trainer.model.tensor_split import split_model
from trainer.ranks import REPLICATE, SHARD, TENSOR, Ranks


def shard_module(module: PolicyModule, setup: Setup, source: SlicedSource | None, *, keeps_outer: bool = True) -> None:
    """Shard a module over all ranks, or over those of each replica. Collective.

    keeps_outer: embedding, head and final norm stay gathered after a forward pass, for the backward pass. source: of
    the parameters, if they are on the meta device; each rank reads its part only. Raises UserError on all ranks if a
    value is not finite.
    """
    settings, ranks = setup.settings, setup.ranks
    offload = settings.fsdp.cpu_offload
    mesh = ranks.mesh(settings.fsdp.replicas, settings.tensor_parallel)
    if settings.tensor_parallel > 1:
        split_model(module.model, mesh[TENSOR])
        mesh = mesh[REPLICATE, SHARD] if settings.fsdp.replicas > 1 else mesh[SHARD]
    apply = functools.partial(
        fully_shard,
        mesh=mesh,
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
        items = items_of(tensor) if isinstance(tensor, DTensor) else Items(0, part.numel())
        source.read(name, items.first, part, items.width)
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
    own = items_of(sharded)
    assert items.numel() == own.num
    return Part(key, tuple(sharded.shape), own.first, items.detach(), own.width)


def items_of(sharded: torch.Tensor) -> Items:
    """Return the items of this rank's part. Tensor parallelism splits rows or columns first, then FSDP2 the rows."""
    assert isinstance(sharded, DTensor)
    places, rows, row_items = _places(sharded), sharded.shape[0], math.prod(sharded.shape[1:])
    start, column, width = 0, 0, 0
    if TENSOR in places:
        dim, place, size = places[TENSOR]
        if sharded.placements[dim].is_shard(0):
            rows //= size
            start = place * rows
        else:
            assert sharded.placements[dim].is_shard(1), "matrices are split by rows or by columns"
            width = row_items // size
            column = place * width
    _, place, size = places[SHARD]
    chunk = -(-rows // size)  # chunks of rows have equal size while rows are left
    first = min(place * chunk, rows)
    num_rows = min(first + chunk, rows) - first
    return Items((start + first) * row_items + column, num_rows * (width or row_items), width)


def is_split(sharded: torch.Tensor) -> bool:
    """True for a matrix that tensor parallelism splits: its gradient is complete on each rank."""
    assert isinstance(sharded, DTensor)
    return TENSOR in _places(sharded)


def is_counted(sharded: torch.Tensor, ranks: Ranks) -> bool:
    """True if this rank's part counts where every item is counted once: the first of those with the same part."""
    places = _places(sharded)
    is_first = REPLICATE not in places or places[REPLICATE][1] == 0
    return is_first and (TENSOR in places or ranks.tensor_place == 0)


def _places(sharded: torch.Tensor) -> dict[str, tuple[int, int, int]]:
    """Return the dimensions of a tensor's mesh by name: number, this rank's place in it, size."""
    assert isinstance(sharded, DTensor)
    mesh = sharded.device_mesh
    assert mesh.mesh_dim_names is not None
    return {name: (dim, mesh.get_local_rank(dim), mesh.size(dim)) for dim, name in enumerate(mesh.mesh_dim_names)}


def parts_of_model(model: PreTrainedModel, ranks: Ranks) -> Iterator[Part]:
    """Yield this rank's part of each weight; what is the same on several ranks belongs to the first of them."""
    for name, tensor in first_named(model).items():
        if isinstance(tensor, DTensor):
            if is_counted(tensor, ranks):
                yield named_part(f"weight/{name}", tensor, part_of(tensor))
        elif ranks.is_leader:
            yield Part(f"weight/{name}", tuple(tensor.shape), 0, tensor.detach())
