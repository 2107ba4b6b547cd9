"""Which seconds of a run are the program's own: those on a processor and those idle, never those of a busy machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from code_harness import CodeBench

from services.reward.sandbox import run as module
from services.reward.sandbox.cell import SandboxFailed
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import BLOCKED_FACTOR, BLOCKED_ROOM_S, LOOK_EVERY_S, Run, Stopped, words_for
from services.reward.sandbox.usage import Usage

LIMITS = Limits(time_s=1.0, memory_bytes=100 << 20, max_tasks=4)
EVENT = {7: select.POLLIN}
CONTROL_FD = 3


class World:
    """A machine whose clock and program do what `step` says, once for each wait. Stands in for time, select and cell.

    step(world): moves `now_s` and `usage`, and returns what happened by descriptor.
    """

    control_fd = CONTROL_FD
    POLLIN = select.POLLIN

    def __init__(self, step: Callable[[World], dict[int, int]], total_s: float = 60.0, room_s: float = 0.0) -> None:
        self.step = step
        self.now_s, self.queued_here_s, self.num_waits = 1000.0, 5.0, 0
        self.state = Usage(cpu_s=30.0, active_s=40.0)  # of runs before this one
        self.ending: int | None = 0
        self.deadline = Deadline(total_s)
        self.room_s = room_s

    def monotonic(self) -> float:
        return self.now_s

    def usage(self) -> Usage:
        return self.state

    def ended(self) -> int | None:
        return self.ending

    def poll(self, timeout_ms: float | None = None) -> Any:
        if timeout_ms is None:
            return self
        self.num_waits += 1
        assert self.num_waits < 10_000, "nothing ends this run"
        return list(self.step(self).items())

    def register(self, fd: int, events: int) -> None: ...

    def run(self) -> Run:
        return Run(self, LIMITS, self.deadline, self.room_s)  # type: ignore[arg-type]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    def make(step: Callable[[World], dict[int, int]], **settings: float) -> World:
        made = World(step, **settings)
        monkeypatch.setattr(module, "time", made)
        monkeypatch.setattr(module, "select", made)
        monkeypatch.setattr(module, "queued_here_s", lambda: made.queued_here_s)
        return made

    return make


def passes(
    seconds: float = LOOK_EVERY_S,
    *,
    cpu: float = 0.0,
    queued: float = 0.0,
    here: float = 0.0,
    ends_at: float = 1e9,
    happens: dict[int, int] | None = None,
    **state: bool,
) -> Callable[[World], dict[int, int]]:
    """A step: of `seconds` on the wall, shares `cpu` and `queued` of the program's one task, `here` of the judge."""

    def step(world: World) -> dict[int, int]:
        before = world.state
        world.now_s += seconds
        world.queued_here_s += here * seconds
        active_s = before.active_s + (cpu + queued) * seconds
        world.state = Usage(cpu_s=before.cpu_s + cpu * seconds, active_s=active_s, num_tasks=1, **state)
        return {CONTROL_FD: select.POLLIN} if world.now_s - 1000.0 >= ends_at else dict(happens or {})

    return step


def wait_indefinitely(run: Run) -> None:
    while True:
        run.wait(EVENT)


def took_s(world: World) -> float:
    return world.now_s - 1000.0


@pytest.mark.parametrize(
    "waits",
    [
        passes(cpu=0.01, queued=0.99, is_ready=True, ends_at=50.0),  # seldom on a processor
        passes(cpu=0.01, queued=0.99, ends_at=50.0),  # the same, seen in a moment of sleep
        passes(is_ready=True, ends_at=50.0),  # its group has used up its share of the processors
        passes(here=1.0, ends_at=50.0),  # the judge is kept from looking
        passes(5000.0, ends_at=5000.0),  # the judge, or the machine, was stopped
    ],
)
def test_seconds_of_a_busy_machine_cost_a_program_nothing(
    world: Callable[..., World], waits: Callable[[World], dict[int, int]]
) -> None:
    machine = world(waits)
    run = machine.run()
    assert run.wait(EVENT) == {}
    assert run.status == 0
    assert run.own_s == pytest.approx(machine.state.cpu_s - 30.0)
    assert run.own_s < 0.51


def test_program_that_answered_in_time_counts_however_late_the_judge_looks(world: Callable[..., World]) -> None:
    machine = world(passes(5000.0, happens=EVENT))
    machine.deadline.until_s = 1000.0 + machine.deadline.wall_s
    assert machine.run().wait(EVENT) == EVENT


