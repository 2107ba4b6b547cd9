"""Part `engine`: how fast the embedded engine decodes and prefills, compared with the limits of the device's memory and
matrix units.

The loop body of the engine (admission, forward pass, sampling, records on the host) runs here without its thread, so
that single steps can be timed; random weights, no stop ids, so every answer has its full length.
`bandwidth_share`: bytes a step must read (weights once, keys and values of every row's context) over its time and the
measured bandwidth of a copy. `prefill_matmul_share`: operations a prefill must do, over its time and the measured
bfloat16 matrix rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from benchmarks.gpu_suite import arithmetic, measure
from benchmarks.gpu_suite.case import Context
from benchmarks.gpu_suite.shapes import SHAPES, Shape, config_of, random_tensors
from rollout.engine.core import GenerationCore
from rollout.engine.decoder import LeanDecoder
from rollout.engine.port import GenerationRequest
from rollout.engine.slots import Answer

WARM_STEPS = 8


def run(context: Context) -> None:
    """Measure each shape with several numbers of slots and lengths of context."""
    device = torch.device(context.device)
    dtype = torch.float32 if context.is_tiny else torch.bfloat16
    limits = {"bandwidth": measure.copy_bandwidth(device), "matmul": measure.matmul_peak(device)}
    names = ["tiny"] if context.is_tiny else ["0.6B"] if context.is_quick else ["0.6B", "1.7B"]
    num_steps = 6 if context.is_tiny else 48 if context.is_quick else 128
    for name in names:
        shape = SHAPES[name]
        for num_slots, prompt in _cases(context):

            def case(shape: Shape = shape, num_slots: int = num_slots, prompt: int = prompt) -> Mapping[str, Any]:
                return _measure(shape, num_slots, prompt, num_steps, dtype, device, limits)

            context.run(
                "engine", f"{name}: {num_slots} slots, prompts of {prompt}", 8 if device.type == "cuda" else 2, case
            )


def _cases(context: Context) -> list[tuple[int, int]]:
    """(slots, tokens of each prompt)."""
    if context.is_tiny:
        return [(1, 16), (8, 16)]
    if context.is_quick:
        return [(1, 512), (16, 512), (64, 512), (256, 512), (64, 4096)]
    return [(1, 512), (8, 512), (16, 512), (64, 512), (128, 512), (256, 512), (512, 512), (16, 4096), (64, 4096)]


@torch.inference_mode()
def _measure(
    shape: Shape,
    num_slots: int,
    prompt: int,
    num_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Mapping[str, float],
) -> Mapping[str, Any]:
    max_context = prompt + WARM_STEPS + num_steps + 8
    need = arithmetic.engine_memory_bytes(shape, num_slots, max_context, dtype.itemsize)
    logits = 32 * num_slots * shape.vocabulary  # float32 and float64 copies while sampling
    measure.require_memory(need + shape.parameters * dtype.itemsize + logits + (2 << 30), device)
    config = config_of(shape)
    core = GenerationCore(
        lambda: LeanDecoder(config, num_slots, max_context, dtype, device),
        shape.vocabulary, num_slots, max_context, device,
    )  # fmt: skip
    core.decoder.stage(random_tensors(config, device, dtype), 0)
    core.swap(0, "recompute")
    _fill(core, shape, num_slots, prompt)  # once without timing: kernels load, the allocator takes its blocks
    core.cancel_all()
    core.refill()
    prefill_s = _fill(core, shape, num_slots, prompt)
    for _ in range(WARM_STEPS):
        core.step()
    walls_s = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        core.step()  # ends with the tokens on the host
        walls_s.append(time.perf_counter() - start_s)
    step_s = statistics.median(walls_s)
    context_T = prompt + WARM_STEPS + num_steps // 2
    num_bytes = arithmetic.decode_step_bytes(shape, [context_T] * num_slots, dtype.itemsize)
    flops = arithmetic.prefill_flops(shape, [prompt - 1] * num_slots)
    return {
        "model": shape.name, "slots": num_slots, "prompt": prompt, "precision": str(dtype).removeprefix("torch."),
        "tokens_per_s": num_slots / step_s, "step_ms": 1e3 * step_s,
        "step_p95_ms": 1e3 * float(np.percentile(walls_s, 95)),
        "limit_ms": 1e3 * num_bytes / limits["bandwidth"],
        "bandwidth_share": arithmetic.share_of_limit(num_bytes, step_s, limits["bandwidth"]),
        "prefill_tokens_per_s": num_slots * (prompt - 1) / prefill_s,
        "prefill_matmul_share": arithmetic.share_of_limit(flops, prefill_s, limits["matmul"]),
    }  # fmt: skip


def _fill(core: GenerationCore, shape: Shape, num_slots: int, prompt: int) -> float:
    """Give every slot a different prompt and return the seconds of the prefill."""
    rng = np.random.default_rng(prompt)
    for index in range(num_slots):
        request = GenerationRequest(
            request_id=index,
            prompt_P=rng.integers(0, shape.vocabulary, prompt).astype(np.int32),
            prefix=Segment.empty(),
            sampling=Sampling(max_new_tokens=core.slots.max_context),
            seed=index,
        )
        core.submit(Answer(index, request, np.zeros(0, np.int64), time.monotonic()))
    return measure.wall_s(core.refill, core.device)
