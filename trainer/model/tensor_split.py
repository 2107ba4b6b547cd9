"""Tensor parallelism: the matrices of each layer split over the ranks of a group, by torch's DTensor.

Which matrices are split, and how, is the model's own plan (transformers' `base_model_tp_plan`): those that widen by
rows ("colwise"), those that narrow by columns ("rowwise"). Everything else, embedding, norms and head, is in full on
each rank of the group.

The ranks share each packed row as in a sequence group (row_parts.py): each has an equal part of its tokens, for
everything but the split matrices. Before these the tokens of all ranks are gathered, and after them the sum over the
ranks is scattered again (arXiv 2205.05198, section 4.2.2). Each rank computes all tokens for its part of the heads and
of the feed-forward width, and its part of the tokens for norms, logits and log-probs. The gradient of a parameter in
full is therefore a part of the sum on each rank, and the backend adds them; that of a split matrix is complete.

Shapes: T tokens of the row, S of one rank's part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from areal_like.errors import UserError
from trainer.model.split_sizes import split_fault

ROWS, COLUMNS = "colwise", "rowwise"
"""transformers' names of the two ways in which a matrix is split."""
IN_FULL = "replicated_with_grad_allreduce"
"""A module that is in full on each rank, as are all that no plan names."""
_KEY = "trainer.tensor_parallel"
_ATTRIBUTE = "_areal_like_tensor_split"


class TensorSplit:
    """The hooks of one model. is_whole: each rank has all tokens of a row instead of a part of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self.is_whole = False

    def gather(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-forward hook of a module with split matrices: gives it the hidden states of all tokens, [1, T, D]."""
        if args:
            return (self._gathered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._gathered(kwargs["hidden_states"])}

    def _gathered(self, hidden_1SD: torch.Tensor) -> DTensor:
        layout = Replicate() if self.is_whole else Shard(1)
        local = DTensor.from_local(hidden_1SD, self._mesh, [layout], run_check=False)
        gathered: DTensor = local.redistribute(placements=[Replicate()])
        return gathered

    def scatter(self, module: torch.nn.Module, args: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        """Forward hook of a matrix that narrows: returns the sum over ranks for this rank's tokens, [1, S, D]."""
        layout = Replicate() if self.is_whole else Shard(1)
        local: torch.Tensor = output.redistribute(placements=[layout]).to_local()
        return local


def split_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the matrices of `model` over a mesh of one dimension. The model may be on the meta device; otherwise every
    rank has it in full. Collective. Raises UserError for a model that cannot be split."""
    check_split(model.config, mesh.size())
    base: Any = model.base_model
    found = split_modules(model)
    split = TensorSplit(mesh)
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if how == ROWS else RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        for name, how in found.items()
    }
    parallelize_module(base, mesh, styles, src_data_rank=None)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in found):
        base.get_submodule(parent).register_forward_pre_hook(split.gather, with_kwargs=True)
    for name, how in found.items():
        if how == COLUMNS:
            base.get_submodule(name).register_forward_hook(split.scatter)
    setattr(model, _ATTRIBUTE, split)


def split_modules(model: PreTrainedModel) -> dict[str, str]:
    """Return the modules of the base model that are split, and how, by the model's own plan. Raises UserError."""
    config = model.config.get_text_config()
    kind = config.model_type
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    found: dict[str, str] = {}
    for name, module in model.base_model.named_modules():
        how = next((how for pattern, how in plan.items() if fnmatchcase(name, pattern)), None)
        if how is None or how == IN_FULL:
            continue
        if how not in (ROWS, COLUMNS) or not isinstance(module, torch.nn.Linear):
            raise _cannot(f"transformers splits {name} of {kind} in a way (`{how}`) that is not supported here")
        if how == COLUMNS and module.bias is not None:
            raise _cannot(f"{name} of {kind} has a bias, which is not supported in a matrix that is split by columns")
        found[name] = how
    if not found:
        raise _cannot(f"transformers has no plan by which the matrices of {kind} are split over ranks")
    parents = {name.rpartition(".")[0] for name, how in found.items() if how == ROWS}
    if parents != {name.rpartition(".")[0] for name, how in found.items() if how == COLUMNS}:
        raise _cannot(f"transformers' plan splits only one of two matrices that belong together in {kind}")
    return found


def check_split(config: PreTrainedConfig, size: int) -> None:
    """Raise UserError if `size` ranks cannot split the heads and the feed-forward width of a model equally."""
    if (fault := split_fault(config.to_dict(), size)) is not None:
        what, remedy = fault
        raise UserError(what, where=_KEY, remedy=remedy)


def split_of(model: PreTrainedModel) -> TensorSplit | None:
    """Return the hooks of a model that was split; None if it was not."""
    found: TensorSplit | None = getattr(model, _ATTRIBUTE, None)
    return found


@contextlib.contextmanager
def whole_rows(model: PreTrainedModel) -> Iterator[None]:
    """In the context each rank gives the model all tokens of a row, and computes all of them. Without gradients."""
    split = split_of(model)
    if split is not None:
        split.is_whole = True
    try:
        yield
    finally:
        if split is not None:
            split.is_whole = False


def _cannot(what: str) -> UserError:
    return UserError(what, where=_KEY, remedy="set tensor_parallel: 1, and use sequence_parallel or more ranks instead")
