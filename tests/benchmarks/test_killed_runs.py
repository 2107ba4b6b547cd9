"""Counting a killed run again, what is killed when, and curves of finished runs; no run is started."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folders, killed_runs, learning_curves, runs
from benchmarks.killed_run import HARD, recount, repeats
from benchmarks.tables import TABLES
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.schema import SCHEMA, encode_groups


def ledger(*batches: tuple[int, str, dict[int, tuple[int, ...]]], failed: int = 0) -> sqlite3.Connection:
    """Groups 0 to 3 with samples 0 and 1, all ended; `batches`: step, lineage, samples of groups."""
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    for group, fate in enumerate(("consumed", "consumed", "filtered", "live")):
        db.execute(
            "INSERT INTO groups (group_id, version, started, seq, fate) VALUES (?, 0, 1, ?, ?)", (group, group, fate)
        )
        for index in (0, 1):
            is_scored = 2 * group + index >= failed
            db.execute(
                "INSERT INTO samples VALUES (?, ?, 0, 3, 0, 0, ?, 1.0, ?, 'w', x'', NULL, 0, 0)",
                (group, index, "scored" if is_scored else "crashed", is_scored),
            )
    for seq, (step, lineage, used) in enumerate(batches):
        groups = tuple(BatchGroup(group_id=g, sample_indices=s, first_version=0) for g, s in used.items())
        db.execute("INSERT INTO batches VALUES (?, ?, ?, 0, ?, NULL)", (seq, step, lineage, encode_groups(groups)))
    return db


def test_a_whole_ledger_has_each_sample_in_one_step_also_where_a_step_was_recorded_again() -> None:
    db = ledger((1, "a", {0: (0, 1)}), (2, "a", {1: (0,)}), (2, "b", {1: (0, 1)}))
    assert repeats(db) == []
    assert recount(db) == {
        "drawn": 4, "consumed": 2, "filtered": 1, "dropped": 0, "in_flight": 1, "trained": 4, "failed": 0,
    }  # fmt: skip


def test_a_sample_in_two_steps_and_one_without_an_end_are_found() -> None:
    db = ledger((1, "a", {0: (0, 1)}), (2, "a", {0: (1,), 1: (0, 1)}), failed=1)
    assert repeats(db) == ["sample (0, 1) is in 2 steps", "sample (0, 0) is trained on and has not ended"]
    assert recount(db)["failed"] == 1


GOOD: dict[str, Any] = {
    "findings": [], "dropped": 0, "failed": 0, "left": {"processes": []}, "most_at_once": 2000, "drawn": 9,
    "consumed": 7,
    "in_flight": 2, "trained": 56, "kills": {"controller": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "is_good"),
    [
        ({}, True), ({"findings": ["twice"]}, False), ({"dropped": 1}, False),
        ({"left": {"processes": ["rollout"]}}, False),
        ({"failed": 1}, False), ({"failed": 2, "max_failed": 2}, True), ({"failed": 3, "max_failed": 2}, False),
    ],
)  # fmt: skip
def test_nothing_may_be_lost_repeated_or_left_but_the_samples_of_killed_programs(
    fault: dict[str, Any], is_good: bool
) -> None:
    found = {**GOOD, **fault}
    assert killed_runs.is_good(found) is is_good
    assert killed_runs.words("environments", found).startswith("environments: 2000 at once; killed 1 controller")


class Run:
    """Takes its steps when it is waited for; notes what is asked."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def wait_for_step(self, step: int) -> None:
        self.done.append(step)

    def watch(self, seconds: float) -> None:
        assert 0 <= seconds <= killed_runs.SPREAD_S


@pytest.mark.parametrize("part", [killed_runs.environments_part(2000), killed_runs.agents_part(500)])
def test_every_kind_of_process_is_killed_and_some_after_each_step_but_the_last(part: killed_runs.Part) -> None:
    run = Run()
    kinds = list(killed_runs.orders(part, run))  # type: ignore[arg-type]
    assert run.done == list(range(1, part.num_steps))
    assert set(kinds) == {*HARD, part.soft}
    assert kinds.count(part.soft) == part.num_soft * (part.num_steps - 1)
    assert kinds.count("controller") == 2


@pytest.mark.parametrize(
    ("part", "num"), [(killed_runs.environments_part(2000), 2000), (killed_runs.agents_part(500), 500)]
)
def test_the_workers_hold_as_many_samples_as_are_asked_for_and_admission_lets_them(
    part: killed_runs.Part, num: int
) -> None:
    from controller.config.loading import load_config

    config = load_config(part.config, [*part.overrides, "num_steps=9"]).config
    held = config.rollout.num_workers * (config.rollout.engine.num_slots + config.rollout.queue_samples)
    admitted = 5 * config.groups_per_step * config.group_size
    assert held == num
    assert admitted >= num


# ---------------------------------------------------------------- curves


def finished(tmp_path: Path, audit: str = "clean") -> Path:
    (folder := tmp_path / "guess").mkdir()
    rows = [
        {"kind": "eval", "version": version, "accuracy": accuracy, "num_scored": num}
        for version, accuracy, num in ((0, 0.25, 16), (20, 0.5, 16), (20, 0.75, 16))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "step"}, *rows]))
    (folder / "summary.json").write_text(json.dumps({"audit": audit, "wall_s": 120.0}))
    return folder


def test_the_curve_of_a_finished_run_is_stored_next_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (results := tmp_path / "results").mkdir()
    monkeypatch.setattr(folders, "RESULTS", results)
    monkeypatch.setattr(runs, "show", lambda name, path: None)
    stored = results / "learning_curves.json"
    stored.write_text(json.dumps({"parts": {"other": {"points": []}}}))
    folder = finished(tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning_curves", str(folder)])
    learning_curves.main()
    parts = json.loads(stored.read_text())["parts"]
    assert list(parts) == ["other", "guess"]
    assert [(point["step"], point["accuracy"]) for point in parts["guess"]["points"]] == [(0, 0.25), (20, 0.75)]
    assert "0: 0.250  20: 0.750" in capsys.readouterr().out
    line = TABLES["learning_curves"]({"parts": {"guess": parts["guess"]}})
    assert "| guess | 0: 0.250, 20: 0.750 | 16 and 16 | 2 |" in line


def test_only_a_finished_run_with_a_clean_audit_has_a_curve(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not the folder of a finished run"):
        learning_curves.curve_of(tmp_path)
    with pytest.raises(SystemExit, match=r"the audit of .* says: 1 finding"):
        learning_curves.curve_of(finished(tmp_path, audit="1 finding"))


def test_the_table_of_killed_runs_names_what_was_killed() -> None:
    text = TABLES["killed_runs"]({"environments": GOOD, "program_memory": {"preloaded": 18.1, "started": 50.1}})
    assert "| environments | 2,000 | 1 controller | 9 | 7 | 0 | 2 | 56 | 0 | 0 | 0 |" in text
    assert "18 MB if its imports are preloaded, and 50 MB otherwise" in text
