"""Claims about the benchmark of one task through three ports: its settings, its times, and its paired differences."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folders, runs, tool_sum
from benchmarks.panels import panels_of
from benchmarks.tables import markdown
from controller.config.loading import load_config

ACCURACY = {"tool_sum": (0.3, 0.9, 0.96), "environment_tool_sum": (0.3, 0.95, 0.99), "agent_tool_sum": (0.25, 0.5, 0.9)}


def test_the_three_jobs_differ_in_nothing_but_the_way_to_the_policy() -> None:
    configs = [load_config(name).config for name in tool_sum.JOBS.values()]
    for name in (
        "groups_per_step",
        "group_size",
        "num_steps",
        "seed",
        "mode",
        "staleness",
        "trainer",
        "eval",
        "sampling",
    ):
        assert len({repr(getattr(config, name)) for config in configs}) == 1, name
    assert len({repr(config.warm_start.sft) for config in configs if config.warm_start}) == 1
    data = {repr((config.data.train, config.data.eval)) for config in configs}
    assert len(data) == 1, "the same prompts, held-out ones among them"
    demonstrations = [dict(config.warm_start.data.options or {}) for config in configs if config.warm_start]
    for options in demonstrations:
        options.pop("chat", None)
    assert len(demonstrations) == 3
    assert demonstrations[0] == demonstrations[1] == demonstrations[2]
    workflow, environment, _ = configs
    assert workflow.model == environment.model, "they share a warm start"


def finished(folder: Path, accuracies: tuple[float, ...], audit: str = "clean") -> dict[str, Any]:
    """The folder of a run that began at 1000 s, whose warm start took 100 s, and which evaluated every 50 s."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"created_s": 1000.0}))
    rows = [
        {"kind": "eval", "version": 5 * number, "accuracy": accuracy, "num_scored": 200, "time_s": 1110.0 + 50 * number}
        for number, accuracy in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*reversed(rows), {"kind": "step"}])
    )
    return {"folder": str(folder), "audit": audit, "prepare_s": 100.0, "train_wall_s": 9.0, "samples_consumed": 7}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Jobs that have ended at once; the settings of each."""
    settings: list[list[str]] = []

    def train(config: str, given: list[str], runs_dir: Path) -> dict[str, Any]:
        settings.append(list(given))
        return finished(runs_dir / str(len(settings)), ACCURACY[Path(config).stem])

    monkeypatch.setattr(tool_sum, "train", train)
    monkeypatch.setattr(folders, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runs, "show", lambda *_: None)
    return settings


def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tool_sum", *words, "--runs-dir", str(tmp_path / "runs")])
    tool_sum.main()


@pytest.mark.processes
def test_one_command_measures_the_three_jobs_on_both_seeds(
    trained: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(monkeypatch, tmp_path)
    assert trained == [[f"seed={seed}", "metrics.report=false"] for seed in (1, 1, 1, 2, 2, 2)]
    result = json.loads((tmp_path / "results" / "tool_sum.json").read_text())
    found = {(row["job"], row["seed"]): (row["reached_step"], row["reached_s"]) for row in result["rows"]}
    for seed in (1, 2):
        assert found["workflow", seed] == (10, 110.0), "110 s after the warm start, at the end of the evaluation"
        assert found["environment", seed] == (5, 60.0)
        assert found["proxy", seed] == (None, None)
    differences = [(one["job"], one["seed"], round(one["difference"], 3)) for one in result["paired"]]
    assert differences == [("environment", 1, 0.03), ("proxy", 1, -0.06), ("environment", 2, 0.03), ("proxy", 2, -0.06)]
    text = markdown("tool_sum", result)
    assert "| workflow | 1 | 0: 0.300, 5: 0.900, 10: 0.960 | 10 | 110 | - |" in text
    assert "| proxy | 2 | 0: 0.250, 5: 0.500, 10: 0.900 | not reached | - | -0.060 |" in text
    first, second = panels_of("tool_sum", result)
    assert (len(first.series), len(second.series)) == (3, 3)


@pytest.mark.processes
@pytest.mark.usefixtures("trained")
def test_other_steps_are_not_published_and_a_quick_form_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    published = tmp_path / "results" / "tool_sum.json"
    published.write_text(before := json.dumps({"command": "python -m benchmarks.tool_sum"}))
    call(monkeypatch, tmp_path, "num_steps=5", "--seeds", "1")
    assert published.read_text() == before
    (own := tmp_path / "runs" / "tool_sum.json").rename(tmp_path / "own.json")
    call(monkeypatch, tmp_path, "--quick")
    assert published.read_text() == before
    assert not own.exists()


def test_a_run_whose_audit_found_something_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = finished(tmp_path / "run", (0.9,), audit="1 finding")
    monkeypatch.setattr(tool_sum, "train", lambda *_: summary)
    with pytest.raises(SystemExit, match="says: 1 finding"):
        tool_sum.run("tool_sum", [], tmp_path)
