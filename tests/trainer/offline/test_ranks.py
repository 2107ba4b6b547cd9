"""Two ranks train as one process: the same losses, evaluations and weights, and checkpoints that either continues.

Real processes over gloo; one pair for each scene. Sums are taken in another order, which is all that differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import JobServer
from safetensors.torch import load_file
from tiny_offline import digits, make_spec, rows_of_kind, run_until, write_rows

from trainer.checkpoints.checkpoint import all_checkpoints
from trainer.offline.loop import OfflineTraining
from trainer.offline.spec import OfflineSpec

STEPS, ATOL = 3, 1e-5
SCENES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft"},
    "dpo": {"objective": "dpo", "dpo": {"beta": 1.0}},
    "reward": {"objective": "reward_model"},
    "adapter": {"objective": "dpo", "dpo": {"beta": 1.0}, "lora": {"rank": 3}},
    "replicas": {"objective": "sft", "replicas": 2},
}


def spec_of(
    folder: Path, objective: str, *, ranks: int = 1, replicas: int = 1, lora: Any = None, **changes: Any
) -> OfflineSpec:
    """replicas: with several ranks."""
    folder.mkdir(exist_ok=True, parents=True)
    pairs = [{**row, "chosen": row["completion"], "rejected": f"{n % 10}{n % 7}"} for n, row in enumerate(digits(26))]
    data = {
        "train": write_rows(folder / "train.jsonl", pairs[:19]),
        "eval": write_rows(folder / "eval.jsonl", pairs[19:20]),  # one row: a rank has none
    }  # fmt: skip
    trainer = {
        "device": "cpu", "ranks": ranks, "lora": lora, "fsdp": {"replicas": min(ranks, replicas)},
        "micro_batch_tokens": 24, "checkpoint": {"every_steps": 2, "keep": 9},
        "optimizer": {"lr": 5e-3, "warmup_steps": 1}, "rank_timeout_s": 400.0,
    }  # fmt: skip
    facts = {"objective": objective, "data": data, "trainer": trainer, "max_steps": STEPS, "batch_size": 7}
    return make_spec(folder, **facts, epochs=2, num_ranks=ranks, **changes)


def scene(spec: OfflineSpec, until: int | None = None) -> dict[str, Any]:
    return {"spec": spec.model_dump(mode="json"), "until": until}


def train(spec: OfflineSpec, until: int | None = None) -> None:
    if until is not None:
        run_until(spec, until)
    else:
        OfflineTraining(spec).run()


@pytest.fixture(
    scope="module",
    params=[
        "sft", "reward", "adapter", pytest.param("dpo", marks=pytest.mark.thorough("dpo")),
        pytest.param("replicas", marks=pytest.mark.thorough("replicas")),
    ],
)  # fmt: skip
def name(request: pytest.FixtureRequest) -> str:
    """Of a scene. The adapter's has the objective of `dpo`, and tests/trainer/test_layouts.py has replicas."""
    return str(request.param)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, job_server: JobServer, name: str) -> Path:
    """The run of a scene by one process (`one`) and by two ranks (`two`), and both continued by the other."""
    root, facts = tmp_path_factory.mktemp("ranks"), SCENES[name]
    train(spec_of(root / "one" / name, **facts))
    train(spec_of(root / "one-two" / name, **facts), until=2)
    address = f"file://{root}/meeting"
    two = {where: spec_of(root / where / name, ranks=2, ranks_address=address, **facts)
           for where in ("two", "one-two", "two-one")}  # fmt: skip
    scenes = [scene(two["two"]), scene(two["one-two"]), scene(two["two-one"], until=2)]
    (root / "job.json").write_text(json.dumps(scenes))
    jobs = [
        job_server.start("offline_rank_job", [str(root / "job.json"), str(rank)], root / f"rank-{rank}.log")
        for rank in range(2)
    ]
    try:
        for rank, job in enumerate(jobs):
            assert job.wait() == 0, (root / f"rank-{rank}.log").read_text(errors="replace")
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    train(spec_of(root / "two-one" / name, **facts))
    return root


pytestmark = pytest.mark.e2e


def same_weights(stage: Path, name: str, where: str) -> None:
    one, other = (load_file(stage / part / name / "run" / "final" / "model.safetensors") for part in ("one", where))
    assert one.keys() == other.keys()
    for key in one:
        torch.testing.assert_close(other[key], one[key], atol=ATOL, rtol=0.0)


def test_losses_evaluations_and_weights_are_those_of_one_process(stage: Path, name: str) -> None:
    one, two = (stage / part / name / "run" for part in ("one", "two"))
    for kind, keys in (("step", ("loss", "grad_norm", "lr", "tokens")), ("eval", ("loss", "accuracy"))):
        rows = [rows_of_kind(run_dir, kind) for run_dir in (one, two)]
        assert len(rows[0]) == len(rows[1]) == (STEPS if kind == "step" else 2)
        for ours, theirs in zip(*rows, strict=True):
            assert [theirs[key] for key in keys] == pytest.approx([ours[key] for key in keys], abs=ATOL)
    same_weights(stage, name, "two")
    setup = json.loads((two / "trainer.json").read_text())
    assert (setup["ranks"], setup["backend"]) == (2, "fsdp")


def test_a_checkpoint_of_two_ranks_is_that_of_one_process(stage: Path, name: str) -> None:
    folders = [all_checkpoints(stage / part / name / "run")[-1][1] for part in ("one", "two")]
    files = [{file.name for file in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    moments = [load_file(folder / "optimizer.safetensors") for folder in folders]
    assert moments[0].keys() == moments[1].keys()
    for key in moments[0]:
        if not key.startswith("generator/"):
            torch.testing.assert_close(moments[1][key], moments[0][key], atol=ATOL, rtol=0.0)


@pytest.mark.parametrize("where", ["one-two", "two-one"])
def test_a_run_continues_with_another_number_of_ranks(stage: Path, name: str, where: str) -> None:
    assert [row["step"] for row in rows_of_kind(stage / where / name / "run", "step")] == [1, 2, 3]
    same_weights(stage, name, where)
