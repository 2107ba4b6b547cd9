"""Claims about `--keep-alive`, with children that are stand-ins; a real run is in tests/e2e/test_keep_alive.py."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controller.cli import keep_alive as module
from controller.cli.arguments import parse
from controller.cli.keep_alive import KeepAlive, words_of
from controller.run_folder.restarts import RESTARTS_FILE, read_restarts
from controller.run_folder.run_folder import RunFolder


class Child:
    """A controller. `live(child)` is called at each poll and returns its exit code, or None while it runs."""

    def __init__(self, live: Callable[[Child], int | None]) -> None:
        self._live = live
        self.num_polls = 0
        self.signals: list[int] = []

    def wait(self, timeout: float | None = None) -> int:
        self.num_polls += 1
        if signal.SIGKILL in self.signals:
            return -signal.SIGKILL
        code = self._live(self)
        if code is None:
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return code

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Stage:
    """A run folder, and the children that are started in turn."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder.create(root, "job")
        self.folder.write_state("running", command="train")
        self.started: list[list[str]] = []
        self.children: list[Child] = []
        self.pauses: list[float] = []
        self.lives: Iterator[Callable[[Child], int | None]] = iter(())

    def at(self, step: int, time_s: float = 0.0) -> None:
        self.folder.status.write_text(json.dumps({"step": step, "time_s": time_s}))

    def spawn(self, words: Sequence[str], announcement: Path) -> Any:
        announcement.write_text(str(self.folder.root))
        self.started.append(list(words))
        self.children.append(Child(next(self.lives)))
        return self.children[-1]

    def run(self, *lives: Callable[[Child], int | None], budget: int = 3, words: Sequence[str] = ("train", "x")) -> int:
        self.lives = iter(lives)
        return KeepAlive(words, budget, spawn=self.spawn, sleep=self.pauses.append).run()

    def ends(self, code: int, step: int | None = None) -> Callable[[Child], int]:
        def live(child: Child) -> int:
            if step is not None:
                self.at(step)
            return code

        return live


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_a_command_that_ends_by_itself_is_not_repeated(stage: Stage, code: int) -> None:
    assert stage.run(stage.ends(code)) == code
    assert stage.started == [["train", "x"]]
    assert read_restarts(stage.folder.root) == []


def test_a_killed_controller_is_resumed_and_the_cause_is_recorded(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.run(stage.ends(-9, step=4), stage.ends(0, step=9)) == 0
    assert stage.started == [["train", "x"], ["resume", str(stage.folder.root)]]
    (row,) = read_restarts(stage.folder.root)
    assert (row["step"], row["cause"]) == (4, "the controller was ended by signal SIGKILL")
    assert "job: the controller was ended by signal SIGKILL; resuming in 2 s (--keep-alive)" in capsys.readouterr().err
    assert sum(stage.pauses) == 2.0


def test_a_failed_run_is_resumed_with_its_own_reason(stage: Stage) -> None:
    def fails(child: Child) -> int:
        stage.folder.write_state("failed", command="train", reason="the trainer died\nfour times")
        return 1

    assert stage.run(fails, stage.ends(0)) == 0
    (row,) = read_restarts(stage.folder.root)
    assert row["cause"] == "the run failed (the trainer died four times)"


def test_failures_in_a_row_are_limited_and_a_finished_step_starts_the_count_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [stage.ends(-9, step=step) for step in (3, 3, 4, 4, 4)]
    assert stage.run(*lives) == 1
    assert len(stage.started) == 5
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "error: job failed 3 times in a row without finishing a step; the last failure: the controller was ended by "
        f"signal SIGKILL. To continue the run: areal-like resume {stage.folder.root}"
    )
    assert [row["step"] for row in read_restarts(stage.folder.root)] == [3, 3, 4, 4]


def test_pauses_grow_to_a_minute(stage: Stage) -> None:
    assert stage.run(*[stage.ends(-9) for _ in range(8)], budget=8) == 1
    assert sum(stage.pauses) == 2 + 4 + 8 + 16 + 32 + 60 + 60


