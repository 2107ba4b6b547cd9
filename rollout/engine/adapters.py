"""Several adapters (LoRA) on the weights of one decoder: rows of different adapters are computed in one pass.

A row with adapter a has y = x W + scale_a (x A_a) B_a. The product with W is one for all rows. Of each fused product
the A of all adapters are stored side by side and their B below each other, so that all adapters of a pass take two more
products together; between them, each row keeps the columns of its own adapter, and the others become zero. Zeros are
also stored where an adapter does not change a module, and in B for the outputs of the other modules of a product. Ranks
are small, so these products cost little more than those of one adapter, and the number of operators, which bounds a
step of a small model, does not depend on the number of adapters.

Folders are read in areal_like/weights/adapter_folder.py; the layout of a layer is in adapter_layout.py.

Legend: M tokens of a pass, I inputs and O outputs of a fused product, R ranks of all adapters together, times the
number of modules of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_like.errors import UserError
from areal_like.weights.adapter import part_names
from areal_like.weights.adapter_folder import AdapterFolder, base_problem
from rollout.engine.adapter_layout import BASE, FUSED, product_widths
from rollout.engine.loading import split_qkv
from rollout.engine.shape import ModelShape


class LowRank(NamedTuple):
    """A and scale * B of one module: x W + (x first_IR) second_RO."""

    first_IR: Tensor
    second_RO: Tensor


class _Product(NamedTuple):
    """A and B of all adapters for one fused product of a layer."""

    num_modules: int
    first_IR: Tensor
    second_RO: Tensor

    @property
    def num_bytes(self) -> int:
        return self.first_IR.nbytes + self.second_RO.nbytes


class LayerAdapters:
    """The adapters of the tokens of one pass in one layer.

    products: of the layer, by name. masks: [M, R] by number of modules; 1 where a column belongs to the token's
    adapter. ranks: the part of the ranks of all adapters that the pass uses.
    """

    def __init__(self, products: Mapping[str, _Product], masks: Mapping[int, Tensor], ranks: slice) -> None:
        self._products, self._masks, self._ranks = products, masks, ranks

    def add(self, name: str, output_MO: Tensor, input_MI: Tensor) -> None:
        """Add what the adapters contribute to the output of a fused product, in place."""
        product = self._products.get(name)
        if product is not None:
            count = product.num_modules
            used = slice(count * self._ranks.start, count * self._ranks.stop)
            inner = (input_MI @ product.first_IR[:, used]) * self._masks[count]
            output_MO.addmm_(inner, product.second_RO[used])


class FusedAdapters:
    """The adapters of a lean decoder, by their numbers in the order given."""

    def __init__(
        self, adapters: Sequence[AdapterFolder], base: Mapping[str, tuple[int, ...]], shape: ModelShape,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """base: shapes of the base's tensors. Raises UserError if an adapter does not fit it, or cannot be read."""
        self._shape, self._dtype, self._device = shape, dtype, device
        ranks = np.array([adapter.rank for adapter in adapters], np.int64)
        self._starts = [0, *np.cumsum(ranks).tolist()]
        self._layers: list[dict[str, _Product]] = [{} for _ in range(shape.num_layers)]
        self._owners = torch.from_numpy(np.repeat(np.arange(len(adapters)), ranks)).to(device)
        self._none: Sequence[LayerAdapters | None] = [None] * shape.num_layers
        self._last: tuple[np.ndarray, Sequence[LayerAdapters | None]] = (np.zeros(0, np.int64), self._none)
        for number, adapter in enumerate(adapters):
            for module, low in read_low_ranks(adapter, base).items():
                self._store(number, module, low)

    @property
    def num_bytes(self) -> int:
        """Bytes of all A and B."""
        return sum(product.num_bytes for layer in self._layers for product in layer.values())

    def chosen(self, adapters_M: np.ndarray | None) -> Sequence[LayerAdapters | None]:
        """The adapters of a pass, by layer; None if no token has one. adapters_M: number of each token's adapter, or
        BASE."""
        if adapters_M is None:
            return self._none
        if not np.array_equal(adapters_M, self._last[0]):  # rows keep their adapters for many steps
            self._last = (adapters_M.copy(), self._choose(adapters_M))
        return self._last[1]

    def _choose(self, adapters_M: np.ndarray) -> Sequence[LayerAdapters | None]:
        used = adapters_M[adapters_M != BASE]
        if not len(used):
            return self._none
        ranks = slice(self._starts[int(used.min())], self._starts[int(used.max()) + 1])
        own = torch.from_numpy(adapters_M).to(self._device)[:, None] == self._owners[ranks]
        counts = {len(modules) for modules in FUSED.values()}
        masks = {count: own.repeat_interleave(count, 1).to(self._dtype) for count in counts}
        return [LayerAdapters(products, masks, ranks) for products in self._layers]

    def _store(self, number: int, module: str, low: LowRank) -> None:
        """Copy A and B of one module into its columns of the layer's product."""
        _, _, layer, inner = module.split(".", 3)
        product, modules = next((name, modules) for name, modules in FUSED.items() if inner in modules)
        products = self._layers[int(layer)]
        if product not in products:
            products[product] = self._empty(product)
        made = products[product]
        rank = low.first_IR.shape[1]
        # Column c of A is owned by adapter `owners[c // number of modules]`: the ranks of its modules alternate.
        start, count = self._starts[number] * len(modules), len(modules)
        columns = slice(start + modules.index(inner), start + rank * count, count)
        made.first_IR[:, columns] = low.first_IR.to(made.first_IR)
        outputs = self._outputs(made.second_RO, inner)
        rows = outputs[columns]
        rows.copy_(low.second_RO.to(made.second_RO).reshape(rows.shape))

    def _outputs(self, second_RO: Tensor, module: str) -> Tensor:
        """View of the columns of B that are a module's outputs, [R, ...]."""
        if module in FUSED["qkv"]:
            return split_qkv(second_RO.t(), self._shape)[module.removeprefix("self_attn.")[0]].movedim(-1, 0)
        inner = self._shape.intermediate_size
        parts = {"mlp.gate_proj": second_RO[:, :inner], "mlp.up_proj": second_RO[:, inner:]}
        return parts.get(module, second_RO)

    def _empty(self, product: str) -> _Product:
        shape, count = self._shape, len(FUSED[product])
        queries, keys = shape.num_heads * shape.head_size, shape.num_key_heads * shape.head_size
        inputs, outputs = product_widths(shape.hidden_size, queries, keys, shape.intermediate_size)[product]
        rank = count * self._starts[-1]
        first_IR = torch.zeros(inputs, rank, dtype=self._dtype, device=self._device)
        return _Product(count, first_IR, first_IR.new_zeros(rank, outputs))


