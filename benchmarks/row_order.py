"""What does attention over rows in blocks, each as long as its longest row, gain over one block for all rows?

    python -m benchmarks.row_order                two minutes
    python -m benchmarks.row_order --quick        the smallest case, fewer rounds; writes nothing
    python -m benchmarks.row_order CONFIG         the model, slots and group size of your own config

Two cores of the embedded engine generate the same answers, in turn: one computes attention of all rows in one block, in
any order; the other sorts the rows and uses several blocks (docs/decisions/0003-engine.md). Processor time per token of
the one computing thread, moves and prefill included; the lowest and the highest round are in brackets. `task`: prompts
of the quickstart's task and the lengths of their correct answers; `thinking`: the same prompts, and lengths of a
thinking model's answers scaled to a mean of 200. There are at least four answers per slot, and rows become empty
towards the end. CONFIG must make its model (`model.init`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from areal_like.emulation.lengths import thinking
from areal_like.tasks.running_sum import solve
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from benchmarks.engine_cores import core_with, job_and_model, parse, publish
from benchmarks.spreads import median_spread
from benchmarks.sums import encoded, texts
from benchmarks.tables.form import ranged
from rollout.engine.core import GenerationCore
from rollout.engine.decoder import LeanDecoder
from rollout.engine.port import GenerationRequest
from rollout.engine.row_order import ONE_BLOCK
from rollout.engine.slots import Answer

CONTEXT = 1024
LONG_MEAN = 200
WAVES, FEWEST = 4, 384
"""Answers per slot, and smallest number of answers."""
QUICK_FEWEST = 64
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Answers to generate."""

    slots: int
    lengths: str
    """`task` or `thinking`."""
    group: int = 8


CASES = (Case(16, "task"), Case(64, "task"), Case(128, "task"), Case(768, "task"), Case(64, "thinking"))


def main() -> None:
    options = parse(__doc__, rounds=7)
    job, config = job_and_model(options.config, CONTEXT)
    slots = job.rollout.engine.num_slots
    own = tuple(Case(slots, lengths, min(job.group_size, slots)) for lengths in ("task", "thinking"))
    cases = own if options.config else CASES[: 1 if options.quick else None]
    found = []
    print(f"{'slots':>6}  {'lengths':10}{'one block, us per token':>26}{'blocks, us per token':>26}{'ratio':>22}")
    for case in cases:
        rounds, fewest = (1, QUICK_FEWEST) if options.quick else (options.rounds, FEWEST)
        found.append(measure(config, case, rounds, fewest))
        row = found[-1]
        cells = [ranged(row[key], digits) for key, digits in (("one_us", 1), ("blocks_us", 1), ("ratio", 2))]
        print(f"{case.slots:6}  {case.lengths:10}{cells[0]:>26}{cells[1]:>26}{cells[2]:>22}", flush=True)
    publish("row_order", found, options)


@torch.no_grad()
def measure(config: PreTrainedConfig, case: Case, rounds: int, fewest: int) -> Row:
    """Measure both sides in turn, after one round that is not counted."""
    torch.manual_seed(0)
    weights = dict(AutoModelForCausalLM.from_config(config).eval().named_parameters())
    longest = max(
        len(answer.request.prompt_P) + answer.request.sampling.max_new_tokens for answer in answers(case, fewest)
    )
    times: dict[str, list[float]] = {"one_us": [], "blocks_us": []}
    counts: dict[str, int] = {}
    for number in range(rounds + 1):
        for name in list(times)[:: 1 if number % 2 else -1]:
            core = core_with(answers(case, fewest), config, case.slots, longest + 1)
            if name == "one_us":
                assert isinstance(core.decoder, LeanDecoder)
                core.decoder.cache.call_tokens = ONE_BLOCK
                core._order = lambda: None  # type: ignore[method-assign]
            core.decoder.stage(weights, 0)
            core.swap(0, "recompute")
            spent_s = generate(core)
            if number:
                times[name].append(1e6 * spent_s / core.counts["tokens"])
            counts = counts if name == "one_us" else core.counts
    ratios = [one / blocks for one, blocks in zip(*times.values(), strict=True)]
    return {
        **asdict(case), "tokens": counts["tokens"], "steps": counts["steps"], "moved_rows": counts["moved_rows"],
        **{name: median_spread(values) for name, values in times.items()}, "ratio": median_spread(ratios),
    }  # fmt: skip


def generate(core: GenerationCore) -> float:
    """Generate all answers and return the processor seconds."""
    began_s = time.thread_time()
    while True:
        core.refill()
        if not core.slots.num_running:
            return time.thread_time() - began_s
        core.step()


def answers(case: Case, fewest: int) -> list[Answer]:
    """Answers, group after group; at least `fewest`."""
    num_groups = max(fewest, WAVES * case.slots) // case.group
    rng, drawn = np.random.default_rng(0), thinking(CONTEXT, LONG_MEAN)
    made = []
    for group, text in enumerate(texts(num_groups)):
        of_task = [len(solve(text)) + 1] * case.group
        lengths = (
            of_task if case.lengths == "task" else [min(CONTEXT - 200, int(n)) for n in drawn.draw(rng, case.group)]
        )
        for length in lengths:
            number = len(made)
            request = GenerationRequest(
                request_id=number, prompt_P=encoded(text), prefix=Segment.empty(), seed=number, share_key=group,
                sampling=Sampling(max_new_tokens=max(1, length)),
            )  # fmt: skip
            made.append(Answer(number, request, np.array([-1]), 0.0))
    return made


if __name__ == "__main__":
    main()
