"""benchmarks/divergence.py: what it reads out of a run's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.divergence import SEEDS, aligned, line, reported_when
from benchmarks.folders import RESULTS
from controller.report.data import RunData
from controller.run_folder.run_folder import RunFolder


def run(folder: Path, kl: list[float], accuracy: dict[int, float]) -> RunData:
    steps = [
        {"kind": "step", "step": n, "wall_s": float(n), "time_s": float(n), "kl_behaviour_proximal": value,
         "reward_mean": 0.5, "reward_std": 0.5, "groups": 24.0}
        for n, value in enumerate(kl, 1)
    ]  # fmt: skip
    evals = [{"kind": "eval", "version": v, "accuracy": share, "num_scored": 200} for v, share in accuracy.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, *evals]))
    return RunData.load(RunFolder(folder), max_samples=1)


def test_a_warning_is_dated_by_what_was_known_at_its_step(tmp_path: Path) -> None:
    kl = [0.01] * 9 + [0.2] * 6
    found = reported_when(run(tmp_path, kl, {0: 0.3, 4: 0.8, 8: 0.82, 12: 0.78, 14: 0.2}))
    assert found["warned"] == 12, "three of the last five steps"
    assert found["words"].startswith("Updates are unstable: KL to the sampling policy rose to 0.2")
    assert found["fell"] == 14
    assert (found["best"], found["last"]) == (0.82, 0.2)


def test_the_cosine_of_a_run_is_that_which_five_measurements_in_a_row_reached(tmp_path: Path) -> None:
    cosines = [0.1, 0.9, 0.6, 0.7, 0.5, 0.8, 0.2]
    steps = [{"kind": "step", "step": n, "gradient_cosine": one} for n, one in enumerate(cosines, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    assert aligned(RunData.load(RunFolder(tmp_path), max_samples=1)) == 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps[:4]))
    assert aligned(RunData.load(RunFolder(tmp_path), max_samples=1)) is None


def test_a_sound_run_with_two_wild_steps_is_neither_warned_of_nor_fallen(tmp_path: Path) -> None:
    kl = [0.01] * 7 + [0.5, 0.5] + [0.01] * 3
    found = reported_when(run(tmp_path, kl, {0: 0.3, 6: 0.8, 12: 0.79}))
    assert (found["warned"], found["words"], found["fell"]) == (None, "", None)
    row_text = line({"loss": "naive", "seed": 1, "is_driven_too_hard": False, **found})
    assert "warned: never" in row_text
    assert "accuracy 0.800 -> 0.790" in row_text


def seeds_of(text: str) -> set[int]:
    return {int(seed) for seed in text.split(",")}


def test_the_seeds_by_default_are_not_those_that_the_documents_name_as_used_for_the_rules() -> None:
    row_text = " ".join(Path("docs/tuning-staleness.md").read_text().split())
    used = re.search(r"those were seeds (\d+) to (\d+)", row_text)
    assert used
    assert min(seeds_of(SEEDS)) > int(used[2])


def test_the_published_command_names_the_seeds_that_were_published() -> None:
    published = json.loads((RESULTS / "divergence.json").read_text())
    named = re.search(r"--seeds (\S+)", published["command"])
    assert {row["seed"] for row in published["rows"]} == seeds_of(named[1] if named else SEEDS)
