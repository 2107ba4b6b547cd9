"""Does the engine give the recorded answers of a run again, token by token?

    python -m benchmarks.regeneration                      five seeds
    python -m benchmarks.regeneration --seeds 1            one seed; the result goes next to the runs

For each seed the quickstart is trained for 30 steps, and all answers that it trained on are drawn again by
`areal-like replay --engine`, under the versions stamped on their tokens: the starting model, kept checkpoints, and
versions that a replay of the trainer makes. Tokens that differ by rounding (ties) and all other differences are
counted. Exit status 1 if there is one other than ties.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, train, write
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.regenerate import regenerate_run

JOB = (
    "num_steps=30", "eval.every_steps=0", "eval.at_start=false", "metrics.report=false", "metrics.display=plain",
)  # fmt: skip
FACTS = (
    "tokens", "tokens_drawn", "ties", "largest_tie", "different_tokens", "different_logprobs", "different_ends",
    "largest_gap_nats", "allowed_nats", "allowed_probability", "samples", "versions", "versions_replayed",
    "tokens_not_compared", "samples_not_compared", "first", "wall_s",
)  # fmt: skip
"""What is taken from the JSON of the command."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regeneration", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1 on (5)")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    began_s, rows = time.monotonic(), []
    for seed in range(1, options.seeds + 1):
        rows.append(measure(seed, options.runs_dir.resolve()))
        print(words(rows[-1]), flush=True)
    fields = {"seeds": rows, "wall_s": round(time.monotonic() - began_s, 1)}
    path = write("regeneration", command_of("regeneration"), fields, result_path("regeneration", options))
    print(f"written to {path}")
    raise SystemExit(0 if all(is_equal(row) for row in rows) else 1)


def measure(seed: int, runs_dir: Path) -> dict[str, Any]:
    """One run and its answers, drawn again."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    overrides = [*JOB, f"seed={seed}", f"name=regeneration-{seed}-{os.getpid()}"]
    folder = RunFolder(Path(train("quickstart", overrides, runs_dir)["folder"]))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = regenerate_run(folder, first=None, last=None, num_samples=None, as_json=True)
    found = json.loads(said.getvalue())
    return {"seed": seed, "status": status, "mixed": num_mixed(folder), **{name: found[name] for name in FACTS}}


def num_mixed(folder: RunFolder) -> int:
    """Number of samples with tokens of several versions that were trained on."""
    with contextlib.closing(sqlite3.connect(f"file:{folder.ledger}?mode=ro", uri=True)) as db:
        ((number,),) = db.execute(
            "SELECT COUNT(*) FROM samples JOIN groups USING (group_id) WHERE fate = 'consumed' AND is_kept "
            "AND first_version < last_version"
        )
    return int(number)


def is_equal(row: dict[str, Any]) -> bool:
    """Whether all tokens were compared, and nothing but ties differs."""
    others = sum(row[f"different_{name}"] for name in ("tokens", "logprobs", "ends"))
    is_whole = row["tokens"] == row["tokens_drawn"] and not row["tokens_not_compared"]
    return row["status"] == 0 and others == 0 and is_whole and not row["samples_not_compared"]


def words(row: dict[str, Any]) -> str:
    """The result of one seed as text."""
    others = sum(row[f"different_{name}"] for name in ("tokens", "logprobs", "ends"))
    return (
        f"seed {row['seed']}: {row['tokens']:,} tokens of {row['samples']:,} samples under {row['versions']} versions "
        f"({row['mixed']:,} samples of several): {row['ties']} ties, {others} other differences; log-probs differ by "
        f"at most {row['largest_gap_nats']:.2g} nats"
    )


if __name__ == "__main__":
    main()
