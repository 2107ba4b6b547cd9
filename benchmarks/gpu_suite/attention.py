"""Part `attention`: the trainer's kernels (sdpa, varlen, flash_attn) against one plain call per sequence in float32.

Tables. `attention_errors`: one layer on random numbers, and whole models; relative errors |ours - reference| /
|reference| of outputs or logits, and of gradients. The yardstick is one SDPA call per sequence in bfloat16, which shows
the error of 16-bit computation. `attention_times`: one layer forward and backward over a packed micro-batch.

Tolerances. float32: 1e-4. bfloat16: at most 1.5 times the yardstick's error plus 1e-3, and never above 0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from areal_like.errors import UserError
from benchmarks.gpu_suite import arithmetic, measure
from benchmarks.gpu_suite.case import Beyond, Context, Skip
from benchmarks.gpu_suite.shapes import SHAPES, Shape, config_of, random_model
from trainer.model.attention import Kernel, attach, choose, packed_attention
from trainer.model.logprobs import hidden_states
from trainer.model.packed import PackedSequences
from trainer.model.segments import make_segments

FLOAT32_TOLERANCE = 1e-4
YARDSTICK_FACTOR, YARDSTICK_SLACK, LARGEST_ERROR = 1.5, 1e-3, 0.1
KERNELS: tuple[tuple[Kernel, str], ...] = (
    ("sdpa", "float32"), ("sdpa", "bfloat16"), ("varlen", "bfloat16"), ("flash_attn", "bfloat16"),
)  # fmt: skip
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Errors = dict[str, float]


def run(context: Context) -> None:
    """Measure errors of one layer, errors of a complete model, and times."""
    device = torch.device(context.device)
    shape = SHAPES["tiny" if context.is_tiny else "0.6B"]
    context.section("attention_errors", "layer", lambda: _layer_errors(context, shape, device))
    context.section("attention_errors", "model", lambda: _model_errors(context, shape, device))
    context.section("attention_times", "times", lambda: _times(context, shape, device))


def tolerance(precision: str, yardstick: float) -> float:
    """Largest relative error allowed, given the yardstick's."""
    if precision == "float32":
        return FLOAT32_TOLERANCE
    return min(YARDSTICK_FACTOR * yardstick + YARDSTICK_SLACK, LARGEST_ERROR)


def judged(precision: str, errors: Errors, yardstick: Errors) -> Mapping[str, Any]:
    """The row's values. Raises Beyond if an error is too large or not a number."""
    limits = {name: tolerance(precision, yardstick.get(name, 0.0)) for name in errors}
    row = {**errors, **{f"{name}_limit": limit for name, limit in limits.items()}}
    beyond = [name for name, error in errors.items() if not error <= limits[name]]
    if beyond:
        raise Beyond(f"beyond tolerance: {', '.join(beyond)}", row)
    return row


