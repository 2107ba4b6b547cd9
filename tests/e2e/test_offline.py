"""A run from files with real processes: kill -9 at any moment, resume, the same model; and the commands that look."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from controller.runs.replay.tensors import digests_in

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = ["max_steps=60", "trainer.checkpoint.every_steps=5", "batch_size=64", "metrics.report=false"]
LORA = "trainer.lora={rank: 4}"
KINDS = {
    "sft": ["sft", "offline/sft"],
    "sft, LoRA": ["sft", "offline/sft", LORA],
    "dpo": ["dpo", "offline/dpo"],
    "ipo, LoRA": ["dpo", "offline/dpo", "dpo.loss=ipo", LORA],
    "reward model": ["reward-model", "offline/reward_model"],
    "reward model, LoRA": ["reward-model", "offline/reward_model", LORA],
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_and_resumed_run_ends_with_the_same_model(run_class, tmp_path, runs_dir, kind):
    words = [*SHORT, f"runs_dir={runs_dir}"]
    whole = run_class([*KINDS[kind], "name=whole", *words], REPOSITORY, runs_dir)
    assert whole.wait() == 0, whole.output
    cut = run_class([*KINDS[kind], "name=cut", *words], REPOSITORY, runs_dir)
    cut.wait_for_step(12)
    family = cut.family()
    os.kill(cut.process.pid, signal.SIGKILL)
    cut.process.wait()
    assert not cut.survivors(family, 30.0), "the trainer outlives its controller"
    assert not (cut.folder / "final").exists()

    seen = run_class(["status", str(cut.folder), "--json"], tmp_path, runs_dir)
    assert seen.wait() == 1
    assert json.loads(seen.output)["kind"] == "crashed"

    again = run_class(["resume", str(cut.folder)], tmp_path, runs_dir)
    assert again.wait() == 0, again.output
    assert "continuing from step" in again.output
    final = digests_in(cut.folder / "final")
    assert final
    assert final == digests_in(whole.folder / "final")

    looked = run_class(["report", str(cut.folder)], tmp_path, runs_dir)
    assert looked.wait() == 0, looked.output
    assert "held-out rows" in (cut.folder / "report.html").read_text()
    exported = run_class(["export", str(cut.folder), str(tmp_path / "model")], tmp_path, runs_dir)
    assert exported.wait() == 0, exported.output
    assert (tmp_path / "model" / "tokenizer.json").is_file()


@pytest.mark.thorough
def test_a_killed_rank_ends_the_run_and_resume_continues_it(run_class, tmp_path, runs_dir):
    words = [*SHORT, "max_steps=12", "trainer.ranks=2", "trainer.threads=1", f"runs_dir={runs_dir}"]
    cut = run_class(["dpo", "offline/dpo", "name=cut", *words], REPOSITORY, runs_dir)
    cut.wait_for_step(6)
    members = psutil.Process(cut.process.pid).children(recursive=True)
    [rank] = [one for one in members if any(word.endswith("/trainer-1.json") for word in one.cmdline())]
    rank.kill()
    assert cut.wait() == 1, cut.output
    errors = [line for line in cut.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "process trainer-1 ended with status -9" in errors[0]

    again = run_class(["resume", str(cut.folder)], tmp_path, runs_dir)
    assert again.wait() == 0, again.output
    assert "continuing from step" in again.output
    assert (cut.folder / "final" / "model.safetensors").is_file()
