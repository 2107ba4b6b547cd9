"""Checks, on the model in use, that packed log-probs are the model's own.

It detects what no list of architectures can: layers that mix neighbouring sequences (convolutions, state spaces,
attention that ignores our boundaries), positions or rotary frequencies that depend on the rest of the pack, and
transformations between head and softmax that `logprobs.Head` does not know. It costs a few forward passes over two
dozen tokens, some of them at the last positions of the longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError, first_line
from trainer.model.attention import AttentionChoice, attach
from trainer.model.experts import LOOP, attach_experts
from trainer.model.logprobs import token_logprobs
from trainer.model.model import model_context
from trainer.model.packed import PackedSequences
from trainer.model.tensor_split import whole_rows

LENGTHS = (9, 7, 8)
"""The last one ends at the last position of the longest sequence, so that an effect of that shows in the others."""
TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest allowed difference of one log-prob; 16-bit arithmetic alone causes up to a tenth of a nat."""


def check(
    model: PreTrainedModel,
    choice: AttentionChoice,
    dtype: torch.dtype,
    temperature: float = 1.0,
    max_context: int | None = None,
    compute: Callable[[PackedSequences], torch.Tensor] | None = None,
) -> float:
    """Return the largest difference (nats) between packed log-probs and transformers' own, sequence by sequence.

    `dtype` is the compute dtype (autocast if it is not float32), `max_context` the longest expected sequence (None: the
    number of the model's positions). compute: returns the packed log-probs of a model that is split over ranks; None:
    they are computed here. Attaches `choice`, and grouped products for experts. Raises UserError if they
    disagree, if the model cannot compute such sequences exactly, and if it cannot be packed at all.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.config.get_text_config().vocab_size)
    starts = _starts(model, max_context)
    tokens = [(np.arange(length) * 7919 + 31 * length) % vocabulary for length in LENGTHS[: len(starts)]]
    masks = [np.arange(len(sequence)) > 0 for sequence in tokens]
    packed = PackedSequences.build(tokens, masks)
    positions = [torch.arange(len(part)) + start for part, start in zip(tokens, starts, strict=True)]
    packed = replace(packed, positions_T=torch.cat(positions)).to(device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        attach(model, choice)
        attach_experts(model)
        ours_N = _packed(model, packed, choice, temperature) if compute is None else compute(packed)
        model.set_attn_implementation("eager")
        attach_experts(model, LOOP)
        try:
            with whole_rows(model):
                theirs_N = torch.cat(
                    [
                        _alone(model, sequence, start, device, temperature)
                        for sequence, start in zip(tokens, starts, strict=True)
                    ]
                )
        finally:
            attach(model, choice)
            attach_experts(model)
    difference = float((ours_N - theirs_N).abs().max())
    if not math.isfinite(difference):
        raise UserError(
            f"the log-probs of {type(model).__name__} are not finite",
            where="model",
            remedy="the weights or config.json may be damaged: download the model again, or use an earlier checkpoint",
        )
    if not difference <= TOLERANCE_NATS[dtype]:
        raise UserError(
            f"the log-probs of {type(model).__name__} differ by {difference:.3g} nats between packed sequences and "
            f"single sequences ({choice.name} attention)",
            where="model",
            remedy="use a different architecture, such as Qwen3 or Llama, which can be trained on packed sequences",
        )
    return difference


def _starts(model: PreTrainedModel, max_context: int | None) -> Sequence[int]:
    """Return the first position of each sequence; only two sequences if no maximum length is known."""
    limit, longest = model_context(model.config), max_context or 0
    if limit is not None:
        longest = limit.cap(max_context or limit.tokens, where="rollout.engine.max_context")
    return (0, 0, longest - LENGTHS[-1]) if longest > LENGTHS[-1] else (0, 0)


def _packed(
    model: PreTrainedModel, packed: PackedSequences, choice: AttentionChoice, temperature: float
) -> torch.Tensor:
    try:
        logprobs_N, _ = token_logprobs(model, packed, temperature=temperature, chunk_tokens=1024, with_entropy=False)
    except UserError:
        raise
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        # kernels raise these for unsupported shapes, and models for unknown keywords
        what = f"{type(model).__name__} ({type(error).__name__}: {first_line(error)})"
        if choice.name == "sdpa":
            raise UserError(
                f"packed sequences are not supported by {what}",
                where="model",
                remedy="use a different model, such as a Qwen3 or Llama model",
            ) from error
        raise UserError(
            f"{choice.name} attention does not support {what}",
            where="trainer.attention",
            remedy="set trainer.attention to sdpa",
        ) from error
    return logprobs_N


def _alone(
    model: PreTrainedModel, tokens: np.ndarray, start: int, device: torch.device, temperature: float
) -> torch.Tensor:
    """Return transformers' own log-probs [T - 1] of one sequence that begins at position `start`."""
    ids = torch.from_numpy(tokens).to(device)[None]
    positions = {"position_ids": start + torch.arange(len(tokens), device=device)[None]} if start else {}
    logits_TV = model(input_ids=ids, use_cache=False, **positions).logits[0].float()
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return logp_TV[:-1].gather(-1, ids[0, 1:, None])[:, 0]
