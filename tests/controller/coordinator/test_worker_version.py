"""The life of a version on one worker: the table is the one that is documented, and it is what it replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from version_schedules import EXPECTED, check_version

from controller.coordinator import worker_version
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.transitions import UnlistedTransition
from controller.coordinator.worker_version import TABLE, VersionAction, VersionEvent, VersionState, WorkerVersion

JOB = EvalJob(1, 1, "v1", "l0", "periodic", 1, [0])
STATES = tuple(VersionState)
MUST_NOT_HAPPEN = {
    (VersionState.SWAPPING, VersionEvent.STAGED),
    (VersionState.RETRY_SWAPPING, VersionEvent.STAGED),
    *((state, VersionEvent.TURN_GRANTED) for state in STATES if "staged" not in state.value),
    *((state, VersionEvent.OVERDUE) for state in STATES if state.value in ("idle", "quarantined")),
    *((state, VersionEvent.OVERDUE) for state in STATES if "staged" in state.value),
    *((state, VersionEvent.PINNED) for state in STATES[4:]),
}


def rendered() -> list[str]:
    """The table as the docstring of the module shows it."""
    lines = []
    for states in (STATES[:4], STATES[4:]):
        lines.append(" ".join([f"{'event':16}", *(f"{state.name:15}" for state in states)]).rstrip())
        for event in VersionEvent:
            cells = (TABLE[state][event][0].name if event in TABLE[state] else "-" for state in states)
            lines.append(" ".join([f"{event.name:16}", *(f"{cell:15}" for cell in cells)]).rstrip())
    return lines


def test_the_docstring_shows_the_table() -> None:
    shown = [line.strip() for line in (worker_version.__doc__ or "").splitlines()]
    first = shown.index(rendered()[0])
    assert [line for line in shown[first:] if line][: len(rendered())] == rendered()


@pytest.mark.parametrize("state", STATES)
def test_every_pair_is_listed_or_is_an_error(state: VersionState) -> None:
    for event in VersionEvent:
        assert (event in TABLE[state]) is ((state, event) not in MUST_NOT_HAPPEN), event


def test_of_the_table_no_state_event_or_action_is_dead() -> None:
    entered = {target for state, row in TABLE.items() for target, _ in row.values() if target is not state}
    assert entered == set(STATES)
    assert {event for row in TABLE.values() for event in row} == set(VersionEvent)
    assert {action for row in TABLE.values() for _, actions in row.values() for action in actions} == set(VersionAction)


def test_the_answers_of_the_docstring_are_those_of_the_table() -> None:
    quarantined = STATES[4:]
    assert TABLE[VersionState.RETRY_STAGED][VersionEvent.TURN_GRANTED][0] in quarantined
    ends = {e for s in quarantined for e, (target, _) in TABLE[s].items() if target not in quarantined}
    assert ends == {VersionEvent.LOADED, VersionEvent.LOADED_OLDER, VersionEvent.REPLACED}
    begins = {e for s in STATES[:4] for e, (target, _) in TABLE[s].items() if target in quarantined}
    assert begins == {VersionEvent.FAILED, VersionEvent.OVERDUE}
    for state in STATES:
        assert TABLE[state][VersionEvent.RECONNECTED][0] is state
        assert TABLE[state][VersionEvent.REPLACED][0] is VersionState.IDLE
        assert VersionEvent.LOADED in TABLE[state], "a worker may say at any time what it has loaded"


@pytest.mark.parametrize(
    ("raised", "event"),
    [
        (lambda weights: weights.grant_turn(1.0), "turn granted"),
        (lambda weights: weights.expire("late", 1.0), "overdue"),
    ],
)
def test_an_event_that_must_not_happen_is_an_error_that_names_it_and_changes_nothing(raised: Any, event: str) -> None:
    weights = WorkerVersion()
    with pytest.raises(UnlistedTransition, match=f"'{event}' must not happen in state 'idle'"):
        raised(weights)
    assert weights == WorkerVersion()


# ---------------------------------------------------------------- what the table replaced


@dataclass
class Fields:
    """The fields as they were set before there was a table, assignment by assignment."""

    version: int = -1
    announced: int = -1
    announced_lineage: str = ""
    announced_writing: int = 0
    must_announce_again: bool = False
    quarantine: str = ""
    load_attempts: int = 0
    unloadable: int = -1
    retry_at_s: float = 0.0
    load_due_s: float = math.inf
    staged: int = -1
    has_turn: bool = False
    pin: EvalJob | None = None

    def end_load(self) -> None:
        self.staged, self.has_turn, self.load_due_s = -1, False, math.inf

    def announce(self, version: int, lineage: str, writing: int, *, due_s: float, retry_at_s: float) -> None:
        self.load_attempts = self.load_attempts + 1 if version == self.announced else 1
        self.announced, self.announced_lineage, self.announced_writing = version, lineage, writing
        self.must_announce_again = False
        self.retry_at_s = retry_at_s
        self.end_load()
        self.load_due_s = due_s

    def stage(self) -> None:
        self.staged, self.has_turn, self.load_due_s = self.announced, False, math.inf

    def grant_turn(self, due_s: float) -> None:
        self.has_turn, self.load_due_s = True, due_s

    def load(self, version: int) -> None:
        self.version = max(self.version, version)
        if self.version >= self.announced:
            self.end_load()
        elif self.quarantine and self.load_due_s == math.inf and self.staged == -1:
            self.must_announce_again = True  # the only change since: it was forgotten before
        self.quarantine, self.load_attempts, self.unloadable = "", 0, -1

    def fail(self, reason: str, retry_at_s: float) -> None:
        self.end_load()
        self.quarantine, self.retry_at_s = reason, retry_at_s

    def mark_unloadable(self, version: int) -> None:
        self.end_load()
        self.unloadable = max(self.unloadable, version)

    expire = fail

    def drain(self) -> None:
        self.end_load()

    def forget(self) -> None:
        self.version = self.announced = -1
        self.end_load()

    def replace(self) -> None:
        self.forget()
        self.quarantine, self.load_attempts, self.unloadable = "", 0, -1

    def reconnect(self) -> None:
        self.must_announce_again = True

    def offer_again(self) -> None:
        self.must_announce_again, self.load_attempts = True, 0

    def pin_to(self, job: EvalJob) -> None:
        self.pin = job

    def unpin(self) -> None:
        self.pin = None

    def is_possible(self, name: str) -> bool:
        """Whether the coordinator did this with such fields."""
        match name:
            case "grant_turn":
                return self.staged == self.announced != -1 and not self.has_turn
            case "expire":
                return self.load_due_s < math.inf
            case "pin_to":
                return not self.quarantine
            case "stage":
                return self.announced >= 0 and not self.has_turn
        return True


EVENTS = (
    "announce", "announce", "stage", "stage", "grant_turn", "grant_turn", "load", "load", "fail", "mark_unloadable",
    "expire", "drain", "forget", "replace", "reconnect", "offer_again", "pin_to", "unpin",
)  # fmt: skip


def arguments(name: str, number: int, announced: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the coordinator passes: it never announces less than before, nor takes more as loaded than announced."""
    match name:
        case "announce":
            return (max(0, announced) + number % 2, f"l{number}", number), {"due_s": number + 9.0, "retry_at_s": 5.0}
        case "grant_turn":
            return (number + 20.0,), {}
        case "load":
            return (max(-1, announced - number),), {}
        case "fail" | "expire":
            return (f"broken {number}", number + 2.0), {}
        case "mark_unloadable":
            return (announced,), {}
        case "pin_to":
            return (JOB,), {}
    return (), {}


