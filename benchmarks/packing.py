"""What does packing gain over padding? Real response lengths scaled to a tiny model, one thread.

    python -m benchmarks.packing                    about 3 minutes
    python -m benchmarks.packing --quick            few sequences, one round; writes nothing
    python -m benchmarks.packing 2000:0.6 mine.json other distributions, a row for each

LENGTHS: the source of the answers' lengths, as for `areal-like simulate --lengths`: `thinking` (the shipped
distribution of a thinking model, the default), MEAN:CV, a run's folder, or a JSON file of measured groups. They are
scaled so that the longest answer has LONGEST tokens.

`packed`: the trainer's method: sequences are distributed over ranks and packed by Algorithm 1, and attention respects
their boundaries. `first_fit`: in order of arrival, each into the first micro-batch with room. `fixed_count`: the same
number of sequences in each micro-batch, with as few micro-batches as the budget allows; both with the same attention.
`padded`: batches in order of arrival, with as many rows as the budget holds when each is padded to the longest of its
batch, with transformers' own forward pass and its attention mask; `sorted`: the same, longest first, which needs the
least padding. All compute log-probs of every answer token and one gradient; only real tokens are counted. Sides
alternate in one process; the first round is discarded. The fill of the micro-batches and the differences between ranks,
at SEQUENCES_PER_RANK sequences per rank, are also reported.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; oversubscribed threads would measure nothing

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.errors import UserError
from areal_like.packing import pack
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from benchmarks.publishing import add_replace, result_path
from benchmarks.runs import command_of, write
from controller.data.length_distribution import THINKING, parse_lengths
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import OptimizerSettings, TrainerSettings
from trainer.data.batch import PreparedBatch, prepare_batch
from trainer.data.dealing import deal
from trainer.model.attention import choose, register
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

LONGEST, PROMPT = 512, 8
BUDGET = 2048
SEQUENCES_PER_RANK = 256
LIMIT, DRAWN, GROUP_SIZE = 32_768, 768, 8
"""Longest answer in tokens, number of answers drawn, and answers per group."""
VOCABULARY = 64
MODEL = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384, "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST + PROMPT, "tie_word_embeddings": False,
}  # fmt: skip
"""The quickstart's model, with positions for the longest answer."""