class ModuleAdapters:
    """The adapters of models that compute row by row, as additions to the outputs of their linear modules."""

    def __init__(
        self, adapters: Sequence[AdapterFolder], models: Sequence[torch.nn.Module], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Raises UserError if an adapter does not fit the models, or cannot be read."""
        self.current = BASE
        """The adapter with which the models compute."""
        self.num_bytes = 0
        found: dict[str, dict[int, LowRank]] = {}
        for number, adapter in enumerate(adapters):
            base = {name: tuple(tensor.shape) for name, tensor in models[0].named_parameters()}
            for module, low in read_low_ranks(adapter, base).items():
                if not isinstance(models[0].get_submodule(module), torch.nn.Linear):
                    raise UserError(f"{module} of the base model is not a linear module", where=str(adapter.folder))
                one = LowRank(*(part.to(device, dtype).contiguous() for part in low))
                found.setdefault(module, {})[number] = one
                self.num_bytes += one.first_IR.nbytes + one.second_RO.nbytes
        for model in models:
            for module, by_number in found.items():
                model.get_submodule(module).register_forward_hook(self._hook(by_number))

    def _hook(self, by_number: Mapping[int, LowRank]) -> Callable[[Any, tuple[Tensor], Tensor], Tensor | None]:
        def add(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
            low = by_number.get(self.current)
            return None if low is None else output + inputs[0] @ low.first_IR @ low.second_RO

        return add


def read_low_ranks(adapter: AdapterFolder, base: Mapping[str, tuple[int, ...]]) -> dict[str, LowRank]:
    """Read an adapter's tensors, by the names of their modules. base: shapes of the base's tensors by name.

    Raises UserError if the adapter does not fit the base, or cannot be read.
    """
    problem = base_problem(adapter, base)
    if problem is not None:
        raise problem
    found = {}
    try:
        with safe_open(str(adapter.file), framework="pt") as opened:
            for module in adapter.shapes:
                first_RI, second_OR = (opened.get_tensor(name).float() for name in part_names(f"{module}.weight"))
                if not (torch.isfinite(first_RI).all() and torch.isfinite(second_OR).all()):
                    raise UserError(
                        f"the matrix A or B of {module} contains a value that is not finite", where=str(adapter.file)
                    )
                found[module] = LowRank(first_RI.t(), (second_OR * adapter.scale).t())
    except (OSError, SafetensorError) as error:
        raise UserError(f"the file cannot be read ({error})", where=str(adapter.file)) from error
    return found
