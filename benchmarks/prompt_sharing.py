"""What does computing a group's prompt once gain when caches are rebuilt under new weights?

    python -m benchmarks.prompt_sharing                a minute
    python -m benchmarks.prompt_sharing --quick        the smallest case, one round; writes nothing
    python -m benchmarks.prompt_sharing CONFIG         the model, slots and group size of your own config

Two cores of the embedded engine hold the same running answers; in one the members of a group are declared to share a
prompt, in the other they are not. Both repeatedly switch to the same new weights, in turn, and rebuild all keys and
values (`rollout.interruption: recompute`). Processor time of the one computing thread; the lowest and the highest round
are in brackets. Prompts are those of the quickstart's task, and random ones of 200 tokens; running answers have between
one token and twice their mean. An answer that is much longer than its prompt does not share it, since attention from
the prompt's end on would then cost more than it saves. CONFIG must make its model (`model.init`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from benchmarks.engine_cores import core_with, job_and_model, parse, publish
from benchmarks.spreads import median_spread
from benchmarks.sums import encoded, random_tokens, texts
from benchmarks.tables.form import ranged
from rollout.engine.port import GenerationRequest
from rollout.engine.slots import Answer

LONG_PROMPT = 200
CONTEXT = 384
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Running answers."""

    slots: int
    group: int
    prompts: str
    """`short`: those of the quickstart; `long`: random ones of LONG_PROMPT tokens."""
    answer_mean: int
    """Mean number of tokens of running answers."""


CASES = (Case(32, 8, "short", 14), Case(128, 8, "short", 14), Case(64, 16, "long", 60), Case(32, 8, "short", 150))


def main() -> None:
    options = parse(__doc__, rounds=100)
    job, config = job_and_model(options.config, CONTEXT)
    slots = job.rollout.engine.num_slots
    own = [Case(slots, min(job.group_size, slots), prompts, 60) for prompts in ("short", "long")]
    cases = own if options.config else CASES[: 1 if options.quick else None]
    found = []
    print(f"{'answers':>8}{'tokens':>8}{'group':>7}  {'prompts':8}{'alone, ms':>24}{'shared, ms':>24}{'ratio':>22}")
    for case in cases:
        found.append(measure(config, case, 1 if options.quick else options.rounds))
        row = found[-1]
        cells = [ranged(row[key], digits) for key, digits in (("alone_ms", 1), ("shared_ms", 1), ("ratio", 2))]
        shown = f"{case.slots:8}{case.answer_mean:8}{case.group:7}  {case.prompts:8}"
        print(f"{shown}{cells[0]:>24}{cells[1]:>24}{cells[2]:>22}", flush=True)
    publish("prompt_sharing", found, options)


@torch.no_grad()
def measure(config: PreTrainedConfig, case: Case, rounds: int) -> Row:
    """Measure both sides in turn, after one round that is not counted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    alone, shared = (
        core_with(answers(case, is_shared=is_shared), config, case.slots, CONTEXT) for is_shared in (False, True)
    )
    for core in (alone, shared):
        core.decoder.stage(dict(model.named_parameters()), 0)  # both sets: a swap exchanges them
        core.swap(0, "recompute")
        core.decoder.stage(dict(model.named_parameters()), 1)
        core.refill()
    times: dict[str, list[float]] = {"alone_ms": [], "shared_ms": []}
    tokens = [core.counts["prefill_tokens"] for core in (alone, shared)]
    for number in range(rounds + 1):
        sides = (("alone_ms", alone), ("shared_ms", shared))
        for name, core in sides[:: 1 if number % 2 else -1]:
            began_s = time.thread_time()
            core.swap(number + 1, "recompute")
            if number:
                times[name].append(1e3 * (time.thread_time() - began_s))
    ratios = [one / other for one, other in zip(times["alone_ms"], times["shared_ms"], strict=True)]
    computed = [
        (core.counts["prefill_tokens"] - before) // (rounds + 1)
        for core, before in zip((alone, shared), tokens, strict=True)
    ]
    return {
        **asdict(case),
        **{name: median_spread(values) for name, values in times.items()}, "ratio": median_spread(ratios),
        "tokens_alone": computed[0], "tokens_shared": computed[1],
    }  # fmt: skip


def answers(case: Case, *, is_shared: bool) -> list[Answer]:
    """Running answers: with a prefix, as when a worker continues them."""
    rng = np.random.default_rng(0)
    made = []
    for number, prompt in enumerate(prompts(case)):
        length = int(rng.integers(1, 2 * case.answer_mean))
        tokens = random_tokens(rng, length)
        request = GenerationRequest(
            request_id=number, prompt_P=prompt, seed=number, share_key=number // case.group if is_shared else -1,
            prefix=Segment(tokens, np.full(length, -1.0, np.float32), np.zeros(length, np.int32)),
            sampling=Sampling(max_new_tokens=CONTEXT),
        )  # fmt: skip
        made.append(Answer(number, request, np.array([-1]), 0.0))
    return made


def prompts(case: Case) -> list[np.ndarray]:
    """One prompt per answer, the same within a group."""
    num_groups = -(-case.slots // case.group)
    if case.prompts == "long":
        known = list(random_tokens(np.random.default_rng(1), (num_groups, LONG_PROMPT)))
    else:
        known = [encoded(text) for text in texts(num_groups)]
    return [known[number // case.group] for number in range(case.slots)]


if __name__ == "__main__":
    main()