def drawn(name: str) -> list[int]:
    """Lengths of DRAWN answers in groups of GROUP_SIZE. Raises UserError."""
    lengths, rng = parse_lengths(name, LIMIT, "LENGTHS"), np.random.default_rng(0)
    return [length for _ in range(DRAWN // GROUP_SIZE) for length in lengths.draw(rng, GROUP_SIZE)]


def fill(known: list[int], capacity: int, num_ranks: int, seed: int) -> tuple[float, float]:
    """(used share of the token budget, excess of the fullest rank over the emptiest), for unscaled lengths."""
    lengths = random.Random(seed).choices(known, k=SEQUENCES_PER_RANK * num_ranks)
    dealt = deal(lengths, num_ranks, capacity)
    tokens = [sum(lengths[i] for members in own for i in members) for own in dealt]
    return sum(lengths) / (num_ranks * len(dealt[0]) * capacity), max(tokens) / min(tokens) - 1.0


def made_samples(lengths: list[int]) -> list[BatchSample]:
    """Answers of these lengths after prompts of PROMPT tokens, in groups of eight."""
    rng = np.random.default_rng(0)
    samples = []
    for index, length in enumerate(lengths):
        is_sampled_T = np.arange(PROMPT + length) >= PROMPT
        trajectory = Trajectory(
            rng.integers(3, VOCABULARY, len(is_sampled_T)).astype(np.int32),
            is_sampled_T,
            np.where(is_sampled_T, -np.log(VOCABULARY), 0.0).astype(np.float32),
            np.where(is_sampled_T, 0, -1).astype(np.int32),
            "stop",
        )
        samples.append(
            BatchSample(
                group_id=index // GROUP_SIZE,
                sample_index=index % GROUP_SIZE,
                trajectory=trajectory,
                reward=float(index % 2),
            )
        )
    return samples


def padded_pass(model: Any, samples: list[BatchSample], batches: list[list[int]]) -> None:
    """Compute one gradient over padded batches: every row is as long as the longest of its batch."""
    for members in batches:
        chosen = [samples[index] for index in members]
        width = max(len(sample.trajectory) for sample in chosen)
        tokens_BT = torch.zeros(len(chosen), width, dtype=torch.int64)
        mask_BT = torch.zeros(len(chosen), width, dtype=torch.int64)
        answer_BT = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, sample in enumerate(chosen):
            t = sample.trajectory
            tokens_BT[row, : len(t)] = torch.from_numpy(t.tokens_T.astype(np.int64))
            mask_BT[row, : len(t)] = 1
            answer_BT[row, : len(t)] = torch.from_numpy(np.array(t.loss_mask_T))
        logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits[:, :-1]
        logp_BT = torch.log_softmax(logits_BTV, dim=-1).gather(-1, tokens_BT[:, 1:, None])[..., 0]
        (-(logp_BT * answer_BT[:, 1:]).sum() / len(samples)).backward()
    model.zero_grad(set_to_none=True)


def in_order(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices in batches in order of arrival. A row is added as long as all rows, padded to the longest, are within the
    budget."""
    return _rows(range(len(lengths)), lengths, budget)


def longest_first(lengths: list[int], budget: int) -> list[list[int]]:
    """The same as `in_order`, sorted by length."""
    return _rows(sorted(range(len(lengths)), key=lambda index: -lengths[index]), lengths, budget)


def _rows(order: Iterable[int], lengths: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    width = 0
    for index in order:
        wider = max(width, lengths[index])
        if not batches or wider * (len(batches[-1]) + 1) > budget:
            batches.append([])
            wider = lengths[index]
        batches[-1].append(index)
        width = wider
    return batches


PADDED: dict[str, Callable[[list[int], int], list[list[int]]]] = {"padded": in_order, "sorted": longest_first}


def first_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices in micro-batches: each sequence in order of arrival into the first one with room."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index, length in enumerate(lengths):
        place = next((b for b, load in enumerate(loads) if load + length <= budget), len(bins))
        if place == len(bins):
            bins.append([])
            loads.append(0)
        bins[place].append(index)
        loads[place] += length
    return bins


def fixed_count(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices in micro-batches of equally many sequences, in order of arrival; as few as the budget allows."""
    for num in range(1, len(lengths) + 1):
        bins = [part.tolist() for part in np.array_split(np.arange(len(lengths)), num)]
        if all(sum(lengths[i] for i in members) <= budget for members in bins):
            return bins
    raise ValueError(f"a sequence of {max(lengths)} tokens does not fit {budget}")


FORMS: dict[str, Callable[[list[int], int], list[list[int]]]] = {
    "algorithm_1": lambda lengths, budget: pack(lengths, budget),
    "first_fit": first_fit,
    "fixed_count": fixed_count,
}


def in_bins(samples: list[BatchSample], bins: list[list[int]], settings: TrainerSettings) -> PreparedBatch:
    """A batch with these micro-batches."""
    parts = [prepare_batch([samples[i] for i in members], 0, settings) for members in bins]
    first = parts[0]  # its rewards are used only by `kl_in: reward`, which is not measured here
    return PreparedBatch(
        0, (tuple(part.mini_batches[0][0] for part in parts),), first.metrics, first.rewards, first.tokens_of_version
    )


def rates(lengths: list[int], rounds: int) -> dict[str, list[float]]:
    """Tokens/s of every form, one figure per round."""
    register()
    torch.manual_seed(0)
    packed_model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.float32)
    padded_model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**MODEL), dtype=torch.float32, attn_implementation="sdpa"
    )
    settings = TrainerSettings(micro_batch_tokens=BUDGET, optimizer=OptimizerSettings(lr=0.0))
    attention = choose("auto", torch.device("cpu"))
    setup = Setup(settings, temperature=1.0, num_steps=1, attention=attention, ranks=Ranks.alone())
    ready_model(packed_model, setup)
    step = TrainStep(TorchBackend(packed_model, setup), setup, groups_per_step=len(lengths))
    samples = made_samples(lengths)
    totals = [len(sample.trajectory) for sample in samples]
    found: dict[str, list[float]] = {name: [] for name in ("packed", *list(FORMS)[1:], *PADDED)}
    work: dict[str, Callable[[], object]] = {"packed": lambda: step.run(step.prepare(samples, 0))}
    for name, arrange in PADDED.items():
        batches = arrange(totals, BUDGET)
        work[name] = lambda batches=batches: padded_pass(padded_model, samples, batches)  # type: ignore[misc]
    for name in list(FORMS)[1:]:
        bins = FORMS[name](totals, BUDGET)
        work[name] = lambda bins=bins: step.run(in_bins(samples, bins, settings))  # type: ignore[misc]
    for _ in range(rounds + 1):
        for name, figures in found.items():
            started_s = time.perf_counter()
            work[name]()
            figures.append(sum(totals) / (time.perf_counter() - started_s))
    return {name: figures[1:] for name, figures in found.items()}


