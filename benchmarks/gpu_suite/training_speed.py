"""Part `training`: the share of the device's matrix rate that the trainer uses, by length, packing and kernel.

The trainer's own step (packing, log-probs, loss, backward, AdamW) on random tokens with a model made from a config,
float32 parameters and bfloat16 arithmetic. `mfu`: operations of forward and backward pass (6 per parameter and token,
and attention; see arithmetic.py) over their time and the measured bfloat16 matrix rate. `update_ms`: clipping and
AdamW. A micro-batch that does not fit the GPU is tried again with half its tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from benchmarks.gpu_suite import arithmetic, measure
from benchmarks.gpu_suite.attention import usable
from benchmarks.gpu_suite.case import Context
from benchmarks.gpu_suite.shapes import SHAPES, Shape, config_of, random_model
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import OptimizerSettings, TrainerSettings
from trainer.model.attention import Kernel, choose
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

PROMPT_TOKENS = 1 / 4
"""Share of prompt tokens in each sequence: they are computed, but not predicted."""
MIN_BUDGET = 1024


@dataclass(frozen=True)
class Load:
    """The samples of one step. `budget`: tokens of a micro-batch; 1 means one micro-batch per sequence."""

    name: str
    lengths: list[int]
    budget: int
    kernel: Kernel | None = None
    is_checkpointed: bool = False


@dataclass
class Stopwatch:
    """Sums the seconds of the trainer's spans by name, the device's work included."""

    device: torch.device
    sums_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "main", **args: Any) -> Iterator[None]:
        """Time a block."""
        measure.finish(self.device)
        start_s = time.perf_counter()
        yield
        measure.finish(self.device)
        self.sums_s[name] = self.sums_s.get(name, 0.0) + time.perf_counter() - start_s


def run(context: Context) -> None:
    """Measure every load on each model."""
    device = torch.device(context.device)
    peak = measure.matmul_peak(device)
    names = ["tiny"] if context.is_tiny else ["0.6B"] if context.is_quick else ["0.6B", "1.7B"]
    for name in names:
        context.section("training", name, partial(_model, context, SHAPES[name], device, peak))


def loads(context: Context) -> list[Load]:
    """Lengths and packings with nearly the same number of tokens each."""
    if context.is_tiny:
        tail = arithmetic.long_tail_lengths(6, 60)
        return [Load("equal 32", [32] * 4, 64), Load("long tail", tail, 64), Load("long tail, unpacked", tail, 1)]
    total = 32_768 if context.is_quick else 65_536
    tail = arithmetic.long_tail_lengths(64 if context.is_quick else 128, 4096)
    found = [Load(f"equal {length}", [length] * (total // length), 16_384) for length in (512, 2048, 8192)]
    found += [Load("long tail to 4096", tail, 16_384), Load("long tail to 4096, unpacked", tail, 1)]
    found += [Load("long tail to 4096, sdpa", tail, 16_384, kernel="sdpa")]
    if not context.is_quick:
        found += [Load("long tail to 4096, flash_attn", tail, 16_384, kernel="flash_attn")]
        found += [Load("long tail to 4096, checkpointed", tail, 16_384, is_checkpointed=True)]
    return found


def _model(context: Context, shape: Shape, device: torch.device, peak: float) -> None:
    measure.require_memory(16 * shape.parameters + (2 << 30), device)
    model = random_model(config_of(shape), device)
    for load in loads(context):

        def case(load: Load = load) -> Mapping[str, Any]:
            return _measure(context, shape, model, load, device, peak)

        context.run("training", f"{shape.name}: {load.name}", 8 if device.type == "cuda" else 2, case)
        model.zero_grad(set_to_none=True)


def _measure(
    context: Context, shape: Shape, model: Any, load: Load, device: torch.device, peak: float
) -> Mapping[str, Any]:
    precision = "bfloat16"
    if load.kernel is not None:
        usable(load.kernel, precision, device)
    budget = load.budget
    while True:
        try:
            return _attempt(context, shape, model, load, budget, device, peak)
        except torch.OutOfMemoryError:
            if budget // 2 < max(MIN_BUDGET, max(load.lengths)):
                raise
        budget //= 2  # outside the handler: the exception holds the failed pass's tensors
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def _attempt(
    context: Context, shape: Shape, model: Any, load: Load, budget: int, device: torch.device, peak: float
) -> Mapping[str, Any]:
    settings = TrainerSettings(
        device=context.device, precision="bfloat16", micro_batch_tokens=budget, optimizer=OptimizerSettings(lr=1e-6),
        gradient_checkpointing=load.is_checkpointed,
    )  # fmt: skip
    if not load.is_checkpointed:
        model.gradient_checkpointing_disable()
    choice = choose(load.kernel or "auto", device, settings.precision)
    stopwatch = Stopwatch(device)
    setup = Setup(settings, temperature=1.0, num_steps=10, attention=choice, ranks=Ranks.alone(device))
    disagreement_nats = ready_model(model, setup)
    step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=len(load.lengths), tracer=stopwatch)
    samples = random_samples(shape, load.lengths)
    with measure.peak_memory(device) as memory:
        warm_up = step.run(step.prepare(samples, 0))
    stopwatch.sums_s.clear()
    num_runs = 1 if context.is_tiny else 2 if context.is_quick else 5
    metrics = warm_up
    for version in range(1, 1 + num_runs):
        metrics = step.run(step.prepare(samples, version))
    if metrics["skipped_updates"] or warm_up["skipped_updates"]:
        raise ArithmeticError("a gradient was not finite")
    pass_s, update_s, pack_s = (stopwatch.sums_s[name] / num_runs for name in ("micro_batch", "update", "pack"))
    predicted = sum(sample.trajectory.num_sampled for sample in samples)
    flops = arithmetic.training_flops(shape, load.lengths, predicted)
    return {
        "model": shape.name, "load": load.name, "kernel": choice.name, "sequences": len(load.lengths),
        "tokens": sum(load.lengths), "micro_batches": int(metrics["micro_batches"]),
        "budget": budget if budget > 1 else None, "tokens_per_s": sum(load.lengths) / pass_s,
        "mfu": arithmetic.share_of_limit(flops, pass_s, peak), "pass_ms": 1e3 * pass_s, "update_ms": 1e3 * update_s,
        "pack_ms": 1e3 * pack_s, "peak_gib": None if memory.num_bytes is None else memory.num_bytes / measure.GIB,
        "disagreement_nats": disagreement_nats,
    }  # fmt: skip


def random_samples(shape: Shape, lengths: list[int]) -> list[BatchSample]:
    """One sample per length: random tokens, with the log-prob of a uniform distribution for each."""
    rng = np.random.default_rng(0)
    samples = []
    for index, length in enumerate(lengths):
        is_sampled_T = np.arange(length) >= max(1, int(length * PROMPT_TOKENS))
        trajectory = Trajectory(
            rng.integers(0, shape.vocabulary, length).astype(np.int32),
            is_sampled_T,
            np.where(is_sampled_T, -np.log(shape.vocabulary), 0.0).astype(np.float32),
            np.where(is_sampled_T, 0, -1).astype(np.int32),
            "stop",
        )
        samples.append(
            BatchSample(group_id=index // 2, sample_index=index % 2, trajectory=trajectory, reward=float(index % 2))
        )
    return samples
