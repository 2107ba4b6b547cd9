"""The benchmark with faults: which faults it causes, what it calls recovery, and what counts as good."""

from __future__ import annotations

import io
import json
import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos, chaos_run
from benchmarks.chaos_run import PROCESSES, ChaosRun, FaultKind, drawn_faults, fault_kinds, fill_up
from benchmarks.tables import TABLES
from controller.config.loading import load_config


def test_every_kind_of_process_is_killed_and_suspended_before_any_fault_repeats() -> None:
    kinds = fault_kinds(has_small_disk=True)
    assert {(kind.act, kind.target) for kind in kinds} == {
        *((act, target) for act in ("kill", "suspend") for target in PROCESSES), ("fill", "disk"),
    }  # fmt: skip
    drawn = list(islice(drawn_faults(kinds, random.Random(1)), 2 * len(kinds)))
    assert sorted(drawn[: len(kinds)]) == sorted(drawn[len(kinds) :]) == sorted(kinds)
    assert all(kind.act != "fill" for kind in fault_kinds(has_small_disk=False))


def test_the_settings_of_both_runs_are_valid() -> None:
    config = load_config(chaos.CONFIG, [*chaos.OVERRIDES, chaos.ENDLESS]).config
    assert config.trainer.checkpoint.every_steps == 5
    assert config.rollout.num_workers == 2


class Process:
    """A process of a run that is not there."""

    def __init__(self, pid: int) -> None:
        self.pid, self.done = pid, list[str]()

    def kill(self) -> None:
        self.done.append("kill")

    def suspend(self) -> None:
        self.done.append("suspend")

    def resume(self) -> None:
        self.done.append("resume")


class Run(ChaosRun):
    """After `num_waits` waits its process is replaced, and after as many again a step finishes."""

    def __init__(self, folder: Path, num_waits: int) -> None:
        self.folder, self._scratch, self.num_waits, self.num_watched = folder, folder, num_waits, 0
        self._log.write_text("")
        self.kills, self._dice = Counter(), random.Random(1)
        self.first, self.second = Process(7), Process(8)

    def _processes(self, kind: str) -> Any:
        if kind == "none":
            return []
        return [self.second if self.num_watched >= self.num_waits else self.first]

    def watch(self, seconds: float) -> None:
        self.num_watched += 1
        if self.num_watched == self.num_waits:
            self._log.write_text("a: the run failed; resuming in 2 s (--keep-alive)\n")
        if self.num_watched == 2 * self.num_waits:
            row = {"kind": "step", "step": 9, "time_s": time.time() + 1.0}
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _failure(self, what: str) -> SystemExit:
        return SystemExit(what)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 8, "time_s": time.time() - 5}) + "\n")
    return found


def test_recovery_needs_another_process_and_a_step_that_finished_since(run: Run) -> None:
    row = run.strike(FaultKind("kill", "trainer"))
    assert row is not None
    assert (row["fault"], row["held_s"], row["resumes"]) == ("kill -9 trainer", 0.0, 1)
    assert run.first.done == ["kill"]
    assert run.num_watched == 6
    assert run.kills == {"kill -9 trainer": 1}


def test_a_suspended_process_is_resumed_and_need_not_be_replaced(run: Run) -> None:
    row = run.strike(FaultKind("suspend", "rollout"))
    assert row is not None
    assert row["fault"] == "SIGSTOP rollout"
    assert run.first.done == ["suspend", "resume"]


def test_a_full_disk_is_freed_as_soon_as_the_run_has_failed_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.folder = run.folder / "run"
    run.folder.mkdir()
    monkeypatch.setattr(chaos_run, "fill_up", lambda file: file.write(b"x"))
    row = run.strike(FaultKind("fill", "disk"))
    assert row is not None
    assert (row["fault"], row["resumes"]) == ("full disk", 1)
    assert not (run.folder.parent / "ballast").exists()
    assert run.num_watched == 6


def test_a_fault_without_a_process_is_left_out_and_a_run_that_does_not_recover_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.strike(FaultKind("kill", "none")) is None
    monkeypatch.setattr(chaos_run, "GIVE_UP_S", -1.0)
    with pytest.raises(SystemExit, match="no recovery from kill -9 service"):
        run.strike(FaultKind("kill", "service"))


def test_a_disk_is_filled_to_the_last_byte() -> None:
    class Small(io.RawIOBase):
        room = 3 * (1 << 20) + 1001

        def write(self, data: Any) -> int:
            if len(data) > self.room:
                raise OSError(28, "No space left on device")
            self.room -= len(data)
            return len(data)

    disk = Small()
    fill_up(disk)
    assert disk.room == 0


FOUND: dict[str, Any] = {
    "verify": "clean", "findings": [], "dropped": 0, "left": {"processes": []}, "minutes": 2.0, "steps": 40,
    "step_s": 1.5, "accuracy": {"accuracy": 0.5}, "accuracy_without": {"accuracy": 0.52}, "disk_not_filled": "",
    "faults": [
        {"fault": "kill -9 trainer", "held_s": 0.0, "recovery_s": 4.0, "resumes": 0},
        {"fault": "kill -9 trainer", "held_s": 0.0, "recovery_s": 6.0, "resumes": 0},
        {"fault": "full disk", "held_s": 9.0, "recovery_s": 8.0, "resumes": 1},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [{"verify": "x"}, {"findings": ["twice"]}, {"dropped": 1}, {"left": {"processes": ["rollout"]}}],
)
def test_nothing_may_be_found_lost_or_left(fault: dict[str, Any]) -> None:
    assert chaos.is_good(FOUND)
    assert not chaos.is_good({**FOUND, **fault})
    assert chaos.words(FOUND).startswith("3 faults in 2 minutes, 40 steps; verify: clean; findings: none")


def test_the_table_has_the_recovery_times_of_each_fault_and_both_accuracies() -> None:
    text = TABLES["chaos"](FOUND)
    assert "| kill -9 trainer | 2 | 0.0 | 5.0 (4.0 to 6.0) | 0 |" in text
    assert "| full disk | 1 | 9.0 | 8.0 (8.0 to 8.0) | 1 |" in text
    assert "0.500 with faults and 0.520 without" in text
    assert "not filled" not in text
    assert "The disk was not filled: no root." in TABLES["chaos"]({**FOUND, "disk_not_filled": "no root"})
