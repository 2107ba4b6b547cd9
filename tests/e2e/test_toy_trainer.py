"""A trainer backend and a weight transfer of a user's, named by import path, train a whole job: nothing of ours was
edited for them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TOYS = [
    "trainer.backend=toy_backend.descriptor:TOY", "trainer.backend_options={lr: 0.01}",
    "trainer.weights.kind=toy_transfer.descriptor:TOY", "trainer.weights.options={block_bytes: 4096}",
]  # fmt: skip
SMALL = [
    "warm_start=null", "num_steps=3", "groups_per_step=4", "group_size=4", "rollout.num_workers=2",
    "rollout.engine.num_slots=8", "sampling.max_new_tokens=6", "data.train.limit=64", "data.eval.limit=8",
    "eval.every_steps=0", "metrics.report=false", "metrics.display=plain", "trainer.weights.swap=rolling",
]  # fmt: skip


def test_backend_and_transfer_by_import_path_train_a_whole_job(areal, quickstart, tmp_path):
    for name in ("toy_backend", "toy_transfer"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    run = areal("train", quickstart, *SMALL, *TOYS)
    assert run.wait() == 0, run.output
    assert (run.summary["audit"], run.summary["steps"]) == ("clean", 3)
    assert json.loads((run.folder / "trainer.json").read_text())["backend"] == "toy"
    assert {row["worker"] for row in run.metrics("swap")} == {"rollout-0", "rollout-1"}
    assert max(row["version"] for row in run.metrics("swap")) == 3
    last = run.metrics("pulse")[-1]["processes"]
    received = [process["counters"]["toy_received"] for name, process in last.items() if name.startswith("rollout")]
    assert len(received) == 2
    assert min(received) >= 1
    assert last["trainer"]["counters"]["toy_files"] >= 1
