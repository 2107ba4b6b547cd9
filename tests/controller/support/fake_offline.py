"""Stands in for `python -m trainer.offline`: writes rows and ends as AREAL_FAKE says. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

spec = json.loads(Path(sys.argv[sys.argv.index("--spec") + 1]).read_text())
run_dir, manner = Path(spec["run_dir"]), os.environ["AREAL_FAKE"]
if spec["num_ranks"] > 1:  # rank 1 is lost, and rank 0 notices it, or does not
    if spec["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    while manner == "hangs":
        time.sleep(0.02)
    print("error: RankLost: the other ranks of the trainer were lost while training together", file=sys.stderr)
    sys.exit(1)
rows = [
    {"kind": "offline", "objective": "sft", "num_steps": 2, "version": 0, "setup": "fake", "train_rows": 4},
    {"kind": "step", "step": 1, "epoch": 0.5, "loss": 1.0, "tokens": 3},
]
stopped: list[int] = []
if manner != "imports":  # which takes seconds, in which nothing answers a signal
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if manner == "finishes":
    rows.append({"kind": "step", "step": 2, "epoch": 1.0, "loss": 0.5, "tokens": 3})
    (run_dir / "final").mkdir()
with (run_dir / "metrics.jsonl").open("a") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
if manner in ("stops", "stays", "imports"):
    while not stopped or manner == "stays":
        time.sleep(0.02)
if manner == "refuses":
    print("error: f:1: has no `prompt` -> remove the row", file=sys.stderr)
    sys.exit(2)
if manner == "diverges":
    print("error: the policy has diverged at version 1", file=sys.stderr)
    sys.exit(4)
if manner == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
