"""Formulas for the minimum number of bytes and operations of the work, and their share of the machine's limit.

Measures nothing and does not import torch.

Operations are multiplications and additions, two per weight and token. Attention is counted as causal: each of L tokens
attends to L / 2 tokens on average, in two products (scores, and values) of D per head. A backward pass takes twice its
forward pass. Recomputation (activations, logits of the chunked head) is not counted: the share is MFU, not HFU.

Legend: T tokens, L tokens of one sequence, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_suite.shapes import Shape


def kv_bytes_per_token(shape: Shape, item_bytes: int) -> int:
    """Keys and values of one token in all layers: 2 * layers * K * D * item."""
    return 2 * shape.layers * shape.key_heads * shape.head_size * item_bytes


def weight_bytes_read(shape: Shape, item_bytes: int) -> int:
    """Weights that one decode step must read: all layers, the last norm and the head, but only a few rows of the
    embedding."""
    layers = shape.layers * (shape.layer_matrices + shape.layer_norms)
    return (layers + shape.hidden + shape.embedding) * item_bytes


def decode_step_bytes(shape: Shape, contexts: Sequence[int], item_bytes: int) -> int:
    """Bytes that one decode step must read: the weights once, and the keys and values of each row's context."""
    return weight_bytes_read(shape, item_bytes) + sum(contexts) * kv_bytes_per_token(shape, item_bytes)


def engine_memory_bytes(shape: Shape, num_slots: int, max_context: int, item_bytes: int) -> int:
    """Bytes that the embedded engine allocates: two sets of weights and the cache of all slots."""
    return 2 * shape.parameters * item_bytes + num_slots * max_context * kv_bytes_per_token(shape, item_bytes)


def attention_flops(heads: int, head_size: int, lengths: Sequence[int]) -> int:
    """Forward pass of causal attention in one layer: 2 * H * D * sum of L^2."""
    return 2 * heads * head_size * sum(length * length for length in lengths)


def prefill_flops(shape: Shape, lengths: Sequence[int]) -> int:
    """Operations for keys and values of prompts of these lengths: no logits, and only the two projections of the last
    layer."""
    num_tokens = sum(lengths)
    last = 2 * shape.hidden * shape.key_heads * shape.head_size
    matrices = (shape.layers - 1) * shape.layer_matrices + last
    attention = (shape.layers - 1) * attention_flops(shape.heads, shape.head_size, lengths)
    return 2 * matrices * num_tokens + attention


def training_flops(shape: Shape, lengths: Sequence[int], num_predictions: int) -> int:
    """Forward and backward: 6 * (layers * matrices * T + vocabulary * hidden * predictions) + 3 * attention.

    The head counts only for predicted positions, since the trainer computes no other logits.
    """
    body = 6 * shape.layers * shape.layer_matrices * sum(lengths)
    head = 6 * shape.embedding * num_predictions
    return body + head + 3 * shape.layers * attention_flops(shape.heads, shape.head_size, lengths)


def share_of_limit(amount: float, seconds: float, limit_per_s: float) -> float:
    """amount / seconds / limit: MFU with operations, share of the bandwidth limit with bytes."""
    assert seconds > 0
    assert limit_per_s > 0
    return amount / seconds / limit_per_s


def whole_logits_bytes(num_predictions: int, vocabulary: int) -> int:
    """One float32 copy of all logits."""
    return 4 * num_predictions * vocabulary


def long_tail_lengths(num: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths that are typical of reinforcement learning: log-normal (sigma 1), with a long tail.

    The longest is `longest`, the median about a tenth of it; none is shorter than 2.
    """
    import numpy as np

    drawn = np.exp(np.random.default_rng(seed).normal(0.0, 1.0, num))
    scaled = drawn / drawn.max() * longest
    return [max(2, int(value)) for value in scaled]
