"""Does a long answer need less memory per rank if ranks share it? One training step on 32,768 tokens, 1, 2 and 4 ranks.

    python -m benchmarks.long_sequences             about 10 minutes on two cores, under 3 GB of memory
    python -m benchmarks.long_sequences --quick     an answer of 512 tokens; writes nothing

A tiny model made from a config trains as in the trainer (its own backends, batches and loss) on a group of two answers,
a long and a short one, packed in one micro-batch: in one process, and with FSDP2 and `trainer.sequence_parallel` on as
many ranks as share it. Each rank is a separate process with one thread over gloo. Peaks are accounted as in
benchmarks/memory.py: this rank's weights before the step, and the largest sum of allocations in it; of several ranks
the largest counts. Losses and gradient norms are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.memory import allocated_by
from benchmarks.publishing import add_replace, result_path
from benchmarks.rank_processes import results_of_ranks
from benchmarks.runs import command_of, write

RANKS = (1, 2, 4)
TOKENS, QUICK_TOKENS, SHORT, PROMPT = 32_768, 512, 96, 16
CHUNK = 256
MODEL: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192, "vocab_size": 8192,
    "max_position_embeddings": TOKENS + PROMPT, "tie_word_embeddings": True,
}  # fmt: skip
TIMEOUT_S = 1800.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A rank (trainer.ranks.RankSpec)."""

    rank: int
    num_ranks: int
    ranks_address: str
    has_own_gpus: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "RANKS", "TOKENS", "MEETING"), help="in its own process")
    add_replace(parser)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, tokens, meeting = options.rank
        print(json.dumps(measure(Place(int(rank), int(ranks), f"file://{meeting}"), int(tokens))))
        return
    tokens = QUICK_TOKENS if options.quick else TOKENS
    rows: list[Row] = []
    print(f"{'ranks':>6}{'peak MB':>10}{'largest MB':>12}{'loss':>14}{'difference':>12}{'gradient':>10}{'s':>8}")
    for ranks in RANKS:
        row = of_ranks(ranks, tokens)
        first = rows[0] if rows else row
        row["loss_difference"] = abs(row["loss"] - first["loss"])
        row["gradient_difference"] = abs(row["grad_norm"] / first["grad_norm"] - 1)
        rows.append(row)
        print(f"{ranks:6}{row['peak_bytes'] / 1e6:10,.1f}{row['largest_bytes'] / 1e6:12,.1f}{row['loss']:14.8f}"
              f"{row['loss_difference']:12.1e}{row['gradient_difference']:10.1e}{row['seconds']:8.1f}",
              flush=True)  # fmt: skip
    if not options.quick:
        result = {"tokens": tokens, "chunk_tokens": CHUNK, "model": MODEL, "rows": rows}
        path = result_path("long_sequences", options)
        print(f"written to {write('long_sequences', command_of('long_sequences'), result, path)}")


def of_ranks(num_ranks: int, tokens: int) -> Row:
    """Measure one step on this many ranks. Raises SystemExit with the output of one that fails."""
    found: list[Row] = results_of_ranks(
        "benchmarks.long_sequences",
        lambda rank, meeting: ["--rank", str(rank), str(num_ranks), str(tokens), meeting],
        num_ranks, timeout_s=TIMEOUT_S, title=f"{num_ranks} ranks",
    )  # fmt: skip
    return found[0] | {key: max(row[key] for row in found) for key in ("peak_bytes", "largest_bytes", "seconds")}


def measure(place: Place, tokens: int) -> Row:
    """Train one step in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.backends.choice import choose_backend, make_backend, share_sequences
    from trainer.backends.port import Setup
    from trainer.config import OptimizerSettings, TrainerSettings
    from trainer.model.attention import choose, register
    from trainer.ranks import Ranks
    from trainer.step import TrainStep, ready_model

    torch.set_num_threads(1)
    register()
    num, device = place.num_ranks, torch.device("cpu")
    settings = TrainerSettings(
        device="cpu", backend="fsdp" if num > 1 else "torch", ranks=num, sequence_parallel=num,
        micro_batch_tokens=tokens + SHORT + 2 * PROMPT, logprob_chunk_tokens=CHUNK,
        optimizer=OptimizerSettings(lr=1e-4),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.float32).eval()
    ranks = Ranks.alone() if num == 1 else Ranks.join(place, "cpu", timeout_s=TIMEOUT_S, order_timeout_s=TIMEOUT_S)
    choice = choose_backend(settings, 1, device)
    share_sequences(ranks, choice, model)
    setup = Setup(settings, 1.0, 10, choose("sdpa", device), ranks)
    ready_model(model, setup)
    policy = make_backend(choice.descriptor, model, setup)
    step = TrainStep(policy, setup, groups_per_step=1)
    prepared = step.prepare(made_group(tokens), 0)
    assert len(prepared.mini_batches[0]) == 1, "both answers are in one micro-batch"
    before_bytes = sum(part.items.nbytes for part in policy.parts())
    began_s, metrics = time.perf_counter(), dict[str, float]()
    allocated = allocated_by(lambda: metrics.update(step.run(prepared)))
    found = {
        "ranks": num, "peak_bytes": before_bytes + allocated.peak_bytes, "largest_bytes": allocated.largest_bytes,
        "seconds": time.perf_counter() - began_s, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"],
    }  # fmt: skip
    ranks.close()
    return found


def made_group(tokens: int) -> list[Any]:
    """A group of two answers of random tokens with different rewards: of `tokens` tokens, and a short one."""
    import numpy as np

    from areal_like.trajectory import Segment, Trajectory
    from areal_like.wire.messages import BatchSample

    rng, vocabulary = np.random.default_rng(0), int(MODEL["vocab_size"])
    samples = []
    for place, length in enumerate((tokens, SHORT)):
        answer = Segment(
            rng.integers(3, vocabulary, length).astype(np.int32),
            np.full(length, -np.log(vocabulary), np.float32),
            np.zeros(length, np.int32),
        )
        trajectory = Trajectory.from_prompt(rng.integers(3, vocabulary, PROMPT).astype(np.int32), answer, "stop")
        samples.append(BatchSample(group_id=0, sample_index=place, trajectory=trajectory, reward=float(place)))
    return samples


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