def test_a_command_that_fails_before_its_run_exists_is_not_repeated(stage: Stage) -> None:
    def spawn(words: Sequence[str], announcement: Path) -> Any:
        stage.started.append(list(words))
        return Child(lambda child: 1)

    assert KeepAlive(["train", "x"], 3, spawn=spawn, sleep=stage.pauses.append).run() == 1
    assert len(stage.started) == 1


def test_a_run_that_cannot_be_resumed_is_not(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(child: Child) -> int:
        stage.folder.state.write_text("{")
        return -9

    assert stage.run(breaks) == 1
    assert "the run's status file is damaged" in capsys.readouterr().err
    assert len(stage.started) == 1


def test_a_controller_that_writes_no_status_is_killed_and_resumed(stage: Stage) -> None:
    def hangs(child: Child) -> None:
        stage.at(2, time_s=float(min(child.num_polls, 40)))

    assert stage.run(hangs, stage.ends(0)) == 0
    assert stage.children[0].signals == [signal.SIGKILL]
    assert stage.children[0].num_polls == 41 + module.SILENT_POLLS, (
        "40 polls with a new status, then silence, then the end"
    )
    (row,) = read_restarts(stage.folder.root)
    assert row["cause"] == "the controller had written no status for 300 s"


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_is_over_has_all_time_for_its_summary(stage: Stage, status: str) -> None:
    def counts(child: Child) -> int | None:
        words = {"step": 2, "time_s": float(min(child.num_polls, 5)), "status": status}
        stage.folder.status.write_text(json.dumps(words))
        return 0 if child.num_polls > 3 * module.SILENT_POLLS else None

    assert stage.run(counts) == 0
    assert stage.children[0].signals == []
    assert read_restarts(stage.folder.root) == []


def test_a_stop_is_passed_on_and_nothing_is_resumed(stage: Stage) -> None:
    def is_stopped(child: Child) -> int | None:
        if child.num_polls == 1:
            signal.raise_signal(signal.SIGTERM)
            return None
        return 1

    before = signal.getsignal(signal.SIGTERM)
    assert stage.run(is_stopped) == 1
    assert stage.children[0].signals == [signal.SIGTERM]
    assert len(stage.started) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_comes_to_the_child_from_the_terminal(stage: Stage) -> None:
    def is_interrupted(child: Child) -> int:
        signal.raise_signal(signal.SIGINT)
        return -signal.SIGINT

    assert stage.run(is_interrupted) == 128 + signal.SIGINT
    assert stage.children[0].signals == []
    assert len(stage.started) == 1


def test_a_stop_during_a_pause_ends_the_command(stage: Stage) -> None:
    stage.lives = iter([stage.ends(-9)])
    keeper = KeepAlive(["train", "x"], 3, spawn=stage.spawn, sleep=lambda pause_s: signal.raise_signal(signal.SIGTERM))
    assert keeper.run() == 130
    assert len(stage.started) == 1


def test_command_line_of_the_child_and_of_later_resumes(stage: Stage) -> None:
    complain: Any = None
    train = parse(["train", "--keep-alive", "quickstart", "seed=2", "--max-failures", "5"], complain)
    assert words_of(train) == ["train", "quickstart", "seed=2"]
    assert train.max_failures == 5
    resume = parse(["resume", "job", "--accept-loss", "--keep-alive"], complain)
    assert words_of(resume) == ["resume", "job", "--accept-loss"]
    stage.run(stage.ends(-9), stage.ends(0), words=words_of(resume))
    assert stage.started == [["resume", "job", "--accept-loss"], ["resume", str(stage.folder.root), "--accept-loss"]]


def test_damaged_lines_of_the_record_are_skipped(tmp_path: Path) -> None:
    (tmp_path / RESTARTS_FILE).write_text('{"cause": "a", "step": 1}\n{"cau\n[]\n{"cause": 3}\n')
    assert read_restarts(tmp_path) == [{"cause": "a", "step": 1}]
