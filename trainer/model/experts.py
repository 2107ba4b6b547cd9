"""The experts of a mixture of experts by grouped matrix products, registered with transformers.

transformers stores the experts of a layer in two tensors and calls a function over them that can be replaced. The loop
over experts in its model classes costs a dozen small operators for each expert and pass.

Shapes: T tokens, K experts per token, E experts, R = T K rows (a token for each of its experts), D hidden, I inner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from trainer.model.gather import gather_rows

NAME = "areal_like_grouped"
"""Name of the function in transformers (`experts_implementation`)."""
LOOP = "eager"
"""transformers' name of the loop over experts in the model's own class."""


def expert_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that hold the experts of each layer and whose function can be replaced; empty: none."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def attach_experts(model: PreTrainedModel, name: str = NAME) -> None:
    """Make `model` compute its experts by the function of this name: by default grouped products. Does nothing if it
    has none."""
    if expert_modules(model):
        ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
        model.set_experts_implementation(name)


def grouped_experts(
    module: Any, hidden_TD: torch.Tensor, experts_TK: torch.Tensor, scores_TK: torch.Tensor
) -> torch.Tensor:
    """Compute sum over k of scores[t, k] * expert[experts[t, k]](hidden[t]): [T, D], in the dtype of `hidden_TD`.

    The signature is transformers' ExpertsInterface. Under autocast the products compute in its dtype.
    """
    if not _is_plain(module):
        found: torch.Tensor = grouped_mm_experts_forward(module, hidden_TD, experts_TK, scores_TK)
        return found
    num_chosen = experts_TK.shape[-1]
    experts_R, order_R = torch.sort(experts_TK.reshape(-1))
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    ends_E = torch.bincount(experts_R, minlength=module.num_experts).cumsum(0).to(torch.int32)
    gate_up, down, rows = module.gate_up_proj, module.down_proj, hidden_TD
    kind = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else gate_up.dtype
    rows, gate_up, down = (x.to(dtype) for x in (rows, gate_up, down))
    rows_RD = _RowsByExpert.apply(rows, order_R, place_R, num_chosen)
    inner_RI = module._apply_gate(grouped_mm(rows_RD, gate_up.transpose(-2, -1), offs=ends_E))
    out_RD = grouped_mm(inner_RI, down.transpose(-2, -1), offs=ends_E)
    out_TKD = gather_rows(out_RD, place_R, order_R, absent=None).unflatten(0, (-1, num_chosen))
    summed_TD = torch.bmm(scores_TK.to(dtype)[:, None], out_TKD)[:, 0]
    return summed_TD.to(hidden_TD.dtype)


def _is_plain(module: Any) -> bool:
    """True for the layout that this function knows: [E, 2 I, D] and [E, D, I], the gate first, without biases."""
    return bool(
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm or module._is_expert_parallel)
    )


class _RowsByExpert(torch.autograd.Function):
    """hidden[order // K]: each token once for each of its experts. The gradient of a token is the sum of its rows,
    which are gathered; indexing would scatter them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, order_R: torch.Tensor, place_R: torch.Tensor, num_chosen: int
    ) -> torch.Tensor:
        ctx.place_R, ctx.num_chosen = place_R, num_chosen
        return hidden_TD.index_select(0, order_R // num_chosen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows_TKD = grads[0].index_select(0, ctx.place_R).unflatten(0, (-1, ctx.num_chosen))
        return rows_TKD.sum(1), None, None, None
