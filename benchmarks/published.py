"""AReaL's published runs as jobs of the simulator: the reported figures, and what is known of their settings.

Contains the settings of each run with their sources, and sizes that the paper does not print. simulator.py simulates,
fits and compares.

Sources. [P] arXiv 2505.24298 (v5). [C] the authors' repository some weeks later: github.com/inclusionAI/AReaL, commit
325ef6e1b (2025-07-15).

- Synchronous runs have separate GPUs for generation and training, like the asynchronous ones: [C] says that η = 0 of
  the asynchronous system is its synchronous mode (docs/tutorial/quickstart.md), the configs of its synchronous version
  2 name both pools (`sglang.d64p1m1+d32p2m1`). Three quarters of the GPUs generate ([P] 6.1). [P]'s figures support
  this as well, but not independently of the prediction: Table 1's 41.0 / 14.8 hours are Table 2's 356.6 / 128.7, so
  Table 2's η = 0, which belongs to the asynchronous system, is Table 1's synchronous row. This argument uses an
  asynchronous row for a structural assumption; and 356.6 is the throughput at η = 2 or 4, while row 1 is simulated at
  η = 8, which [P] 6.1 gives for math (Table 2 has 371.7 there, a ratio of 2.89).
- GPUs of one engine: 1 for 1.5B and 7B, 8 for 32B ([C] benchmark/*/build_cmd.py), 4 for 14B ([C] v0.3-qwen3-code).
- Proximal log-probs are recomputed in asynchronous runs and not in synchronous ones ([C] training/configs).
- At most 512 groups are generated at once: `max_concurrent_rollouts` defaults to the batch size ([C]).
- TFLOP/s of the trainer ([P] Figure 6a) are counted as in [C] realhf/base/monitor.py: four forward passes per update,
  attention without the causal mask, embeddings as if they were multiplied. Time is their count over their rate; 14B,
  which is not in the figure, has the geometric mean of its neighbours.
- Math answers have a mean of 9,270 tokens: Table 2's 128.7 k tokens/s times Table 1's 41.0 h / 250 steps / 8,192. It
  is solved from the first synchronous row, and is thus a fourth calibrated number in addition to the three fitted ones.
  Code answers: 12,750, the middle of 8K to 17.5K that DeepCoder's authors report for the 14B model on the same
  problems (together.ai/blog/deepcoder). Both are log-normal before the cut at 27,648, with a coefficient of variation
  of 0.87 and 75 % of the log variance between prompts, both as measured on another model's answers
  (THINKING_QUANTILES in areal_like/emulation/lengths.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from areal_like.emulation.lengths import THINKING_BETWEEN, Lengths
from areal_like.emulation.machines import GPUS, MODELS
from areal_like.emulation.roofline import Efficiencies, Roofline
from controller.simulate.job import Job
from controller.simulate.world import World

PROMPTS, ANSWERS, MINI_BATCHES = 512, 16, 4
ROLLOUT_SHARE = 0.75
TAIL_STEPS = 10
"""Batches that may be running or waiting at the largest bound that is simulated for the paper's rows (η 8), and one
more.
"""
MAX_NEW_TOKENS = 27_648
CV = 0.87
GPU = GPUS["h800"]
TP: Mapping[str, int] = {"1.5b": 1, "7b": 1, "14b": 4, "32b": 8}
"""GPUs per engine."""
MEAN_TOKENS: Mapping[str, float] = {"math": 9_270.0, "code": 12_750.0}
"""Mean tokens of an answer, after the cut."""
TFLOPS: Mapping[str, float] = {"1.5b": 427.4, "7b": 454.7, "14b": math.sqrt(454.7 * 387.7), "32b": 387.7}
"""TFLOP/s per GPU of the trainer with dynamic batching ([P] Figure 6a, 1B for 1.5B)."""
INTERMEDIATE_AND_VOCABULARY: Mapping[str, tuple[int, int]] = {
    "1.5b": (8_960, 151_936), "7b": (18_944, 152_064), "14b": (13_824, 152_064), "32b": (27_648, 152_064),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of Table 1."""

    model: str
    task: str
    gpus: int
    steps: int
    sync_h: float
    async_h: float
    eta: int
    """max_staleness of the asynchronous run ([P] 6.1: 8 for math, 4 for code)."""


