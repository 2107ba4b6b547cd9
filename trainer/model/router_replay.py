"""Replays the routes of an engine: the experts that it used for each token replace the choice of the model's routers.

Engine and trainer compute router logits with different rounding, so that a token may be routed to other experts, which
changes its log-prob by far more than rounding does (arXiv 2510.11370). Scores are computed by the model's own weights
for the recorded experts, and their gradient trains the router. Tokens without a record are routed by the model.

The routes of a pass stay set until the next one, because checkpointed layers route again in the backward pass.
Shapes: T tokens, L layers of the model, K experts per token, E experts.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError

KEY = "trainer.router_replay"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_ATTRIBUTE = "areal_like_router_replay"


class RouterReplay:
    """The routes of the current pass of one model; None: its routers choose."""

    def __init__(self, num_layers: int, num_chosen: int) -> None:
        self.num_layers, self.num_chosen = num_layers, num_chosen
        self.routes_TLK: torch.Tensor | None = None

    def route(self, layer: int, router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A forward hook of the router of a layer: returns its logits, and scores and numbers of the chosen experts."""
        if self.routes_TLK is None:
            return output
        logits_TE, scores_TK, chosen_TK = output
        routes_TK = self.routes_TLK[:, layer].to(chosen_TK.dtype)
        chosen_TK = torch.where(routes_TK >= 0, routes_TK, chosen_TK)
        return logits_TE, self.scores(router, logits_TE, chosen_TK).to(scores_TK.dtype), chosen_TK

    @staticmethod
    def scores(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Compute the router's scores [T, K] of the chosen experts, float32."""
        values_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float).gather(-1, chosen_TK)
        return values_TK / values_TK.sum(dim=-1, keepdim=True) if router.norm_topk_prob else values_TK


def attach_replay(model: PreTrainedModel) -> None:
    """Let `set_routes` replay routes in `model`. Raises UserError if its routers are not of a known kind."""
    config = model.config.get_text_config()
    routers = {
        int(found.group(1)): module
        for name, module in model.named_modules()
        if all(hasattr(module, key) for key in ("top_k", "num_experts", "norm_topk_prob", "weight"))
        and (found := _LAYER.search(name)) is not None
    }
    if not routers or not all(_is_known(router) for router in routers.values()):
        raise UserError(
            f"the routers of {config.model_type} cannot be replayed",
            where=KEY,
            remedy="use a model of type qwen3_moe or qwen2_moe, or set router_replay: false",
        )
    replay = RouterReplay(int(config.num_hidden_layers), int(config.num_experts_per_tok))
    for layer, router in routers.items():
        router.register_forward_hook(functools.partial(replay.route, layer))
    setattr(model, _ATTRIBUTE, replay)


def _is_known(router: torch.nn.Module) -> bool:
    """True if replaying a router's own choice gives its own scores: not if it uses a sigmoid or a scaling factor."""
    probe: Any = copy.deepcopy(router).to_empty(device="cpu")  # the model may be on the meta device
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.data = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape).sin()
    with torch.no_grad():
        logits_TE, scores_TK, chosen_TK = probe(torch.eye(4, probe.weight.shape[-1]))
        return torch.allclose(RouterReplay.scores(probe, logits_TE, chosen_TK), scores_TK, atol=1e-5)


def set_routes(model: PreTrainedModel, routes_TLK: torch.Tensor | None) -> None:
    """Set the routes of the next pass: int32, -1 for a token without a record. Does nothing without `attach_replay`.

    Raises UserError for routes of another model.
    """
    replay: RouterReplay | None = getattr(model, _ATTRIBUTE, None)
    if replay is None:
        return
    expected = (replay.num_layers, replay.num_chosen)
    if routes_TLK is not None and tuple(routes_TLK.shape[1:]) != expected:
        raise UserError(
            f"the engine recorded experts of shape {tuple(routes_TLK.shape[1:])}, but the model has {expected} "
            "(layers, experts per token)",
            where=KEY,
            remedy="use the same model in the engine and in the trainer",
        )
    replay.routes_TLK = routes_TLK
