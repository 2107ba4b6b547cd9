"""Part `logprobs`: peak memory and time of log-probs with their backward pass, with and without chunks of logits.

One layer of the model and its complete head; the same predictions once in chunks, as in the trainer, and once with all
logits at once under torch's own autograd. Peaks are measured above the weights and include gradients. Values are also
compared: they may differ by 0.1 nat, since plain bfloat16 logits are rounded while ours are kept in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_suite import arithmetic, measure
from benchmarks.gpu_suite.case import Beyond, Context
from benchmarks.gpu_suite.shapes import SHAPES, config_of, random_model
from trainer.model.attention import attach, choose
from trainer.model.logprobs import hidden_states, token_logprobs
from trainer.model.packed import PackedSequences

TOLERANCE_NATS = 0.1


def run(context: Context) -> None:
    """Measure each number of predictions in chunks and at once."""
    context.section("logprobs", "model", lambda: _compare(context, torch.device(context.device)))


def _compare(context: Context, device: torch.device) -> None:
    shape = SHAPES["tiny" if context.is_tiny else "0.6B"]
    model = random_model(config_of(shape, num_layers=1), device)
    attach(model, choose("auto", device, "bfloat16"))
    sizes = [64] if context.is_tiny else [4096, 16_384]
    chunks = [16] if context.is_tiny else [1024] if context.is_quick else [256, 1024, 4096]
    for num in sizes:
        rng = np.random.default_rng(num)
        length = min(num, 1024)
        tokens = [rng.integers(0, shape.vocabulary, length + 1) for _ in range(num // length)]
        packed = PackedSequences.build(tokens, [np.arange(length + 1) > 0 for _ in tokens]).to(device)

        def whole(packed: PackedSequences = packed) -> Tensor:
            return _whole(model, packed)

        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
            chunked = token_logprobs(model, packed, temperature=1.0, chunk_tokens=chunks[0], with_entropy=False)[0]
        for chunk in chunks:

            def in_chunks(packed: PackedSequences = packed, chunk: int = chunk) -> Tensor:
                return token_logprobs(model, packed, temperature=1.0, chunk_tokens=chunk, with_entropy=False)[0]

            _case(context, f"{num} predictions, chunks of {chunk}", model, in_chunks, num, shape.vocabulary, chunked)
        _case(context, f"{num} predictions, whole logits", model, whole, num, shape.vocabulary, chunked)


def _whole(model: Any, packed: PackedSequences) -> Tensor:
    logits_NV = model.get_output_embeddings()(hidden_states(model, packed)[packed.sources_N])
    return torch.log_softmax(logits_NV.float(), -1).gather(-1, packed.targets_N[:, None])[:, 0]


def _case(
    context: Context, name: str, model: Any, work: Callable[[], Tensor], num: int, vocabulary: int, expected_N: Tensor
) -> None:
    device = torch.device(context.device)

    def both_passes() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logprobs_N = work()
        (-logprobs_N.mean()).backward()
        return logprobs_N.detach()

    def case() -> Mapping[str, Any]:
        with measure.peak_memory(device) as memory:
            logprobs_N = both_passes()
        difference = float((logprobs_N - expected_N).abs().max())
        seconds = measure.median_s(both_passes, device, repeats=3, warmups=1)
        model.zero_grad(set_to_none=True)
        peak = memory.num_bytes
        row = {
            "predictions": num, "ms": 1e3 * seconds, "peak_gib": None if peak is None else peak / measure.GIB,
            "one_copy_of_logits_gib": arithmetic.whole_logits_bytes(num, vocabulary) / measure.GIB,
            "difference_nats": difference,
        }  # fmt: skip
        if not difference <= TOLERANCE_NATS:
            raise Beyond(f"log-probs differ by more than {TOLERANCE_NATS} nat", row)
        return row

    try:
        context.run("logprobs", name, 2, case)
    finally:
        model.zero_grad(set_to_none=True)
