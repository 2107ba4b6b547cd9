"""`Run` without a run: what it asks of its folder and its process, and when it stops asking."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import DeadlineExceeded, RunFailed
from controller.python_api import run as module
from controller.python_api.run import POLL_S, WHOLE_FILE, Run
from controller.run_folder.run_folder import RunFolder
from controller.runs.facts import TAIL_BYTES
from controller.runs.stop import DEFAULT_TIMEOUT_S


class Stage:
    """A run folder whose facts are set here, with time that passes only in waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.folder = RunFolder(root / "mine")
        self.folder.final.mkdir(parents=True)
        self.kind, self.words, self.reason = "running", "since noon", ""
        self.step: int | None = 3
        self.waits: Any = ["a waits for b"]
        self.rows: list[dict[str, Any]] = []
        self.asked: list[Any] = []
        self.now_s, self.slept_s = 100.0, 0.0
        self.ends_at_s = float("inf")
        monkeypatch.setattr(module, "find_run", lambda name: self.folder)
        monkeypatch.setattr(module, "read_facts", self.facts)
        monkeypatch.setattr(module, "whereabouts", self.whereabouts)
        monkeypatch.setattr(module, "tail_rows", self.tail)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(
            module, "stop_command",
            SimpleNamespace(stop=lambda folder, **how: self.asked.append((folder, how))),
        )  # fmt: skip

    def facts(self, folder: RunFolder) -> Any:
        assert folder == self.folder
        where = SimpleNamespace(kind=self.kind, words=self.words)
        return SimpleNamespace(
            status={"waits": self.waits}, where=where, step=self.step, num_steps=9, accuracy={0: 0.5}
        )

    def whereabouts(self, folder: RunFolder) -> Any:
        if self.now_s >= self.ends_at_s:
            self.kind = "finished"
        return SimpleNamespace(
            kind=self.kind, words=self.words, state={"reason": self.reason}, is_running=self.kind == "running"
        )

    def tail(self, path: Path, num_bytes: int) -> list[dict[str, Any]]:
        assert path == self.folder.metrics
        self.asked.append(num_bytes)
        assert len(self.asked) < 100, "it looks without end"
        return list(self.rows)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds
        self.slept_s += seconds

    def run(self) -> Run:
        return Run("mine")


class Process:
    """A controller that ends after so many waits."""

    def __init__(self, stage: Stage, num_waits: int) -> None:
        self.folder, self.stage, self.left = stage.folder, stage, num_waits
        self.output, self.checked = "printed", 0
        self.waited: list[float | None] = []

    @property
    def is_alive(self) -> bool:
        return self.left > 0

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waited.append(timeout_s)
        self.left -= 1
        self.stage.now_s += timeout_s or 0.0
        return self.left <= 0

    def check(self) -> None:
        self.checked += 1


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def started(stage: Stage, num_waits: int = 1) -> tuple[Run, Process]:
    process = Process(stage, num_waits)
    return Run._started(process), process  # type: ignore[arg-type]


# ---------------------------------------------------------------- what it is


def test_status_is_the_facts_of_the_folder(stage: Stage) -> None:
    run = stage.run()
    status = run.status
    assert (status.state, status.message, status.step, status.num_steps) == ("running", "since noon", 3, 9)
    assert (status.accuracy, status.waits) == ({0: 0.5}, ("a waits for b",))
    stage.waits = None
    assert run.status.waits == ()
    assert repr(run) == f"Run({str(stage.folder.root)!r}, running)"
    assert (run.name, run.folder, run.output) == ("mine", stage.folder.root, "")


@pytest.mark.parametrize(("kind", "is_alive", "state"), [
    ("crashed", True, "running"), ("running", True, "running"), ("crashed", False, "crashed"),
    ("finished", True, "running"), ("finished", False, "finished"),
])  # fmt: skip
def test_run_whose_command_lives_is_running_whatever_its_folder_says_yet(
    stage: Stage, kind: str, is_alive: bool, state: str
) -> None:
    run, _ = started(stage, num_waits=1 if is_alive else 0)
    stage.kind = kind
    assert run.status.state == state
    assert run.status.message == ("starting or ending" if state != kind else "since noon")
    assert run.output == "printed"


