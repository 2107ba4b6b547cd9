"""What does keeping keys and values between the turns of an episode gain?

    python -m benchmarks.sessions                a few minutes
    python -m benchmarks.sessions --quick        fewer episodes and rounds; writes nothing
    python -m benchmarks.sessions CONFIG         the model and slots of your own config

Two cores of the embedded engine generate the same multi-turn episodes; one keeps keys and values between turns
(`rollout.engine.session_cache_mb`), the other computes the complete prompt of every turn. Both switch to new weights
equally often (`rollout.interruption: recompute`), which drops kept keys and values. Lengths are those of the task,
tokens are random: `tool_sum` has the prompts and calls of configs/tool_sum.yaml, `observations` prompts of 100 tokens,
and ten turns of 20 sampled and 40 given tokens. An episode requests its next turn at the step after its last one. A
third core samples as many tokens after the same prompts in one turn, which is an upper bound for the gain. Processor
time of the one computing thread, sides in turn; the lowest and the highest round are in brackets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from areal_like.tasks.tool_sum import rows
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from benchmarks.engine_cores import core_with, job_and_model, parse, publish
from benchmarks.spreads import median_spread
from benchmarks.sums import random_tokens
from benchmarks.tables.form import ranged
from rollout.engine.core import GenerationCore
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.engine.slots import Answer

SIDES = {"without": 0, "kept": 256, "one_turn": 0}
"""Memory for kept keys and values, MB."""
Row = dict[str, Any]
Turn = tuple[int, int]
"""Tokens sampled, and given after them."""


@dataclass(frozen=True)
class Case:
    """Concurrent episodes. `swap_tokens`: sampled tokens between two versions."""

    task: str
    slots: int
    episodes: int
    context: int
    swap_tokens: int


CASES = (Case("tool_sum", 128, 600, 160, 10_000), Case("observations", 32, 64, 768, 10_000))


def main() -> None:
    options = parse(__doc__, rounds=5)
    found = []
    heads = "".join(f"{name + ', tokens/s':>24}" for name in SIDES)
    print(f"{'task':14}{'slots':>6}{'prefilled a token':>20}{heads}{'kept / without':>22}")
    for case in CASES:
        job, config = job_and_model(options.config, case.context)
        slots = job.rollout.engine.num_slots if options.config else case.slots
        episodes, rounds = (case.episodes // 32, 1) if options.quick else (case.episodes, options.rounds)
        found.append(measure(config, replace(case, slots=slots, episodes=episodes), rounds))
        row = found[-1]
        prefilled = f"{row['prefilled_without']:.2f} -> {row['prefilled_kept']:.2f}"
        cells = "".join(f"{ranged(row[f'{name}_per_s'], 0):>24}" for name in SIDES)
        print(f"{case.task:14}{slots:6}{prefilled:>20}{cells}{ranged(row['ratio'], 2):>22}", flush=True)
    publish("sessions", found, options)


@torch.no_grad()
def measure(config: PreTrainedConfig, case: Case, rounds: int) -> Row:
    """Measure all sides in turn, after one round that is not counted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    sides = {}
    for name, megabytes in SIDES.items():
        core = sides[name] = core_with([], config, case.slots, case.context, session_bytes=megabytes << 20)
        core.decoder.stage(dict(model.named_parameters()), 0)  # both sets: a swap exchanges them
        core.swap(0, "recompute")
        core.decoder.stage(dict(model.named_parameters()), 1)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    computed: dict[str, float] = {}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            core = sides[name]
            before, began_s = dict(core.counts), time.thread_time()
            play(core, case, in_one_turn=name == "one_turn")
            spent_s, num_tokens = time.thread_time() - began_s, core.counts["tokens"] - before["tokens"]
            computed[name] = (core.counts["prefill_tokens"] - before["prefill_tokens"]) / num_tokens
            if number:
                speeds[name].append(num_tokens / spent_s)
    ratios = [kept / without for kept, without in zip(speeds["kept"], speeds["without"], strict=True)]
    return {
        **asdict(case), **{f"{name}_per_s": median_spread(values) for name, values in speeds.items()},
        **{f"prefilled_{name}": value for name, value in computed.items()}, "ratio": median_spread(ratios),
    }  # fmt: skip


def play(core: GenerationCore, case: Case, *, in_one_turn: bool = False) -> None:
    """Generate all episodes, or as many tokens without turns, with twice as many concurrent ones as slots."""
    rng = np.random.default_rng(0)
    drawn = episodes(case)
    if in_one_turn:
        drawn = [(length, [(sum(sampled for sampled, _ in turns), 0)]) for length, turns in drawn]
    waiting = ((number, iter(turns), random_tokens(rng, length)) for number, (length, turns) in enumerate(drawn))
    live: dict[int, tuple[Iterator[Turn], np.ndarray, int]] = {}
    swapped_at = core.counts["tokens"]
    for number, turns, prompt in islice(waiting, 2 * case.slots):
        live[number] = (turns, prompt, 0)
        _next_turn(core, live, number)
    while live:
        core.refill()
        core.step()
        for number, outcome in core.take_ended():
            assert isinstance(outcome, GenerationOutcome)
            turns, prompt, num_given = live[number]
            given = random_tokens(rng, num_given)
            live[number] = (turns, np.concatenate((prompt, outcome.segment.tokens_R, given)), 0)
            if not _next_turn(core, live, number):
                core.end_session(number)
                del live[number]
                for other, more, begins in islice(waiting, 1):
                    live[other] = (more, begins, 0)
                    _next_turn(core, live, other)
        if core.counts["tokens"] - swapped_at >= case.swap_tokens:
            swapped_at = core.counts["tokens"]
            core.swap(core.version + 1, "recompute")


def _next_turn(core: GenerationCore, live: dict[int, tuple[Iterator[Turn], np.ndarray, int]], number: int) -> bool:
    turns, prompt, _ = live[number]
    turn = next(turns, None)
    if turn is None:
        return False
    live[number] = (turns, prompt, turn[1])
    request = GenerationRequest(
        request_id=number, prompt_P=prompt, prefix=Segment.empty(), seed=number,
        sampling=Sampling(max_new_tokens=turn[0]), session_key=number,
    )  # fmt: skip
    core.submit(Answer(number, request, np.array([-1]), 0.0))
    return True


def episodes(case: Case) -> list[tuple[int, list[Turn]]]:
    """Length of the prompt and turns of each episode."""
    if case.task == "observations":
        return [(100, [(20, 40)] * 10)] * case.episodes
    drawn = islice(rows(1, "train"), case.episodes)
    return [(1 + len(row["prompt"]), [(5, 2)] * (len(row["terms"]) - 1) + [(3, 0)]) for row in drawn]


if __name__ == "__main__":
    main()