def differences(history: list[tuple[str, int]]) -> None:
    """Replay events on both; raises AssertionError where they differ."""
    weights, fields = WorkerVersion(), Fields()
    for name, number in history:
        given, named = arguments(name, number, fields.announced)
        if not fields.is_possible(name):
            if name != "stage":  # such a message is refused before (version_rollout.py)
                with pytest.raises(UnlistedTransition):
                    getattr(weights, name)(*given, **named)
            continue
        getattr(weights, name)(*given, **named)
        getattr(fields, name)(*given, **named)
        facts = {key: getattr(weights, key) for key in Fields.__dataclass_fields__ if key != "staged"}
        facts["staged"] = weights.announced if weights.is_staged or weights.has_turn else -1
        assert Fields(**facts) == fields, f"after {name}"
        check_version(weights)


HISTORY = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 2)), max_size=40)


@settings(max_examples=num_examples(500), deadline=None)
@given(HISTORY)
def test_any_history_leaves_the_fields_as_the_assignments_did_that_the_table_replaced(
    history: list[tuple[str, int]],
) -> None:
    differences(history)


def reached() -> dict[VersionState, list[tuple[str, int]]]:
    """A history that leads to each state."""
    found: dict[VersionState, list[tuple[str, int]]] = {VersionState.IDLE: []}
    todo = [VersionState.IDLE]
    while todo:
        history = found[todo.pop(0)]
        for name in dict.fromkeys(EVENTS):
            weights = WorkerVersion()
            for one, number in [*history, (name, 0)]:
                given, named = arguments(one, number, weights.announced)
                try:
                    getattr(weights, one)(*given, **named)
                except UnlistedTransition:
                    break
            else:
                if weights.state not in found and weights.announced >= 0:
                    found[weights.state] = [*history, (name, 0)]
                    todo.append(weights.state)
    return found


def test_every_event_in_every_state_leaves_the_fields_as_before() -> None:
    histories = reached()
    assert set(histories) == set(STATES)
    for history in histories.values():
        for name in dict.fromkeys(EVENTS):
            for number in (0, 1):
                differences([*history, (name, number), ("announce", 0), ("stage", 0), ("load", 0)])


PAIRS = [(state, event) for state, row in TABLE.items() for event in row]


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda one: one.name)
def test_another_next_state_or_a_missing_action_is_caught(
    state: VersionState, event: VersionEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants of every entry of the table. To stop a deadline where there is none is the only action without effect."""
    target, actions = TABLE[state][event]
    others = [(other, actions) for other in STATES if other is not target]
    needed = [one for one in actions if one is not VersionAction.STOP_DEADLINE or state in EXPECTED]
    shorter = [(target, tuple(one for one in actions if one is not action)) for action in needed]
    for mutant in (*others, *shorter):
        monkeypatch.setitem(TABLE[state], event, mutant)
        with pytest.raises((AssertionError, UnlistedTransition, pytest.fail.Exception)):
            _every_history_through(state)


def _every_history_through(state: VersionState) -> None:
    for prefix in _HISTORIES[state]:
        for name in dict.fromkeys(EVENTS):
            for number in (0, 1):
                differences([*prefix, (name, number)])


_HISTORIES = {
    state: [
        history,
        [("reconnect", 0), *history],
        [("announce", 1), ("announce", 1), ("drain", 0), *history],
        [("announce", 0), ("announce", 0), ("mark_unloadable", 0), ("drain", 0), *history],
        [*history, ("reconnect", 0)],
        [*history, ("mark_unloadable", 0), *history],
        [("pin_to", 0), *history],
    ]
    for state, history in reached().items()
}
"""Histories that lead to each state, with other fields set as well."""


def test_a_worker_without_an_announcement_has_nothing_staged_and_no_turn() -> None:
    weights = WorkerVersion()
    assert (weights.is_staged, weights.has_turn, weights.load_due_s) == (False, False, math.inf)
