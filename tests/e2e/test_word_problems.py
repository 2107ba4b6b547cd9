"""The GSM8K pipeline on a CPU: published columns, math verification, a tiny model, several real steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

REPOSITORY = Path(__file__).resolve().parents[2]


def check_three_steps(run):
    assert run.wait() == 0, run.output
    steps = run.metrics("step")
    assert len(steps) >= 3
    assert all(step["grad_norm"] > 0 for step in steps)
    assert run.summary["audit"] == "clean"
    assert weights_differ(run.folder)


def weights_differ(folder):
    """The final policy is another one than the policy the run started with."""
    import json

    import torch
    from safetensors.torch import load_file

    start = json.loads((folder / "processes" / "trainer.json").read_text())["model"]["path"]
    before, after = (load_file(Path(model) / "model.safetensors") for model in (start, folder / "final"))
    return before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def test_three_steps_on_word_problems(areal, published):
    """Published rows of GSM8K where they are, else a few of the same form."""
    try:
        train, held_out = published("gsm8k/train.jsonl"), published("gsm8k/test.jsonl")
    except pytest.skip.Exception:
        train = held_out = REPOSITORY / "tests" / "fixtures" / "word_problems.jsonl"
    run = areal(
        "train", str(REPOSITORY / "configs" / "gsm8k_tiny.yaml"), f"data.train.path={train}",
        f"data.eval.path={held_out}", "num_steps=3", "data.eval.limit=8", "metrics.report=false",
    )  # fmt: skip
    check_three_steps(run)