def relative_error(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """|ours - reference| / |reference| over all tensors together."""
    pairs = list(zip(ours, reference, strict=True))
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return float((difference / size) ** 0.5)


def usable(kernel: Kernel, precision: str, device: torch.device) -> None:
    """Raises Skip with the reason why `kernel` cannot run here."""
    try:
        choose(kernel, device, precision)
    except UserError as error:
        raise Skip(error.what) from error


# ---------------------------------------------------------------- one layer


def random_heads(shape: Shape, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Queries [1, H, T, D], keys and values [1, K, T, D], and a gradient for the output [T, H, D]; float32."""
    generator = torch.Generator(device).manual_seed(num_tokens)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    q, k, v = (draw(1, heads, num_tokens, shape.head_size) for heads in (shape.heads, shape.key_heads, shape.key_heads))
    return q, k, v, draw(num_tokens, shape.heads, shape.head_size)


def per_segment(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """One SDPA call per sequence, key heads repeated: [T, H, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    pieces = zip(*(x.split(list(lengths), 2) for x in (q, k, v)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in pieces]
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def outputs_and_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], heads: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Output, and gradients of q, k and v."""
    q, k, v = (x.to(dtype).requires_grad_() for x in heads[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), heads[3].to(dtype))]


def _kernel(kernel: Kernel, lengths: Sequence[int], device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    segments, layer = make_segments(lengths).to(device), torch.nn.Identity()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(kernel, layer, q, k, v, None, packed_segments=segments)[0][0]

    return attend


def _layer_errors(context: Context, shape: Shape, device: torch.device) -> None:
    lengths = [5, 33, 3, 12] if context.is_tiny else [700, 1, 260, 511, 64, 130, 300, 82]
    heads = random_heads(shape, sum(lengths), device)
    with sdpa_kernel(SDPBackend.MATH):
        reference = outputs_and_gradients(lambda q, k, v: per_segment(q, k, v, lengths), heads, torch.float32)

    def errors(attend: Callable[[Tensor, Tensor, Tensor], Tensor], precision: str) -> Errors:
        ours = outputs_and_gradients(attend, heads, TORCH_DTYPES[precision])
        return {
            "output_error": relative_error(ours[:1], reference[:1]),
            "gradient_error": relative_error(ours[1:], reference[1:]),
        }

    yardstick = errors(lambda q, k, v: per_segment(q, k, v, lengths), "bfloat16")
    what = {"of": "one layer", "kernel": "one call per sequence", "precision": "bfloat16"}
    context.run("attention_errors", "layer: yardstick", 1, lambda: {**what, **yardstick})
    for kernel, precision in KERNELS:

        def case(kernel: Kernel = kernel, precision: str = precision) -> Mapping[str, Any]:
            usable(kernel, precision, device)
            found = errors(_kernel(kernel, lengths, device), precision)
            labels = {"of": "one layer", "kernel": kernel, "precision": precision}
            return {**labels, **judged(precision, found, yardstick)}

        context.run("attention_errors", f"layer: {kernel} {precision}", 1, case)


# ---------------------------------------------------------------- a whole model


def _model_errors(context: Context, shape: Shape, device: torch.device) -> None:
    lengths = [9, 30, 4] if context.is_tiny else [300, 17, 120, 75]
    layers = shape.layers if context.is_tiny or not context.is_quick else 4
    measure.require_memory(12 * shape.parameters + (6 << 30), device)
    model = random_model(config_of(shape, num_layers=layers), device)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, shape.vocabulary, length) for length in lengths]
    packed = PackedSequences.build(tokens, [np.arange(length) > 0 for length in lengths]).to(device)

    def loss_of(logits_NV: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV.float(), packed.targets_N)

    def result(forward: Callable[[], Tensor], precision: str) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            logits_NV = forward()
        loss_of(logits_NV).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [logits_NV.detach(), *gradients]

    def one_by_one() -> Tensor:
        model.set_attn_implementation("sdpa")
        sequences = [torch.from_numpy(sequence).to(device)[None] for sequence in tokens]
        return torch.cat([model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in sequences])

    def errors(forward: Callable[[], Tensor], precision: str) -> Errors:
        ours = result(forward, precision)
        return {
            "output_error": relative_error(ours[:1], reference[:1]),
            "gradient_error": relative_error(ours[1:], reference[1:]),
        }

    reference = [tensor.clone() for tensor in result(one_by_one, "float32")]
    yardstick = errors(one_by_one, "bfloat16")
    of = f"{shape.name}, {layers} layers"
    what = {"of": of, "kernel": "one call per sequence", "precision": "bfloat16"}
    context.run("attention_errors", "model: yardstick", 1, lambda: {**what, **yardstick})
    for kernel, precision in KERNELS:

        def case(kernel: Kernel = kernel, precision: str = precision) -> Mapping[str, Any]:
            usable(kernel, precision, device)
            attach(model, choose(kernel, device, precision))
            found = errors(
                lambda: model.get_output_embeddings()(hidden_states(model, packed)[packed.sources_N]), precision
            )
            return {"of": of, "kernel": kernel, "precision": precision, **judged(precision, found, yardstick)}

        context.run("attention_errors", f"model: {kernel} {precision}", 2, case)


# ---------------------------------------------------------------- times


def mixes(context: Context) -> dict[str, list[int]]:
    """Lengths of packed micro-batches of nearly the same number of tokens."""
    if context.is_tiny:
        return {"equal": [32] * 4, "long tail": arithmetic.long_tail_lengths(8, 64)}
    num_tokens = 16_384
    named = {f"equal {length}": [length] * (num_tokens // length) for length in (512, 2048, 16_384)}
    tail: list[int] = []
    for length in arithmetic.long_tail_lengths(200, 8192):
        if sum(tail) + length > num_tokens:
            break
        tail.append(length)
    return {**named, f"long tail to {max(tail)}": tail}


def _times(context: Context, shape: Shape, device: torch.device) -> None:
    for mix, lengths in mixes(context).items():
        heads = random_heads(shape, sum(lengths), device)
        for kernel, precision in KERNELS:
            if precision == "float32" and device.type == "cuda":
                continue  # nobody trains with this combination

            def case(
                kernel: Kernel = kernel, precision: str = precision, lengths: list[int] = lengths, heads: Any = heads
            ) -> Mapping[str, Any]:
                usable(kernel, precision, device)
                attend, dtype = _kernel(kernel, lengths, device), TORCH_DTYPES[precision]
                ready = [x.to(dtype) for x in heads]
                seconds = measure.median_s(lambda: outputs_and_gradients(attend, ready, dtype), device, repeats=7)
                flops = 3 * arithmetic.attention_flops(shape.heads, shape.head_size, lengths)
                return {
                    "kernel": kernel, "precision": precision, "sequences": len(lengths), "tokens": sum(lengths),
                    "ms": 1e3 * seconds, "tflop_per_s": flops / seconds / 1e12,
                }  # fmt: skip

            context.run("attention_times", f"{mix}: {kernel}", 2, case)