@pytest.mark.parametrize(("kind", "has_config", "is_there"), [
    ("finished", True, True), ("finished", False, False), ("stopped", True, False),
])  # fmt: skip
def test_final_model_is_whole_and_of_a_finished_run(stage: Stage, kind: str, has_config: bool, is_there: bool) -> None:
    stage.kind = kind
    if has_config:
        (stage.folder.final / "config.json").touch()
    assert stage.run().final_model == (stage.folder.final if is_there else None)


def test_metrics_are_all_rows_of_the_kind_from_the_whole_file(stage: Stage) -> None:
    stage.rows = [{"kind": "step", "step": 1}, {"kind": "eval"}, {}, {"kind": "step", "step": 2}]
    run = stage.run()
    assert run.metrics() == [{"kind": "step", "step": 1}, {"kind": "step", "step": 2}]
    assert run.metrics("eval") == [{"kind": "eval"}]
    assert run.metrics("") == stage.rows
    assert stage.asked == [WHOLE_FILE] * 3


def test_samples_are_chosen_as_asked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        module, "read_samples", lambda folder, choice: chosen.append((folder, choice)) or SimpleNamespace(samples=["s"])
    )
    run = stage.run()
    assert run.samples() == ["s"]
    run.samples(step=1, group=2, order="best", limit=None, grep="x")
    usual, special = chosen
    assert (usual[0], usual[1]) == (
        stage.folder,
        module.Choice(step=None, group=None, order="newest", limit=20, grep=""),
    )
    assert special[1] == module.Choice(step=1, group=2, order="best", limit=None, grep="x")


# ---------------------------------------------------------------- waiting


def test_wait_looks_until_the_run_has_ended(stage: Stage) -> None:
    stage.ends_at_s = 100.5
    run = stage.run()
    assert run.wait() is run
    assert stage.slept_s == pytest.approx(3 * POLL_S)


def test_run_that_has_ended_is_not_waited_for(stage: Stage) -> None:
    stage.ends_at_s = stage.now_s
    stage.run().wait()
    assert stage.slept_s == 0.0


@pytest.mark.parametrize("timeout_s", [0.0, 0.5])
def test_wait_is_given_up_at_its_deadline_and_not_before(stage: Stage, timeout_s: float) -> None:
    with pytest.raises(DeadlineExceeded, match="the end of mine"):
        stage.run().wait(timeout_s)
    assert stage.slept_s == pytest.approx(timeout_s)


def test_run_that_ends_right_at_the_deadline_has_ended(stage: Stage) -> None:
    stage.ends_at_s = 100.5
    assert stage.run().wait(0.5).status.state == "finished"


def test_wait_for_a_process_waits_for_it_alone(stage: Stage) -> None:
    run, process = started(stage, num_waits=3)
    stage.kind = "finished"
    assert run.wait() is run
    assert process.waited == [POLL_S] * 3
    assert (stage.slept_s, process.checked) == (0.0, 0)


@pytest.mark.parametrize(
    ("kind", "num_checks"), [("finished", 0), ("stopped", 0), ("failed", 1), ("crashed", 1), ("foreign", 1)]
)
def test_command_is_asked_what_went_wrong_unless_the_run_ended_well(stage: Stage, kind: str, num_checks: int) -> None:
    run, process = started(stage)
    stage.kind, stage.reason = kind, "disk full"
    if kind in ("failed", "crashed"):
        with pytest.raises(RunFailed, match="disk full") as raised:
            run.wait()
        assert raised.value.run == "mine"
    else:
        run.wait()
    assert process.checked == num_checks


