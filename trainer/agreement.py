"""Proof, on the model at hand, that packed log-probs are the model's own.

Owns: `check`. Refuses: training. It catches what no list of architectures can: layers that mix neighbouring sequences
(convolutions, state spaces, attention that ignores our boundaries) and transformations between head and softmax that
`logprobs.Head` does not know. Two forward passes over sixteen tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError, first_line
from trainer.attention import AttentionChoice, attach
from trainer.logprobs import token_logprobs
from trainer.packed import PackedSequences

LENGTHS = (9, 7)
TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest allowed difference of one log-prob; 16-bit arithmetic alone makes up to a tenth of a nat."""


def check(model: PreTrainedModel, choice: AttentionChoice, dtype: torch.dtype, temperature: float = 1.0) -> float:
    """Largest difference (nats) between packed log-probs and transformers' own, sequence by sequence.

    `dtype` is the compute type (autocast where it is not float32). Attaches `choice`. Raises UserError when they
    disagree.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = [(np.arange(length) * 7919 + 31 * length) % vocabulary for length in LENGTHS]
    masks = [np.arange(length) > 0 for length in LENGTHS]
    packed = PackedSequences.build(tokens, masks).to(device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        attach(model, choice)
        try:
            ours_N, _ = token_logprobs(model, packed, temperature=temperature, chunk_tokens=1024, with_entropy=False)
        except RuntimeError as error:
            if choice.name == "sdpa":
                raise
            raise UserError(  # fault boundary: a kernel refuses shapes it does not know with a bare RuntimeError
                f"{choice.name} attention refuses {type(model).__name__} ({first_line(error)})",
                where="trainer.attention",
                remedy="use sdpa",
            ) from error
        model.set_attn_implementation("eager")
        try:
            theirs_N = torch.cat([_one_by_one(model, sequence, device, temperature) for sequence in tokens])
        finally:
            attach(model, choice)
    difference = float((ours_N - theirs_N).abs().max())
    if not math.isfinite(difference):
        raise UserError(
            f"log-probs of {type(model).__name__} are not finite",
            where="model",
            remedy="the weights or config.json are damaged: fetch the model again, or go back to an earlier checkpoint",
        )
    if not difference <= TOLERANCE_NATS[dtype]:
        raise UserError(
            f"log-probs of {type(model).__name__} differ by {difference:.3g} nat between packed sequences and "
            f"single ones ({choice.name} attention)",
            where="model",
            remedy="this architecture cannot be trained packed; use another model",
        )
    return difference


def _one_by_one(model: PreTrainedModel, tokens: np.ndarray, device: torch.device, temperature: float) -> torch.Tensor:
    ids = torch.from_numpy(tokens).to(device)[None]
    logits_TV = model(input_ids=ids, use_cache=False).logits[0].float()
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logp_TV[:-1].gather(-1, ids[0, 1:, None])[:, 0]
