"""Do single steps of runs repeat bit for bit from one file, and is one altered byte of the file found?

    python -m benchmarks.capsules                          10 runs of 10 steps: 100 capsules
    python -m benchmarks.capsules --runs 3 --steps 2       three runs; the result goes next to the runs

Each run is a small job with other settings of the trainer (VARIANTS). Of each step a capsule is made and repeated, as
by `areal-like replay`: the trainer that makes it and the one that repeats it are new processes. Gradients of each
update, metrics, and weights and optimizer state after the step are compared. Then one random byte of the data of one
random entry is changed; the capsule must be refused, and the message must name the entry. Exit status 1 if anything
differs or a change is not found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from benchmarks.equalities import JOB
from benchmarks.publishing import RUNS, add_replace, result_path
from benchmarks.runs import command_of, train, write
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.capsule import make_capsule, replay_capsule
from controller.runs.replay.capsule_file import read_archive

VARIANTS: dict[str, tuple[str, ...]] = {
    "two mini-batches": ("trainer.mini_batches=2",),
    "critic": ("trainer.critic={}", "trainer.advantage.kind=gae"),
    "LoRA": ("trainer.lora={rank: 4}",),
    "KL": ("trainer.loss.kl_coef=0.05",),
    "replay buffer": ("replay_buffer={groups_per_step: 2, max_age: 2, max_reuses: 1}",),
    "GSPO": ("trainer.loss.kind=gspo",),
    "CISPO, two passes": ("trainer.loss.kind=cispo", "trainer.passes_per_batch=2"),
    "DPPO": ("trainer.loss.kind=dppo", "trainer.loss.proximal=behaviour", 'trainer.loss.weight.mode="off"'),
    "SAPO": ("trainer.loss.kind=sapo",),
    "mask and RLOO": ("trainer.loss.corrections=[{kind: icepop}]", "trainer.advantage.kind=rloo"),
}
"""Settings of each run, by its name in the result."""
SEED = 1
_LOCAL_HEADER_BYTES = 30


def overrides_of(variant: str, num_steps: int) -> list[str]:
    """Overrides of the quickstart for one run. Every checkpoint is kept."""
    kept = ("trainer.checkpoint.every_steps=1", f"trainer.checkpoint.keep={num_steps}", f"num_steps={num_steps}")
    slots = ("rollout.engine.num_slots=16", "staleness.max_staleness=2", "mode=async")
    return [*JOB, *slots, *kept, *VARIANTS[variant]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capsules", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=len(VARIANTS), help=f"runs, at most {len(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (10)")
    parser.add_argument("--at-once", type=int, default=1, help="runs that are measured at the same time (1)")
    parser.add_argument("--runs-dir", type=Path, default=RUNS)
    add_replace(parser)
    options = parser.parse_args()
    if not 1 <= options.runs <= len(VARIANTS) or options.steps < 1 or options.at_once < 1:
        parser.error(f"--runs must be from 1 to {len(VARIANTS)}, and --steps and --at-once at least 1")
    began_s, said, rows = time.monotonic(), sys.stdout, []
    chosen = list(VARIANTS)[: options.runs]
    with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda variant: measure(variant, options.steps, options.runs_dir.resolve()), chosen):
            rows.append(row)
            print(words(row), file=said, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    fields = {
        "runs": rows, "steps": options.steps, "wall_s": round(time.monotonic() - began_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime + time.process_time(), 1),
    }  # fmt: skip
    print(f"written to {write('capsules', command_of('capsules'), fields, result_path('capsules', options))}")
    raise SystemExit(0 if all(is_good(row) for row in rows) else 1)


def measure(variant: str, num_steps: int, runs_dir: Path) -> dict[str, Any]:
    """One run, and all its capsules."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    dice = random.Random(f"{SEED} {variant}")
    name = f"capsules-{list(VARIANTS).index(variant)}-{os.getpid()}"
    folder = Path(train("quickstart", [*overrides_of(variant, num_steps), f"name={name}"], runs_dir)["folder"])
    row: dict[str, Any] = {"run": variant, "capsules": 0, "updates": 0, "tensors": 0, "equal": 0, "found": 0, "mb": 0.0}
    with tempfile.TemporaryDirectory(prefix="capsules-") as root:
        for step in range(1, num_steps + 1):
            capsule = Path(root) / f"{step}.capsule"
            make_capsule(RunFolder(folder), step, capsule)
            status = replay_capsule(capsule)
            row["capsules"] += 1
            row["equal"] += status == 0
            gradients = _gradients(capsule)
            row["updates"] += len(gradients)
            row["tensors"] += sum(map(len, gradients))
            row["mb"] = max(row["mb"], round(capsule.stat().st_size / 1e6, 1))
            row["found"] += is_found(capsule, dice)
            capsule.unlink()
    return row


def _gradients(capsule: Path) -> list[dict[str, str]]:
    """Digests of the gradients in a capsule, by update and tensor."""
    with zipfile.ZipFile(capsule) as archive:
        found: list[dict[str, str]] = json.loads(archive.read("result.json"))["gradients"]
    return found


def is_found(capsule: Path, dice: random.Random) -> bool:
    """Change one byte of the data of one entry, in place; whether reading names this entry."""
    with zipfile.ZipFile(capsule) as archive:
        entry = dice.choice([one for one in archive.infolist() if one.file_size])
    with capsule.open("r+b") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER_BYTES)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        place = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes + dice.randrange(entry.file_size)
        file.seek(place)
        before = file.read(1)[0]
        file.seek(place)
        file.write(bytes([before ^ dice.randrange(1, 256)]))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            read_archive(capsule, Path(scratch))
        except UserError as error:
            return entry.filename in str(error)
    return False


def is_good(row: dict[str, Any]) -> bool:
    """Whether all capsules of a run repeated and every change was found."""
    return bool(row["capsules"] == row["equal"] == row["found"])


def words(row: dict[str, Any]) -> str:
    """The result of one run as text."""
    return (
        f"{row['run']}: {row['capsules']} capsules of at most {row['mb']} MB with {row['updates']} updates and "
        f"{row['tensors']} gradients; {row['equal']} equal, {row['found']} changes found"
    )


if __name__ == "__main__":
    main()
