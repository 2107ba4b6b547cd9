"""Checkpoints of a run that goes on: on demand, on a full disk, and as models for others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_checkpoint_on_demand_is_on_disk_exports_and_comes_back_bit_for_bit(areal, quickstart, short, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = areal("train", quickstart, *short[1:], "num_steps=400", "trainer.checkpoint.every_steps=0")
    run.wait_for_step(2)
    asked = areal("checkpoint", str(run.folder))
    assert asked.wait() == 0, asked.output
    folder = Path(re.search(r": (/.*step_\d+)", asked.output)[1])
    assert (folder / "manifest.json").is_file()
    exported = areal("export", str(run.folder), str(tmp_path / "model"))
    assert exported.wait() == 0, exported.output
    imported = areal("import", str(tmp_path / "model"), str(tmp_path / "again"))
    assert imported.wait() == 0, imported.output
    ours = load_file(folder / "model.safetensors")
    for other in (tmp_path / "model", tmp_path / "again"):
        theirs = load_file(other / "model.safetensors")
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)
        AutoModelForCausalLM.from_pretrained(other)
    run.process.terminate()
    assert run.wait() == 0, run.output
    late = areal("checkpoint", str(run.folder))
    assert late.wait() == 2
    assert "only such a run can save a checkpoint" in late.output


def test_disk_that_refuses_a_checkpoint_in_mid_run_is_reported_and_the_run_goes_on(areal, quickstart, short):
    run = areal("train", quickstart, *short[1:], "num_steps=400", "trainer.checkpoint.every_steps=2")
    run.wait_for_step(3)
    run.wait_until(lambda: run.metrics("checkpoint"), "a checkpoint")
    before = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*"))
    assert before
    checkpoints, aside = run.folder / "checkpoints", run.folder / "aside"
    checkpoints.rename(aside)
    checkpoints.write_text("a file where the folder was: every write fails")
    run.wait_until(lambda: run.metrics("checkpoint_failed"), "a refusal")
    step = max(row["step"] for row in run.metrics("step"))
    run.wait_for_step(step + 2)
    assert "the run continues without it" in run.output
    checkpoints.unlink()
    aside.rename(checkpoints)
    number = len(run.metrics("checkpoint"))
    run.wait_until(lambda: len(run.metrics("checkpoint")) > number, "a different checkpoint")
    run.process.terminate()
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