def print_row(row: dict[str, Any]) -> None:
    """Print one distribution."""
    print(f"\n{row['set']}: {row['sequences']} answers, {row['tokens_mean']:.0f} tokens on average, packed "
          f"{row['packed_tokens_per_s']:,.0f} tokens/s")  # fmt: skip
    for form, found in row["padding"].items():
        ratio = found["ratio"]
        print(f"  packed over {form:8} {statistics.median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})   "
              f"{found['batches']} batches, {found['computed']:.2f} tokens computed for one")  # fmt: skip
    for form, found in row["forms"].items():
        print(f"  {form:12} {found['tokens_per_s']:,.0f} tokens/s, {found['micro_batches']} micro-batches, "
              f"{found['budget_used']:.1%} full")  # fmt: skip
    print(f"  to ranks: {row['budget_used_least']:.1%} of the budget used at least, ranks differ by "
          f"{row['imbalance_most']:.2%} at most", flush=True)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", default=[THINKING], help="thinking, MEAN:CV, a run's folder, a JSON file")
    parser.add_argument("--quick", action="store_true", help="fewer sequences and rounds")
    add_replace(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num, rounds = (8, 1) if options.quick else (256, 5)
    rows = []
    try:
        sets = {name: drawn(name) for name in options.lengths}
    except UserError as error:
        raise SystemExit(str(error)) from error
    capacity = max(max(known) for known in sets.values())  # one budget, which holds the longest answer of all
    for name, known in sets.items():
        chosen = random.Random(0).choices(known, k=num)
        scaled = [max(1, round(length * LONGEST / max(known))) for length in chosen]
        measured = rates(scaled, rounds)
        packed = measured["packed"]
        whole = [length + PROMPT for length in scaled]
        bins = {form: make(whole, BUDGET) for form, make in FORMS.items()}
        found = [fill(known, capacity, ranks, seed) for ranks in (1, 2, 4, 8) for seed in range(3)]
        rows.append(
            {
                "set": name, "sequences": num, "tokens_mean": statistics.mean(scaled), "tokens_max": max(scaled),
                "packed_tokens_per_s": statistics.median(packed),
                "padding": {
                    form: {
                        "batches": len(batches := arrange(whole, BUDGET)),
                        "computed": sum(max(whole[i] for i in b) * len(b) for b in batches) / sum(whole),
                        "tokens_per_s": statistics.median(measured[form]),
                        "ratio": [a / b for a, b in zip(packed, measured[form], strict=True)],
                    }
                    for form, arrange in PADDED.items()
                },
                "forms": {
                    form: {
                        "micro_batches": len(bins[form]), "budget_used": sum(whole) / (len(bins[form]) * BUDGET),
                        "tokens_per_s": statistics.median(measured["packed" if form == "algorithm_1" else form]),
                    }
                    for form in FORMS
                },
                "budget_used_least": min(used for used, _ in found), "imbalance_most": max(more for _, more in found),
            }
        )  # fmt: skip
        print_row(rows[-1])
    if not options.quick:
        result = {"budget": BUDGET, "rounds": rounds, "rows": rows}
        print(f"written to {write('packing', command_of('packing'), result, result_path('packing', options))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