def test_failed_run_without_a_reason_says_where_it_stands(stage: Stage) -> None:
    stage.kind, stage.words = "crashed", "its controller was killed"
    with pytest.raises(RunFailed, match="its controller was killed"):
        stage.run().wait()


# ---------------------------------------------------------------- steps


def test_steps_are_yielded_once_in_order_and_later_looks_read_the_tail_alone(stage: Stage) -> None:
    stage.rows = [{"kind": "step", "step": 1}, {"kind": "eval"}, {"kind": "step", "step": 2}]
    steps = iter(stage.run())
    assert [next(steps)["step"] for _ in range(2)] == [1, 2]
    stage.rows = [{"kind": "step", "step": 2}, {"kind": "step", "step": 3}]
    assert next(steps)["step"] == 3
    stage.ends_at_s = stage.now_s
    assert list(steps) == []
    assert stage.asked == [WHOLE_FILE, TAIL_BYTES, TAIL_BYTES]


def test_steps_are_looked_for_a_few_times_a_second(stage: Stage) -> None:
    stage.ends_at_s = 100.5
    assert list(stage.run()) == []
    assert stage.slept_s == pytest.approx(3 * POLL_S)
    assert len(stage.asked) == 4


def test_gap_in_the_tail_is_filled_from_the_whole_file(stage: Stage) -> None:
    stage.rows = [{"kind": "step", "step": 1}]
    steps = iter(stage.run())
    assert next(steps)["step"] == 1
    whole = [{"kind": "step", "step": number} for number in range(1, 6)]
    tail = module.tail_rows
    module.tail_rows = lambda path, num_bytes: (tail(path, num_bytes), whole if num_bytes == WHOLE_FILE else whole[3:])[
        1
    ]  # type: ignore[assignment]
    assert [next(steps)["step"] for _ in range(4)] == [2, 3, 4, 5]
    assert stage.asked == [WHOLE_FILE, TAIL_BYTES, WHOLE_FILE]


def test_run_that_begins_later_than_its_first_step_is_read_once(stage: Stage) -> None:
    stage.rows = [{"kind": "step", "step": 4}]
    stage.ends_at_s = stage.now_s
    assert [row["step"] for row in stage.run()] == [4]
    assert stage.asked == [WHOLE_FILE]


def test_steps_written_before_the_end_was_seen_are_not_lost(stage: Stage) -> None:
    run, process = started(stage, num_waits=1)
    stage.kind = "finished"
    steps = iter(run)
    process.wait = lambda timeout_s=None: (
        (stage.rows.append({"kind": "step", "step": 1}), setattr(process, "left", 0))[0] is None
    )  # type: ignore[method-assign]
    assert [row["step"] for row in steps] == [1]


# ---------------------------------------------------------------- stop


def test_stop_asks_the_run_and_returns_how_it_ended(stage: Stage) -> None:
    stage.kind = "stopped"
    assert stage.run().stop().state == "stopped"
    stage.run().stop(now=True, timeout_s=5.0)
    assert stage.asked == [
        (stage.folder, {"now": False, "timeout_s": DEFAULT_TIMEOUT_S}),
        (stage.folder, {"now": True, "timeout_s": 5.0}),
    ]


def test_stop_of_a_run_that_goes_on_is_given_up(stage: Stage) -> None:
    with pytest.raises(DeadlineExceeded, match="the end of mine"):
        stage.run().stop(timeout_s=5.0)


@pytest.mark.parametrize("holder", [None, 4242])
def test_command_just_started_is_asked_once_it_holds_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, holder: int | None
) -> None:
    monkeypatch.setattr(module, "lock_holder", lambda folder: holder)
    run, process = started(stage, num_waits=3 if holder is None else 1)
    stage.kind = "stopped"
    assert run.stop(timeout_s=5.0).state == "stopped"
    assert process.waited == [POLL_S] * (3 if holder is None else 0) + [5.0]
    assert len(stage.asked) == 1
