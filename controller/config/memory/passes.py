"""Memory of one forward and backward pass of the trainer: activations, logits, gradients of a layer.

One pure function per component, with the formula in its docstring. What a backend keeps is in its descriptor
(`working_bytes`, `reducing_bytes`); the sum is in estimate.py.

The formulas count what torch's autograd keeps for the decoder layers of transformers 5 (Llama, Qwen2, Qwen3) with this
program's own attention and head, tensor by tensor; `python -m benchmarks.memory` compares them with measured peaks.

Legend: T tokens of a micro-batch, N of them predicted, C tokens in a chunk of the head; D, A, K, I, V as in
areal_like/decoder_shape.py; c bytes of the compute type (4 or 2), r bytes of the hidden state between two layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.decoder_shape import DecoderShape

FLOAT32 = 4
DIRECT_LOGITS = 1 << 22
"""Up to this many logits the head keeps all of them (trainer/model/logprobs.py)."""
DIRECT_COPIES = 4
"""Copies of the logits in that case: log-probs, probabilities, their product, and one gradient."""


@dataclass(frozen=True)
class Pass:
    """A micro-batch and how it is computed."""

    tokens: int
    """T."""
    compute_bytes: int
    """c."""
    hidden_bytes: int
    """r: 2 where parameters are gathered in bfloat16 (FSDP), else 4: the embedding is float32."""
    chunk_tokens: int
    is_checkpointed: bool
    has_varlen_kernel: bool
    """A kernel for packed sequences (CUDA, bfloat16); otherwise sequences of similar length are batched for SDPA."""
    has_entropy: bool = False
    """The loss has an entropy term."""
    gathered_tokens: int = 0
    """Tokens of other ranks, whose hidden states are gathered before attention and feed-forward part, where ranks split
    their matrices (`trainer.tensor_parallel`)."""


def norm_bytes(shape: DecoderShape, one: Pass, num_readers: int) -> float:
    """Kept by one RMS norm, per token, for the `num_readers` matrices that read its output.

    float32: input, normalised input, output: 12 D. bfloat16 with a float32 hidden state: the first two, and a cast copy
    of the output for each reader: (8 + 2 readers) D. bfloat16 hidden state: its float32 copy, the normalised input and
    the output: 8 D.
    """
    if one.compute_bytes == FLOAT32:
        return 12.0 * shape.hidden
    return (8.0 + 2.0 * num_readers if one.hidden_bytes == FLOAT32 else 8.0) * shape.hidden


def attention_bytes(shape: DecoderShape, one: Pass) -> float:
    """Kept by attention without its norm, per token.

    Query and key norms keep their float32 input and the normalised value: (4 + c) (A + K). The kernel keeps q, k, v and
    its output: c (2 A + 2 K); SDPA over batched sequences keeps a second, unbatched copy of the output: c A.
    """
    query, key, c = shape.query_width, shape.key_width, one.compute_bytes
    head_norms = (4 + c) * (query + key) if shape.has_qk_norm else 0
    return float(head_norms + c * (2 * query + 2 * key) + (0 if one.has_varlen_kernel else c * query))


def feed_forward_bytes(shape: DecoderShape, one: Pass) -> float:
    """Kept by the feed-forward part without its norm, per token: gate, its activation, up, their product: 4 c I (for
    the experts that a token is routed to).
    """
    return 4.0 * one.compute_bytes * shape.inner * shape.experts_per_token


def layer_activation_bytes(shape: DecoderShape, one: Pass) -> float:
    """Kept by one layer, all tokens: of a rank's part of the tokens, all matrices, or equally of all tokens its part of
    the matrices. Hidden states that are gathered before attention and feed-forward part: 2 c D for each token of other
    ranks.
    """
    per_token = norm_bytes(shape, one, num_readers=3) + norm_bytes(shape, one, num_readers=2)
    gathered = 2.0 * one.compute_bytes * shape.hidden * one.gathered_tokens
    return one.tokens * (per_token + attention_bytes(shape, one) + feed_forward_bytes(shape, one)) + gathered


def kept_layer_bytes(shape: DecoderShape, one: Pass) -> float:
    """Kept by one layer from forward to backward pass: with gradient checkpointing only its input, r D per token."""
    if one.is_checkpointed:
        return float(one.tokens * one.hidden_bytes * shape.hidden)
    return layer_activation_bytes(shape, one)


def activation_bytes(shape: DecoderShape, one: Pass) -> float:
    """Kept from forward to backward pass: by every layer, and the final norm with the rows that are predicted: 16 D."""
    return shape.layers * kept_layer_bytes(shape, one) + 16.0 * one.tokens * shape.hidden


def head_bytes(shape: DecoderShape, one: Pass, *, is_cuda: bool) -> float:
    """Peak memory of logits and the head's gradient while activations are kept.

    Few logits (N V <= DIRECT_LOGITS, float32 products): DIRECT_COPIES of 4 N V. Otherwise chunk by chunk: two float32
    copies of the chunk's logits (three with an entropy term), the gradient of hidden states 4 N D, the float32 gradient
    of the head's weight 4 V D; on CUDA in bfloat16 also a copy of the weight, the gradient of a chunk, and the product
    that is added to the weight's gradient: 2 V D + 2 C V + 4 V D. N is taken as T.
    """
    vocabulary, hidden, num = shape.vocabulary, shape.hidden, one.tokens
    is_16_bit = is_cuda and one.compute_bytes != FLOAT32
    if not is_16_bit and num * vocabulary <= DIRECT_LOGITS:
        return 4.0 * DIRECT_COPIES * num * vocabulary
    chunk = min(num, one.chunk_tokens)
    logits = 4.0 * chunk * vocabulary * (3 if one.has_entropy else 2)
    found = logits + 4.0 * num * hidden + 4.0 * vocabulary * hidden
    return found + (6.0 * vocabulary * hidden + 2.0 * chunk * vocabulary if is_16_bit else 0.0)


def layer_backward_bytes(shape: DecoderShape, one: Pass) -> float:
    """Memory that a layer's backward pass adds: gradients of gate, up and their product (3 c I) and of two hidden
    states (8 D) per token, the float32 gradient of the largest matrix; with gradient checkpointing also the layer's own
    activations, which are recomputed.
    """
    gradients = one.tokens * (3.0 * one.compute_bytes * shape.inner * shape.experts_per_token + 8.0 * shape.hidden)
    again = layer_activation_bytes(shape, one) if one.is_checkpointed else 0.0
    return gradients + 4.0 * shape.largest_matrix + again


def transient_bytes(shape: DecoderShape, one: Pass, *, is_cuda: bool) -> float:
    """The larger of what the head and a layer's backward pass add to the kept memory; they do not overlap in time."""
    return max(head_bytes(shape, one, is_cuda=is_cuda), layer_backward_bytes(shape, one))