TABLE_1 = (
    Row("1.5b", "math", 128, 250, 41.0, 14.8, 8),
    Row("7b", "math", 192, 250, 57.7, 25.4, 8),
    Row("14b", "code", 256, 80, 48.8, 21.9, 4),
    Row("32b", "code", 384, 60, 51.1, 31.1, 4),
)
TABLE_2: Mapping[int | None, float] = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, None: 396.8}
"""Thousand tokens per second by max_staleness, 1.5B on 128 GPUs ([P] Figure 5c)."""
FIGURE_4: Mapping[tuple[str, int], Mapping[int, float]] = {
    ("1.5b", 16_384): {32: 29, 64: 55, 128: 100, 256: 146}, ("1.5b", 32_768): {32: 31, 64: 56, 128: 102, 256: 152},
    ("7b", 16_384): {64: 19, 128: 37, 256: 64, 512: 91}, ("7b", 32_768): {64: 19.4, 128: 34, 256: 62, 512: 86},
    ("32b", 16_384): {256: 18.8, 512: 35.7}, ("32b", 32_768): {256: 18, 512: 34.1},
}  # fmt: skip
"""Thousand tokens per second by model, context and GPUs, read off the figure; η 4, math ([C] benchmark/)."""
FIGURE_4_ETA = 4
MAX_PROMPT = 1024
FIGURE_6B: Mapping[str, tuple[float, float]] = {"1.5b": (231.0, 207.0), "7b": (130.0, 111.0)}
"""Thousand generated tokens per second on 4 nodes, interruptible and not."""
FIGURE_6B_GPUS = 32


@functools.cache
def answers(task: str, *, cap: int = MAX_NEW_TOKENS, times: float = 1.0) -> Lengths:
    """Lengths of a task's answers. times: factor on their mean; cap: the same answers are cut at this length."""
    mean = mean_before_cut(times * MEAN_TOKENS[task], CV, MAX_NEW_TOKENS)
    return Lengths(f"{task} answers", mean=mean, cv=CV, between=THINKING_BETWEEN, cap=cap)


def mean_before_cut(mean: float, cv: float, cap: float) -> float:
    """Mean of the log-normal lengths whose mean is `mean` after cutting at `cap`."""
    low, high = mean, 100 * mean
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_after_cut(middle, cv, cap) < mean else (low, middle)
    return low


def mean_after_cut(mean: float, cv: float, cap: float) -> float:
    """E[min(L, cap)] for log-normal L."""
    sigma = math.sqrt(math.log(1 + cv**2))
    z = (math.log(cap / mean) + sigma**2 / 2) / sigma
    return mean * _normal(z - sigma) + cap * (1 - _normal(z))


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def world(
    model: str, gpus: int, lengths: Lengths, reached: Efficiencies, *, eta: int | None, steps: int,
    interruption: str = "recompute",
) -> World:  # fmt: skip
    """The job, ready to run. eta: max_staleness; 0: synchronous; None: unbounded.

    steps: an asynchronous job has TAIL_STEPS more, in which no new groups start; they are not counted.
    """
    tail = TAIL_STEPS if eta != 0 else 0
    trainer = gpus - round(gpus * ROLLOUT_SHARE)
    workers = (gpus - trainer) // TP[model]
    costs = Roofline(
        GPU, MODELS[model], TP[model], trainer, replace(reached, train_mfu=train_mfu(model, lengths)),
        is_recomputing_logprobs=eta != 0,
    )  # fmt: skip
    job = Job(
        PROMPTS, ANSWERS, steps + tail, lengths, mode="sync" if eta == 0 else "async", max_staleness=eta,
        interruption=interruption, updates_per_step=MINI_BATCHES, by_group=True, num_tail_steps=tail,
        on_stale="wait", routing="least_tokens", affinity=1.0, migration=False, min_gain_s=2.0,
    )  # fmt: skip
    return World(job, costs, workers, held=[groups * ANSWERS for groups in shares(workers)])


def shares(workers: int) -> list[int]:
    """Largest number of concurrent groups of each worker; their sum is a batch."""
    return [PROMPTS * (i + 1) // workers - PROMPTS * i // workers for i in range(workers)]


@functools.cache
def train_mfu(model: str, lengths: Lengths) -> float:
    """The reported rate as a share of the data sheet's, in FLOPs counted as in the roofline."""
    drawn = np.concatenate(lengths.draw_groups(np.random.default_rng(0), ANSWERS, PROMPTS)).tolist()
    mine = Roofline(GPU, MODELS[model], 1, 1).forward_flops(drawn)
    return TFLOPS[model] * 1e12 / GPU.flops * mine / their_forward_flops(model, drawn)


def their_forward_flops(model: str, lengths: list[int]) -> float:
    """FLOPs of one forward pass, counted as in the authors' monitor."""
    sizes, (intermediate, vocabulary) = MODELS[model], INTERMEDIATE_AND_VOCABULARY[model]
    tokens, squares = float(sum(lengths)), float(sum(length * length for length in lengths))
    hidden = sizes.hidden
    layer = 4 * tokens * hidden**2 + 2 * squares * hidden + 3 * tokens * hidden * intermediate
    return 2 * sizes.layers * layer + 4 * tokens * vocabulary * hidden
