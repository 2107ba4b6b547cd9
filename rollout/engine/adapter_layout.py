"""Which linear modules of a layer the lean decoder computes as one fused product, and the memory of adapters on them.
Does not import torch.

The tensors are in adapters.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_like.weights.adapter_folder import AdapterFolder

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of each product."""
BASE = -1
"""Number of the adapter of a row that has none."""


def product_widths(hidden: int, queries: int, keys: int, inner: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product, from the hidden size, the widths of all query heads and of all key heads, and
    the inner width of the MLP."""
    return {
        "qkv": (hidden, queries + 2 * keys),
        "out": (queries, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def fused_parameters(adapters: Sequence[AdapterFolder], widths: Mapping[str, tuple[int, int]]) -> int:
    """Number of parameters of the adapters of one engine, with the zeros of the fused layout.

    If an adapter changes a module of a product in a layer, all adapters of the engine have A and B there for all
    modules of that product, zeros where their files have none. Modules of no product are counted as in the files.

    Args:
        adapters: the adapters.
        widths: as of `product_widths`.
    """
    product_of = {module: product for product, modules in FUSED.items() for module in modules}
    used, others = set(), 0
    for adapter in adapters:
        for module, sizes in adapter.shapes.items():
            layer, _, name = module.rpartition(".")
            layer, _, kind = layer.rpartition(".")
            product = product_of.get(f"{kind}.{name}")
            if product is None:
                others += adapter.rank * sum(sizes)
            else:
                used.add((layer, product))
    rank = sum(adapter.rank for adapter in adapters)
    return others + sum(len(FUSED[product]) * rank * sum(widths[product]) for _, product in used)
