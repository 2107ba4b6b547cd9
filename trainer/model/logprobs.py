"""Log-probs of sampled tokens under the model, without holding all logits of a micro-batch in memory.

It computes log_softmax(logits / temperature) of the tokens to predict from hidden states, in chunks, including what a
model does to its logits between head and softmax (scaling, soft-capping). Log-probs are those before any top-p or top-k
filtering.

Only the positions that predict a sampled token get logits. A chunk's logits are computed in the forward pass,
discarded, and computed again in the backward pass. On a CPU that costs 35 to 50 % of the head's time, so small logits
(at most `DIRECT_LOGITS` numbers in the whole micro-batch) are computed at once with plain autograd.

Shapes: T packed tokens, N predictions, C predictions of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.model.attention import is_attached
from trainer.model.gather import gather_rows
from trainer.model.model import model_context
from trainer.model.packed import PackedSequences
from trainer.model.router_replay import set_routes

DIRECT_LOGITS = 1 << 22
"""Up to this many logits (16 MiB in float32) a micro-batch is computed at once."""


@dataclass(frozen=True)
class Head:
    """The function from hidden state to logit: logits = softcap(scale * (h W^T + bias)) / temperature.

    softcap(x) = cap * tanh(x / cap), or x if cap is None (Gemma 2 caps, Granite and Cohere scale).
    """

    scale: float
    cap: float | None
    temperature: float

    @staticmethod
    def of(model: PreTrainedModel, temperature: float) -> Head:
        """Return the transformation of `model`'s logits; `agreement.check` verifies it on the model."""
        config = model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:
            scale = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None) is not None:
            factor = float(config.logits_scaling)
            scale = factor if config.model_type == "hyperclovax" else 1.0 / factor
        cap = getattr(config, "final_logit_softcapping", None)
        return Head(scale, None if cap is None else float(cap), float(temperature))

    def logits(self, raw_CV: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits from the head's raw output. May work in place if no gradient is recorded."""
        in_place = not torch.is_grad_enabled()
        if self.cap is not None:
            capped = torch.tanh(raw_CV * (self.scale / self.cap))
            factor = self.cap / self.temperature
            return capped.mul_(factor) if in_place else capped * factor
        factor = self.scale / self.temperature
        if factor == 1.0:
            return raw_CV
        return raw_CV.mul_(factor) if in_place else raw_CV * factor

    def raw_gradient(self, gradient_CV: torch.Tensor, logits_CV: torch.Tensor) -> torch.Tensor:
        """Compute d loss / d raw, in place, from d loss / d logits and the logits."""
        if self.cap is not None:
            tanh_CV = logits_CV.mul_(self.temperature / self.cap)
            return gradient_CV.mul_(1.0 - tanh_CV.square_()).mul_(self.scale / self.temperature)
        factor = self.scale / self.temperature
        return gradient_CV if factor == 1.0 else gradient_CV.mul_(factor)


def token_logprobs(
    model: PreTrainedModel, packed: PackedSequences, *, temperature: float, chunk_tokens: int, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs [N] and entropies [N] (nats) of the predicted tokens, float32; entropy None unless requested.

    Both carry gradients if grad mode is on. Under autocast the head multiplies in the autocast dtype; the softmax is
    always float32. `model` must use our attention function (trainer.attention.attach).
    """
    assert is_attached(model), "attach(model, choice) first: transformers' own attention is silently wrong here"
    assert temperature > 0
    assert chunk_tokens > 0
    head = Head.of(model, temperature)
    hidden_TD = hidden_states(model, packed)
    hidden_ND = gather_rows(hidden_TD, packed.sources_N, packed.prediction_T, absent=packed.unused)
    layer = model.get_output_embeddings()
    weight_VD, bias_V = layer.weight, getattr(layer, "bias", None)
    dtype = _compute_dtype(hidden_ND)
    if dtype == torch.float32 and packed.num_predictions * weight_VD.shape[0] <= DIRECT_LOGITS:
        return _direct(hidden_ND, weight_VD, bias_V, packed.targets_N, head, with_entropy)
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, packed.targets_N, head, dtype, chunk_tokens, with_entropy
    )
    return logprobs_N, entropy_N if with_entropy else None


@torch.no_grad()
def greedy_logprobs(
    model: PreTrainedModel, packed: PackedSequences, *, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probs [N] (nats, float32) of the predicted tokens at temperature 1, and whether each is the most
    likely token, bool [N]. Without gradients; otherwise as `token_logprobs`.
    """
    assert is_attached(model), "attach(model, choice) first: transformers' own attention is silently wrong here"
    head = Head.of(model, 1.0)
    hidden_ND = hidden_states(model, packed).index_select(0, packed.sources_N)
    layer = model.get_output_embeddings()
    bias_V, dtype = getattr(layer, "bias", None), _compute_dtype(hidden_ND)
    logprobs_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
    is_greedy_N = torch.empty(len(hidden_ND), dtype=torch.bool, device=hidden_ND.device)
    with _no_autocast(hidden_ND.device):
        weight_VD = layer.weight.to(dtype)
        for chunk in _chunks(len(hidden_ND), chunk_tokens):
            logp_CV = torch.log_softmax(head.logits(_raw(hidden_ND[chunk].to(dtype), weight_VD, bias_V)), dim=-1)
            targets_C = packed.targets_N[chunk]
            logprobs_N[chunk] = logp_CV.gather(-1, targets_C[:, None])[:, 0]
            is_greedy_N[chunk] = logp_CV.argmax(dim=-1) == targets_C
    return logprobs_N, is_greedy_N


def hidden_states(model: PreTrainedModel, packed: PackedSequences) -> torch.Tensor:
    """Compute the last hidden states [T, D] of the packed row. No cache, no mask: transformers' would mix sequences.

    Raises UserError for a sequence longer than the number of positions that the model computes exactly.
    """
    if (limit := model_context(model.config)) is not None:
        limit.check(packed.segments.longest, where="a sequence")
    set_routes(model, packed.routes_TLK)
    output = model.base_model(
        input_ids=packed.tokens_T[None],
        position_ids=packed.positions_T[None],
        use_cache=False,
        packed_segments=packed.segments,
    )
    hidden_TD: torch.Tensor = output.last_hidden_state[0]
    return hidden_TD


# ---------------------------------------------------------------- at once


def _direct(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    head: Head,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    with _no_autocast(hidden_ND.device):
        bias = None if bias_V is None else bias_V.float()
        raw_NV = torch.nn.functional.linear(hidden_ND.float(), weight_VD.float(), bias)
        logp_NV = torch.log_softmax(head.logits(raw_NV), dim=-1)
        logprobs_N = logp_NV.gather(-1, targets_N[:, None])[:, 0]
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1) if with_entropy else None
    return logprobs_N, entropy_N


# ---------------------------------------------------------------- in chunks


class _ChunkedLogprobs(torch.autograd.Function):
    """Linear head, softmax and gather in chunks; saves one log-normaliser per prediction and recomputes logits.

    With logits z, log-prob of the target y: d/dz = onehot(y) - p; entropy H = -sum p log p: dH/dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: Head,
        dtype: torch.dtype,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = len(targets_N)
        logprobs_N = torch.empty(num, dtype=torch.float32, device=hidden_ND.device)
        normaliser_N, entropy_N = torch.empty_like(logprobs_N), torch.zeros_like(logprobs_N)
        with _no_autocast(hidden_ND.device):
            weight = weight_VD.to(dtype)
            for chunk in _chunks(num, chunk_tokens):
                logits_CV = head.logits(_raw(hidden_ND[chunk].to(dtype), weight, bias_V))
                normaliser_N[chunk] = torch.logsumexp(logits_CV, dim=-1)
                picked_C = logits_CV.gather(-1, targets_N[chunk, None])[:, 0]
                logprobs_N[chunk] = picked_C - normaliser_N[chunk]
                if with_entropy:
                    logp_CV = logits_CV.sub_(normaliser_N[chunk, None])
                    entropy_N[chunk] = -logp_CV.exp().mul_(logp_CV).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, normaliser_N, entropy_N)
        ctx.head, ctx.dtype, ctx.chunk_tokens = head, dtype, chunk_tokens
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, normaliser_N, entropy_N = ctx.saved_tensors
        grad_logprob_N, grad_entropy_N = grads
        if grad_logprob_N is None:
            grad_logprob_N = torch.zeros_like(normaliser_N)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        with _no_autocast(hidden_ND.device):
            weight = weight_VD.to(ctx.dtype)
            for chunk in _chunks(len(targets_N), ctx.chunk_tokens):
                hidden_CD = hidden_ND[chunk].to(ctx.dtype)
                logits_CV = ctx.head.logits(_raw(hidden_CD, weight, bias_V))
                entropies = None if grad_entropy_N is None else (entropy_N[chunk], grad_entropy_N[chunk])
                gradient_CV = _logit_gradient(
                    logits_CV, targets_N[chunk], normaliser_N[chunk], grad_logprob_N[chunk], entropies
                )
                gradient_CV = ctx.head.raw_gradient(gradient_CV, logits_CV)
                if grad_bias_V is not None:
                    grad_bias_V += gradient_CV.sum(0)
                gradient_CV = gradient_CV.to(ctx.dtype)
                if grad_hidden_ND is not None:
                    grad_hidden_ND[chunk] = gradient_CV @ weight
                if grad_weight_VD is not None:
                    _accumulate(grad_weight_VD, gradient_CV, hidden_CD)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None, None, None


def _logit_gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    grad_logprob_C: torch.Tensor,
    entropies: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Compute d loss / d logits [C, V] of log-probs and, if `entropies` (values, gradients) are given, of entropies."""
    logp_CV = logits_CV - normaliser_C[:, None]
    if entropies is None:
        gradient_CV = logp_CV.exp_().mul_(-grad_logprob_C[:, None])
    else:
        entropy_C, grad_entropy_C = entropies
        p_CV = logp_CV.exp()
        factor_CV = logp_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_logprob_C[:, None])
        gradient_CV = factor_CV.mul_(p_CV).neg_()
    return gradient_CV.scatter_add_(1, targets_C[:, None], grad_logprob_C[:, None])


def _raw(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    """Compute the head's output in float32; on CUDA, 16-bit operands are accumulated and kept in float32."""
    if hidden_CD.is_cuda and hidden_CD.dtype != torch.float32:
        raw_CV = torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
    else:
        raw_CV = torch.mm(hidden_CD, weight_VD.t()).float()
    return raw_CV if bias_V is None else raw_CV.add_(bias_V.float())


def _accumulate(grad_weight_VD: torch.Tensor, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """grad_weight += gradient^T hidden, in float32."""
    if gradient_CV.dtype == torch.float32:
        grad_weight_VD.addmm_(gradient_CV.t(), hidden_CD)
    elif gradient_CV.is_cuda:
        grad_weight_VD.add_(torch.mm(gradient_CV.t(), hidden_CD, out_dtype=torch.float32))
    else:
        grad_weight_VD.add_(torch.mm(gradient_CV.t(), hidden_CD).float())


def _chunks(num: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num)) for start in range(0, num, size))


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the head's multiplication. A CPU always uses float32: it cannot keep 16-bit products in
    float32, and logits rounded to bfloat16 have errors of up to 0.06 nat."""
    kind = hidden.device.type
    if kind == "cpu":
        return torch.float32
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)
