"""A low-rank adapter (LoRA) inside a transformers model, and the merged weights.

It contains the module that computes with the adapter, and the names of its tensors. Files are written in
trainer/adapter_files.py; trainer/adapter.py defines what is published.

The adapter is added to the linear modules: each target becomes a `LoraLinear` with two more parameters, `lora_A` and
`lora_B`, and every other name is the same as on the Hub. Backends therefore shard, clip and move it like any parameter,
packed attention is not affected, and removing `lora_A` and `lora_B` leaves the base. The arithmetic is peft's,
operation by operation; peft's names, which all differ, are used in files only.

Shapes: I inputs and O outputs of a target, R the rank.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from areal_like.errors import UserError
from areal_like.weights.adapter import PARTS
from trainer.config import ALL_LINEAR, AdapterSettings
from trainer.model.values import HEAD

WEIGHT = ".weight"


class LoraLinear(torch.nn.Linear):
    """A linear module with frozen weight and bias and an adapter. Created from a plain one by `add_adapter`."""

    lora_A: torch.nn.Parameter
    """[R, I]"""
    lora_B: torch.nn.Parameter
    """[O, R]"""
    scale: float
    is_adapted: bool
    """False: it computes with the base alone (`adapter_off`)."""
    rounds_to: torch.dtype | None
    """It computes with the merged weight in this dtype, without gradients (`rounded`); None: with W, A and B."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute W x + bias + scale B A x."""
        if self.rounds_to is not None:
            return F.linear(input, self._rounded_weight(self.rounds_to), self.bias)
        output = F.linear(input, self.weight, self.bias)
        if not self.is_adapted:
            return output
        return output + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale

    def _rounded_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [O, I], the same as `Merged` and a cast: the product is not rounded before it is added."""
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            weight_OI = self.weight.float()
            if self.is_adapted:
                weight_OI = weight_OI + (self.lora_B.float() @ self.lora_A.float()) * self.scale
            return weight_OI.to(dtype).to(self.weight.dtype)


def add_adapter(model: PreTrainedModel, settings: AdapterSettings, *, seed: int, where: str = "trainer.lora") -> None:
    """Freeze a full model, not yet distributed, and add an adapter that does not change its output yet.

    The initial weights are a pure function of the settings, the model's names and `seed`. Raises UserError at `where`
    if a target does not exist. The head of a reward model stays trained.
    """
    targets = find_targets(model, settings.targets, where=f"{where}.targets")
    model.requires_grad_(False)
    if (score := _score(model)) is not None:
        score.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    for module in targets.values():
        first_RI = torch.empty(settings.rank, module.in_features)
        if settings.init == "gaussian":
            first_RI.normal_(std=1 / settings.rank, generator=generator)
        else:
            bound = module.in_features**-0.5
            first_RI.uniform_(-bound, bound, generator=generator)
        module.__class__ = LoraLinear
        assert isinstance(module, LoraLinear)
        device = module.weight.device
        module.lora_A = torch.nn.Parameter(first_RI.to(device))
        module.lora_B = torch.nn.Parameter(torch.zeros(module.out_features, settings.rank, device=device))
        module.scale, module.is_adapted, module.rounds_to = settings.scale, True, None


def merge_adapter(model: PreTrainedModel) -> None:
    """Revert `add_adapter`, with the adapter merged into the weights, all of which require a gradient again."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            with torch.no_grad():
                module.weight += (module.lora_B @ module.lora_A) * module.scale
            del module.lora_A, module.lora_B, module.scale, module.is_adapted, module.rounds_to
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
    model.requires_grad_(True)


def find_targets(model: PreTrainedModel, targets: Sequence[str], *, where: str) -> dict[str, torch.nn.Linear]:
    """Return the linear modules named by `targets`, by name. Raises UserError at `where` if one does not exist."""
    head = _score(model) or model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    usable = {name: module for name, module in linear.items() if module is not head}
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in usable if target == ALL_LINEAR or f".{name}".endswith(f".{target}")}
        if not found:
            raise _no_target(target, usable, where, is_head=any(f".{name}".endswith(f".{target}") for name in linear))
        chosen |= found
    return {name: module for name, module in usable.items() if name in chosen}


def _score(model: PreTrainedModel) -> torch.nn.Linear | None:
    """Return the head of a reward model; None for a causal language model."""
    score = getattr(model, HEAD, None)
    return score if isinstance(score, torch.nn.Linear) else None


def _no_target(target: str, usable: Mapping[str, torch.nn.Module], where: str, *, is_head: bool) -> UserError:
    if is_head:
        what = f"{target} is the head, which cannot have an adapter"
        return UserError(what, where=where, remedy=f"remove this target, or use {ALL_LINEAR}")
    ends = sorted({name.rpartition(".")[2] for name in usable})
    near = difflib.get_close_matches(target, ends, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"the linear modules of the model are {', '.join(ends) or 'none'}"
    return UserError(f"the model has no linear module {target}", where=where, remedy=remedy)


@contextlib.contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute with the base alone inside the context."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    try:
        for module in adapted:
            module.is_adapted = False
        yield
    finally:
        for module in adapted:
            module.is_adapted = True


@contextlib.contextmanager
def rounded(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute inside the context with merged weights in `dtype`, as an engine does that received them.

    With float32 nothing changes.
    """
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    try:
        for module in adapted:
            module.rounds_to = None if dtype == torch.float32 else dtype
        yield
    finally:
        for module in adapted:
            module.rounds_to = None


def is_adapters(name: str) -> bool:
    """True for the name of a tensor of the adapter in the model."""
    return name.endswith(tuple(f".{part}" for part in PARTS))


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors among a model's tensors."""
    return {name: tensor for name, tensor in tensors.items() if is_adapters(name)}


class Merged(Mapping[str, torch.Tensor]):
    """A model's tensors with the adapter merged into the base: W + scale B A, computed one at a time when read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        self._tensors, self._scale = tensors, scale
        self._names = [name for name in tensors if not is_adapters(name)]

    def __getitem__(self, name: str) -> torch.Tensor:
        weight_OI = self._tensors[name].detach()
        lora_A, lora_B = (f"{name.removesuffix(WEIGHT)}.{part}" for part in PARTS)
        if lora_A not in self._tensors:
            return weight_OI
        return weight_OI + (self._tensors[lora_B].detach() @ self._tensors[lora_A].detach()) * self._scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
