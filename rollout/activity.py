"""The state of the worker as a whole at each moment, for the heartbeat's counters and the timeline's main lane.

`WorkerActivity` derives one state from the phases of all samples, and counts the seconds in which nothing generates.
The engine itself measures busy_s, idle_s and paused_s.

    generate      some answer is being generated (or waits for a slot alongside those that are)
    wait:score    none is, and at least one sample waits for its verdict or its environment: the reward service limits
                  the worker
    wait:teacher  none of these, and samples wait for the log-probs of a teacher (`trainer.teacher.model`)
    wait:version  none of these, and samples wait for a policy version
    load          none of these, and a version is being loaded; before the worker is ready: model and engine
    workflow      none of these, and a workflow runs its own code
    wait:traffic  none of these, and samples wait for requests or rewards of clients (workflow `traffic`)
    wait:work     there is nothing to do at all: no lease
    swap          generation is paused while weights are swapped (within any of the others)

wait_score_s, wait_teacher_s, wait_version_s, load_s, workflow_s, wait_traffic_s and wait_work_s are exclusive: their
sum is the time in which nothing generated since the worker was ready. The engine measures idle_s separately: the time
in which no slot was active.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from areal_like.clock import Clock
from areal_like.state_lane import StateLane
from areal_like.trace import Tracer
from areal_like.wire.messages import WAITS_FOR_TRAFFIC

Phase = Literal["start", "traffic", "version", "generate", "score", "environment", "teacher", "end"]
"""Phase of one sample. `start`: its workflow's own code. `traffic`: it waits for a client. `environment`: a call of its
environment. `teacher`: it has its verdict, and waits for log-probs."""
State = Literal[
    "load", "generate", "wait:score", "wait:teacher", "wait:version", "wait:traffic", "workflow", "wait:work"
]  # fmt: skip

COUNTERS: dict[State, str] = {
    "wait:score": "wait_score_s",
    "wait:teacher": "wait_teacher_s",
    "wait:version": "wait_version_s",
    "load": "load_s",
    WAITS_FOR_TRAFFIC: "wait_traffic_s",
    "workflow": "workflow_s",
    "wait:work": "wait_work_s",
}


class WorkerActivity:
    """Notified of every change; used from the worker's event loop."""

    def __init__(self, clock: Clock, tracer: Tracer) -> None:
        self._clock, self._tracer = clock, tracer
        self._num: Counter[Phase] = Counter()
        self._is_ready = self.is_loading = False
        self.state: State = "load"
        self._since_s = clock.monotonic_s()
        self._spent_s = dict.fromkeys(COUNTERS.values(), 0.0)
        self._lane = StateLane(tracer, "load", kept=("swap", "load"))

    def moved(self, before: Phase, after: Phase) -> None:
        """Record that a sample changes its phase; after `end` it has none."""
        self._num[before] -= 1
        self._num[after] += 1
        self._look()

    def ready(self) -> None:
        """Record that the worker is ready: from now on it waits for work."""
        self._is_ready = True
        self._since_s = self._clock.monotonic_s()  # the time of the start does not count as waiting
        self._look()

    def loading(self, is_loading: bool) -> None:
        """Record whether a version is being loaded."""
        self.is_loading = is_loading
        self._look()

    def swapped(self, pause_s: float) -> None:
        """Record that weights have just been swapped, with generation paused for `pause_s`."""
        end_s = self._tracer.now_s()
        self._lane.between("swap", end_s - pause_s, end_s)

    def counters(self) -> dict[str, float]:
        """Seconds so far, including the current state."""
        spent_s = dict(self._spent_s)
        if self._is_ready and self.state in COUNTERS:
            spent_s[COUNTERS[self.state]] += self._clock.monotonic_s() - self._since_s
        return spent_s

    def close(self) -> None:
        """Record that the worker ends."""
        self._lane.close()

    def _look(self) -> None:
        state = self._judge()
        if state == self.state:
            return
        now_s = self._clock.monotonic_s()
        if self.state in COUNTERS:
            self._spent_s[COUNTERS[self.state]] += now_s - self._since_s
        self.state, self._since_s = state, now_s
        self._lane.enter(state)

    def _judge(self) -> State:
        num = self._num
        if not self._is_ready:
            return "load"
        if num["generate"] > 0:
            return "generate"
        if num["score"] + num["environment"] > 0:
            return "wait:score"
        if num["teacher"] > 0:
            return "wait:teacher"
        if num["version"] > 0:
            return "wait:version"
        if self.is_loading:
            return "load"
        if num["start"] > 0:
            return "workflow"
        return WAITS_FOR_TRAFFIC if num["traffic"] > 0 else "wait:work"
