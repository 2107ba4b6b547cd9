"""Claims about the benchmark of training from files: its rows, its controls, and where its result goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folders, preference, runs
from benchmarks.tables import markdown


def read(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_held_out_words_are_no_training_words_and_seeds_draw_their_own(tmp_path: Path) -> None:
    found = {}
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        files = preference.write_rows(tmp_path / str(seed), seed, is_paired=False, is_swapped=False)
        prompts = {name: [row["prompt"] for row in read(file)] for name, file in files.items()}
        assert (len(prompts["train"]), len(prompts["eval"])) == (preference.NUM_TRAIN, preference.NUM_HELD_OUT)
        assert not set(prompts["train"]) & set(prompts["eval"])
        found[seed] = prompts["train"]
    assert found[1] != found[2]


def test_one_letter_is_wrong_and_the_control_swaps_half_of_the_training_pairs_alone(tmp_path: Path) -> None:
    files = preference.write_rows(tmp_path, 1, is_paired=True, is_swapped=False)
    pairs = {name: read(file) for name, file in files.items()}
    for row in (*pairs["train"], *pairs["eval"]):
        differences = sum(one != other for one, other in zip(row["chosen"], row["rejected"], strict=True))
        assert differences == 1
        assert row["chosen"] == row["prompt"][:-1].upper()
    files = preference.write_rows(tmp_path, 1, is_paired=True, is_swapped=True)
    swapped = {name: read(file) for name, file in files.items()}
    assert swapped["eval"] == pairs["eval"]
    num_swapped = sum(row["chosen"] != row["prompt"][:-1].upper() for row in swapped["train"])
    assert 0.4 < num_swapped / preference.NUM_TRAIN < 0.6


@pytest.mark.processes
@pytest.mark.parametrize(("words", "is_published"), [("", True), ("--seeds 1", False)])
def test_only_the_published_seeds_write_the_published_result(
    words: str, is_published: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(kind: str, seed: int, folder: Path) -> dict[str, Any]:
        return {"accuracy_before": 0.5, "accuracy_after": 0.5 + seed / 10, "loss_before": 1.0, "loss_after": 0.5,
                "steps": 2, "eval_rows": 4, "cpu_s": 1.0}  # fmt: skip

    published = tmp_path / "published" / "preference.json"
    published.parent.mkdir()
    published.write_text(before := json.dumps({"command": "python -m benchmarks.preference"}))
    monkeypatch.setattr(preference, "run", run)
    monkeypatch.setattr(folders, "RESULTS", published.parent)
    monkeypatch.setattr(runs, "show", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["preference", *words.split(), "--runs-dir", str(tmp_path / "runs")])
    preference.main()
    assert (published.read_text() != before) == is_published
    result = json.loads((published if is_published else tmp_path / "runs" / "preference.json").read_text())
    assert {row["kind"] for row in result["rows"]} == set(preference.KINDS)
    assert "| sft, " in markdown("preference", result)


def test_a_run_reports_what_its_last_evaluation_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.offline.loop import OfflineTraining

    def two_evaluations(self: Any) -> None:
        rows = [{"kind": "eval", "version": v, "accuracy": v / 4, "loss": 1.0, "num_scored": 200.0} for v in (0, 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(OfflineTraining, "run", two_evaluations)
    found = preference.run("dpo", 3, tmp_path)
    assert (found["accuracy_before"], found["accuracy_after"], found["steps"], found["eval_rows"]) == (0.0, 0.5, 2, 200)
    assert len(read(tmp_path / "train.jsonl")) == preference.NUM_TRAIN