@pytest.mark.parametrize(
    ("waits", "after_s"),
    [
        (passes(cpu=1.0, is_ready=True), 1.0),  # spins
        (passes(cpu=4.0, is_ready=True), 0.25),  # spins in four processes
        (passes(), 1.0),  # sleeps
        (passes(happens=EVENT), 1.0),  # sleeps and says something now and then
        (passes(cpu=0.5), 1.0),  # both by turns
        (passes(cpu=0.1, queued=0.4), 1.0 / 0.6),  # on a machine that is busy half of the time
        (passes(is_blocked=True), BLOCKED_FACTOR * 1.0 + BLOCKED_ROOM_S),  # waits for a disk, or says so
    ],
)
def test_own_seconds_beyond_the_limit_stop_it(
    world: Callable[..., World], waits: Callable[[World], dict[int, int]], after_s: float
) -> None:
    machine = world(waits)
    with pytest.raises(Stopped, match="time limit of 1 s"):
        wait_indefinitely(machine.run())
    assert took_s(machine) == pytest.approx(after_s, abs=2 * LOOK_EVERY_S)


def test_processor_time_between_two_looks_counts_at_the_end_of_a_run(world: Callable[..., World]) -> None:
    within = LOOK_EVERY_S / 2
    machine = world(passes(within, cpu=0.9 / within, ends_at=0.0))
    run = machine.run()
    run.wait({})
    assert (run.status, run.own_s, machine.deadline.spent_s) == (0, pytest.approx(0.9), pytest.approx(0.9))
    machine = world(passes(within, cpu=1.1 / within, ends_at=0.0))
    with pytest.raises(Stopped, match="time limit of 1 s"):
        machine.run().wait({})


def test_runs_of_one_program_share_its_total_time_and_one_may_have_room_beyond(world: Callable[..., World]) -> None:
    machine = world(passes(cpu=1.0, is_ready=True, ends_at=0.6), total_s=1.0)
    machine.run().wait({})
    machine.now_s = 1000.0
    with pytest.raises(Stopped, match="time limit of all its tests together"):
        machine.run().wait({})
    machine.now_s, machine.deadline.spent_s, machine.room_s = 1000.0, 0.6, 0.5
    machine.run().wait({})


def test_run_that_is_given_up_is_charged_what_it_used_since_the_last_look(world: Callable[..., World]) -> None:
    machine = world(passes(0.01, cpu=0.5, happens=EVENT))
    run = machine.run()
    run.wait(EVENT)
    assert machine.deadline.spent_s == 0.0
    run.settle()
    assert machine.deadline.spent_s == pytest.approx(0.01)


def test_bound_on_the_wall_is_no_verdict_on_the_program(world: Callable[..., World]) -> None:
    machine = world(passes(0.5, is_ready=True), total_s=2.0)
    machine.deadline.until_s = 1000.0 + machine.deadline.wall_s
    with pytest.raises(SandboxFailed, match=r"no verdict within 620 s: the machine is too busy"):
        machine.run().wait(EVENT)
    assert took_s(machine) == pytest.approx(620.0, abs=1.0)


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Usage(30.0, 101 << 20), "memory limit of 100 MB"),
        (Usage(30.0, 0, 5), "limit of 4 processes and threads"),
    ],
)
def test_memory_and_tasks_are_bounded_while_it_is_waited_for(
    world: Callable[..., World], usage: Usage, words: str
) -> None:
    def grow(machine: World) -> dict[int, int]:
        machine.now_s, machine.state = machine.now_s + LOOK_EVERY_S, usage
        return {}

    with pytest.raises(Stopped, match=words):
        world(grow).run().wait(EVENT)


def test_run_whose_sandbox_is_gone_is_stopped(world: Callable[..., World]) -> None:
    machine = world(passes(ends_at=0.0))
    machine.ending = None
    with pytest.raises(Stopped, match="its sandbox was ended"):
        machine.run().wait({})


def test_words_for_an_end() -> None:
    assert words_for(3 << 8, LIMITS) == "exit status 3"
    assert words_for(signal.SIGSEGV, LIMITS) == "killed by signal SIGSEGV"
    for number in (signal.SIGKILL, signal.SIGXCPU):
        assert words_for(number, LIMITS) == "killed (time limit of 1 s, or memory)"
    assert os.waitstatus_to_exitcode(40) == -40
    assert words_for(40, LIMITS).startswith("killed by signal ")


@pytest.mark.processes
def test_verdict_stays_where_the_judge_was_kept_off_its_processor(namespaces: CodeBench) -> None:
    supervisor = psutil.Process(namespaces.judges._child.pid)
    program = "import time\ntime.sleep(0.1)\nprint(3)\n"
    outcomes: list[Any] = []
    tests = [{"input": "", "output": "3"}]
    scoring = threading.Thread(target=lambda: outcomes.append(namespaces.score(program, tests, time_limit_s=0.6)))
    scoring.start()
    runs = False
    while scoring.is_alive() and not runs:  # bubblewrap, its first process, and below that the run
        with contextlib.suppress(psutil.NoSuchProcess):
            runs = any(len(cell.children(recursive=True)) > 1 for cell in supervisor.children())
    supervisor.suspend()
    time.sleep(0.7)
    supervisor.resume()
    scoring.join()
    assert (outcomes[0].kind, outcomes[0].value) == ("scored", 1.0), outcomes[0].reason
