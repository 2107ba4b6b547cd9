"""Prediction of the paper's Figure 6a: the gain of micro-batches packed by tokens over a fixed number of them.

Contains the settings of that figure, and the time of a pipeline with uneven micro-batches. areal_like/packing.py packs,
as in the trainer. A GPU's rate is assumed not to depend on the size of a micro-batch.

No number is fitted to this figure; the mean of the answers is the one solved from Table 1 (published.py), and the gain
is also given for means that are a fifth lower and higher. Each rank gets the same number of answers, and the same ones
in both cases. With a fixed number of micro-batches, each has the same number of answers, whatever their lengths, so
that the stages of a pipeline wait for each other's long ones; packed micro-batches are even. The step ends with the
slowest rank.

Sources, named as in published.py. [P] 7.5: 32 micro-batches, or 32,768 tokens in each; 1, 2 and 8 nodes of 8 GPUs. [C]
benchmark/*/build_cmd.py: stages of the pipeline and GPUs per stage for each model, which gives four ranks for each of
the three sizes; ppo_n_minibatches 4 of 512 x 16 answers ([P] Table 3). Not known, and assumed after both alternatives
were compared with the reported figures: that answers of different prompts are mixed. In the order of their prompts,
each of a fixed number of micro-batches would hold one prompt's answers; `by_prompt` is the gain in that case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_like.emulation.machines import MODELS
from areal_like.emulation.roofline import Roofline
from areal_like.packing import pack
from benchmarks import published as paper

FIGURE_6A: Mapping[str, tuple[float, float]] = {"1.5b": (427.4, 404.4), "7b": (454.7, 303.1), "32b": (387.7, 283.0)}
"""TFLOP/s per GPU, packed and with a fixed number of micro-batches (1B in the figure for 1.5B)."""
STAGES: Mapping[str, int] = {"1.5b": 2, "7b": 4, "32b": 8}
RANKS = 4
FIXED, CAPACITY = 32, 32_768
OTHER_MEANS = (0.8, 1.2)
"""Factors on the mean of the answers, which was not measured."""
MINI_BATCHES = 8
"""Mini-batches drawn, each a quarter of a batch."""
BACKWARD = 3.0
"""Factor on the time of a forward pass: gradients of weights and of activations, and recomputed activations."""
Row = dict[str, Any]


def figure_6a() -> list[Row]:
    """Predicted and reported gain of each model."""
    rows = []
    for model, (packed, fixed) in FIGURE_6A.items():
        mixed, by_prompt = gain(model, by_prompt=False), gain(model, by_prompt=True)
        reported = packed / fixed
        rows.append({"model": model, "stages": STAGES[model], "reported_packed": packed, "reported_fixed": fixed,
                     "predicted_gain": mixed, "reported_gain": reported, "error": mixed / reported - 1,
                     "by_prompt": by_prompt,
                     "other_means": {str(times): gain(model, by_prompt=False, times=times) for times in OTHER_MEANS},
                     })  # fmt: skip
    return rows


def gain(model: str, *, by_prompt: bool, times: float = 1.0) -> float:
    """Time with a fixed number of micro-batches over time with packed ones, mean of the mini-batches. times: factor on
    the mean of the answers.
    """
    costs, lengths = Roofline(paper.GPU, MODELS[model], 1, 1), paper.answers("math", times=times)
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(MINI_BATCHES):
        groups = lengths.draw_groups(rng, paper.ANSWERS, paper.PROMPTS // paper.MINI_BATCHES)
        answers = np.concatenate(groups).astype(int)
        ranks = np.split(answers if by_prompt else rng.permutation(answers), RANKS)
        ways = (in_equal_numbers, by_tokens)
        fixed_s, packed_s = (
            max(pipeline_s([costs.forward_flops(part) for part in way(rank.tolist())], STAGES[model]) for rank in ranks)
            for way in ways
        )
        gains.append(fixed_s / packed_s)
    return float(np.mean(gains))


def in_equal_numbers(lengths: Sequence[int]) -> list[list[int]]:
    """FIXED micro-batches with equal numbers of answers, in order of arrival."""
    return [part.tolist() for part in np.array_split(np.asarray(lengths), FIXED)]


def by_tokens(lengths: Sequence[int]) -> list[list[int]]:
    """Micro-batches packed as in the trainer."""
    return [[lengths[index] for index in members] for members in pack(lengths, CAPACITY)]


def pipeline_s(forward_s: Sequence[float], stages: int) -> float:
    """Time of one update. forward_s: time of each micro-batch's forward pass, divided evenly among the stages.

    Each stage first runs as many forward passes as there are stages after it and one more, then one backward and one
    forward pass in turn (arXiv 2104.04473, section 2.2). Communication takes no time.
    """
    parts = [seconds / stages for seconds in forward_s]
    orders = [one_forward_one_backward(len(parts), stages - stage) for stage in range(stages)]
    ended: dict[tuple[int, bool, int], float] = {}
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                is_backward, index = order[places[stage]]
                ready = _ready_s(ended, stage, stages, is_backward=is_backward, index=index)
                if ready is None:
                    break
                spent = parts[index] * (BACKWARD if is_backward else 1.0)
                clocks[stage] = max(clocks[stage], ready) + spent
                ended[stage, is_backward, index] = clocks[stage]
                places[stage] += 1
    return max(clocks)


def one_forward_one_backward(count: int, ahead: int) -> list[tuple[bool, int]]:
    """(is backward, micro-batch) for the passes of a stage in order. ahead: most micro-batches that it holds."""
    warm = min(ahead, count)
    order = [(False, index) for index in range(warm)]
    for index in range(count):
        order.append((True, index))
        if index + warm < count:
            order.append((False, index + warm))
    return order


def _ready_s(
    ended: Mapping[tuple[int, bool, int], float], stage: int, stages: int, *, is_backward: bool, index: int
) -> float | None:
    """Time at which the previous stage (the next one, if backward) ends this micro-batch; None: not yet known."""
    if not is_backward:
        return 0.0 if stage == 0 else ended.get((stage - 1, False, index))
    return ended.get((stage, False, index)) if stage == stages - 1 else ended.get((stage + 1, True, index))
