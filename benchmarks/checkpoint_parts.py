"""A checkpoint of which each rank writes its part, against one that rank 0 writes. Four FSDP2 ranks over gloo on CPUs.

    python -m benchmarks.checkpoint_parts            a model of 54 million parameters; 3 GB of memory
    python -m benchmarks.checkpoint_parts --quick    a model of 11 million parameters; writes nothing

The two ways (`trainer.checkpoint.parts`) alternate in the same processes, PAIRS times each, after one of each that is
not timed: how long the training thread of a rank is blocked, and how long it takes until the checkpoint is complete on
disk. One more of each is counted: bytes of all live tensor storages (storage_accounting.py) above what the rank must
hold, its part of the state and its copy.

Files go to the folder for temporary files (TMPDIR), with fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from areal_like.config import ProcessSpec
from benchmarks.packing import PROMPT, made_samples
from benchmarks.rank_processes import run_job_of_ranks
from benchmarks.runs import write
from benchmarks.sharded_memory import LARGE, LIMIT_S, MB, RANKS, SMALL, TOKENS, prepare, process_spec, share_bytes
from benchmarks.storage_accounting import LiveStorages
from trainer.activity import Activity
from trainer.follower import Follower
from trainer.training import Training

WAYS = ("rank_0", "every_rank")
PAIRS = 5
MEDIUM: dict[str, Any] = {
    **LARGE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        run_rank(options.job, options.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), SMALL if options.quick else MEDIUM, bucket_mb=2.0 if options.quick else 16.0)
    show(found)
    if not options.quick:
        print(f"written to {write('checkpoint_parts', 'python -m benchmarks.checkpoint_parts', found)}")


def show(found: Row) -> None:
    """Print the table."""
    print(f"{found['parameters']:,} parameters, {RANKS} ranks, {PAIRS} checkpoints each")
    print(f"{'way':12}{'blocked s':>10}{'most':>8}{'written s':>11}{'over, buckets':>15}")
    for row in found["rows"]:
        print(f"{row['way']:12}{row['blocked_s']:10.3f}{row['blocked_most_s']:8.3f}{row['write_s']:11.2f}"
              f"{row['over_buckets']:15.2f}")  # fmt: skip


def measure(folder: Path, model: dict[str, Any], *, bucket_mb: float) -> Row:
    """Run the ranks and return what they measured. Raises SystemExit with the log of a rank that fails."""
    num_parameters = prepare(folder / "prepared", model)
    (folder / "run").mkdir()
    results = play(folder, bucket_mb)
    rows = []
    for way in WAYS:
        ranks = [result[way] for result in results]
        rows.append({
            "way": way, "blocked_s": statistics.median([one for rank in ranks for one in rank["blocked_s"]]),
            "blocked_most_s": max(one for rank in ranks for one in rank["blocked_s"]),
            "write_s": statistics.median(ranks[0]["write_s"]), "num_bytes": ranks[0]["num_bytes"],
            "over_buckets": max(rank["over_bytes"] for rank in ranks) / (bucket_mb * MB),
        })  # fmt: skip
    return {
        "parameters": num_parameters, "ranks": RANKS, "pairs": PAIRS, "bucket_mb": bucket_mb,
        "own_mb": results[0]["own_bytes"] / MB, "rows": rows,
    }  # fmt: skip


def play(folder: Path, bucket_mb: float) -> list[Row]:
    """Run one process for each rank; returns what each wrote."""
    job = folder / "job.json"
    job.write_text(json.dumps({"folder": str(folder), "bucket_mb": bucket_mb}))
    run_job_of_ranks("benchmarks.checkpoint_parts", job, RANKS, limit_s=LIMIT_S)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


class BothWays(Training):
    """The trainer's own, which saves in both ways in turn."""

    def __init__(self, spec: ProcessSpec, ledger: LiveStorages) -> None:
        super().__init__(spec)
        self.ledger = ledger
        self.num_saves = 0
        self.blocked_s: dict[str, list[float]] = {way: [] for way in WAYS}

    def open(self) -> None:
        super().open()
        self._each_rank = self._rank_parts

    def save(self) -> Any:
        """Save in the next way; after PAIRS timed ones of each, count the last one of each."""
        way = WAYS[self.num_saves % 2]
        is_timed, is_last = self.num_saves >= 2, self.num_saves >= 2 + 2 * PAIRS
        self._rank_parts = self._each_rank if way == "every_rank" else None
        self.num_saves += 1
        self.ledger.phase(way, is_counted=is_last)
        started_s = time.perf_counter()
        write = super().save()
        if is_timed and not is_last:
            self.blocked_s[way].append(time.perf_counter() - started_s)
        return write

    def close(self) -> None:
        self.ledger.phase("end", is_counted=False)
        super().close()


def run_rank(job: Path, rank: int) -> None:
    """One rank, as a process; rank 0 leads."""
    facts = json.loads(job.read_text())
    folder = Path(facts["folder"])
    torch.set_num_threads(1)
    spec = process_spec(folder, rank, facts["bucket_mb"], has_reference=False)
    (folder / f"rank-{rank}.json").write_text(json.dumps(save(spec)))


def save(spec: ProcessSpec) -> Row:
    """One step, then checkpoints in both ways."""
    ledger = LiveStorages()
    ledger.install()
    training = BothWays(spec, ledger)
    writes_s: dict[str, list[float]] = {way: [] for way in WAYS}
    num_bytes = dict.fromkeys(WAYS, 0)
    if spec.rank:
        Follower(training, Activity()).run()
    else:
        training.open()
        training.run(training.prepare(made_samples([TOKENS // 8 - PROMPT] * 8), 1))
        for number in range(2 + 2 * PAIRS + 2):
            way = WAYS[number % 2]
            started_s = time.perf_counter()
            saved = training.save()()
            if 2 <= number < 2 + 2 * PAIRS:
                writes_s[way].append(time.perf_counter() - started_s)
            num_bytes[way] = saved.num_bytes
        training.close()
    own = share_bytes(training, "load")
    share = 6 * own  # weights and two moments, and a copy of the three
    found: Row = {"own_bytes": own}
    for way in WAYS:
        found[way] = {
            "blocked_s": training.blocked_s[way], "write_s": writes_s[way], "num_bytes": num_bytes[way],
            "over_bytes": ledger.peaks[way] - share,
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
