"""The states of a weight version on one rollout worker, as one transition table.

Only this module sets fields of `WorkerVersion`. Other modules call its methods, each of which raises one event; `TABLE`
gives the next state and the actions, and a pair that is not listed raises `UnlistedTransition`. Events, deadlines in
seconds and messages are decided in version_rollout.py, worker_lifecycle.py, colocation.py, evaluation.py and
rewriting.py.

States. In the second four the worker is quarantined: it gets no leases until it has loaded a version.

    IDLE            nothing is expected: it has loaded the announced version, or none was announced yet
    LOADING         a version was announced; it must be staged or loaded within the deadline
    STAGED          it has the announced version on its host and waits for its turn, without a deadline
    SWAPPING        it has the turn, and must swap within the deadline
    QUARANTINED     as IDLE; the version is announced again from time to time, a bounded number of times
    RETRYING        as LOADING
    RETRY_STAGED    as STAGED
    RETRY_SWAPPING  as SWAPPING

Table. `-`: must not happen.

    event            IDLE            LOADING         STAGED          SWAPPING
    ANNOUNCED        LOADING         LOADING         LOADING         LOADING
    STAGED           STAGED          STAGED          STAGED          -
    TURN_GRANTED     -               -               SWAPPING        -
    LOADED           IDLE            IDLE            IDLE            IDLE
    LOADED_OLDER     IDLE            LOADING         STAGED          SWAPPING
    FAILED           QUARANTINED     QUARANTINED     QUARANTINED     QUARANTINED
    UNLOADABLE       IDLE            IDLE            IDLE            IDLE
    OVERDUE          -               QUARANTINED     -               QUARANTINED
    DRAINING         IDLE            IDLE            IDLE            IDLE
    MEMORY_RELEASED  IDLE            IDLE            IDLE            IDLE
    REPLACED         IDLE            IDLE            IDLE            IDLE
    RECONNECTED      IDLE            LOADING         STAGED          SWAPPING
    OFFERED_AGAIN    IDLE            LOADING         STAGED          SWAPPING
    PINNED           IDLE            LOADING         STAGED          SWAPPING
    UNPINNED         IDLE            LOADING         STAGED          SWAPPING

    event            QUARANTINED     RETRYING        RETRY_STAGED    RETRY_SWAPPING
    ANNOUNCED        RETRYING        RETRYING        RETRYING        RETRYING
    STAGED           RETRY_STAGED    RETRY_STAGED    RETRY_STAGED    -
    TURN_GRANTED     -               -               RETRY_SWAPPING  -
    LOADED           IDLE            IDLE            IDLE            IDLE
    LOADED_OLDER     IDLE            LOADING         STAGED          SWAPPING
    FAILED           QUARANTINED     QUARANTINED     QUARANTINED     QUARANTINED
    UNLOADABLE       QUARANTINED     QUARANTINED     QUARANTINED     QUARANTINED
    OVERDUE          -               QUARANTINED     -               QUARANTINED
    DRAINING         QUARANTINED     QUARANTINED     QUARANTINED     QUARANTINED
    MEMORY_RELEASED  QUARANTINED     QUARANTINED     QUARANTINED     QUARANTINED
    REPLACED         IDLE            IDLE            IDLE            IDLE
    RECONNECTED      QUARANTINED     RETRYING        RETRY_STAGED    RETRY_SWAPPING
    OFFERED_AGAIN    QUARANTINED     RETRYING        RETRY_STAGED    RETRY_SWAPPING
    PINNED           -               -               -               -
    UNPINNED         QUARANTINED     RETRYING        RETRY_STAGED    RETRY_SWAPPING

Questions and answers.

    Can a quarantined worker hold a turn?
        Yes (RETRY_SWAPPING): a worker that was late stages the version after all, and recovers by swapping it in.
    How does a quarantine end?
        Only by LOADED or LOADED_OLDER, or when another process takes the name (REPLACED).
    What is expected of a worker that loads an older version after the deadline of the announced one?
        That it loads the announced version, which is announced again with a new deadline. In IDLE nothing would be
        expected.
    Does a worker that waits for its turn have a deadline?
        No: it cannot influence when its turn comes, so OVERDUE is not listed for STAGED and RETRY_STAGED.
    Can a worker get a turn twice for one version?
        Yes, if the version is announced to it again. A repeated message that it has staged gives no second turn: it is
        ignored while the worker has the turn and when it has the version (version_rollout.py).
    Does a worker that cannot be reached keep its state?
        Yes: it may be alive. When it sends a message again, RECONNECTED repeats the announcement.
    Can a quarantined worker be pinned to an evaluation?
        No: the quarantine ends the pin at once (UNPINNED), so that the evaluation can go to another worker.
    Does the end of a quarantine forget attempts?
        Yes, and so does OFFERED_AGAIN, since the files are new; an announcement of the same version counts one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from areal_like.trajectory import NO_VERSION
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.transitions import transition


class VersionState(Enum):
    """State of a worker between the announcement of a version and its use."""

    IDLE = "idle"
    LOADING = "loading"
    STAGED = "staged"
    SWAPPING = "swapping"
    QUARANTINED = "quarantined"
    RETRYING = "retrying"
    RETRY_STAGED = "retry staged"
    RETRY_SWAPPING = "retry swapping"


class VersionEvent(Enum):
    """Events of a version on its way to one worker."""

    ANNOUNCED = "announced"
    """A version is announced to it: a newer one, or the same again."""
    STAGED = "staged"
    """It has the announced version complete and verified on its host."""
    TURN_GRANTED = "turn granted"
    LOADED = "loaded"
    """It samples with the announced version."""
    LOADED_OLDER = "loaded older"
    """It samples with an older version than the announced one, which is still on its way."""
    FAILED = "failed"
    """It cannot load the announced version, which is still needed."""
    UNLOADABLE = "unloadable"
    """It cannot load the version of the evaluation that it was pinned to; FAILED follows if that is the newest."""
    OVERDUE = "overdue"
    DRAINING = "draining"
    """It drains, so nothing is expected of it."""
    MEMORY_RELEASED = "memory released"
    """It has released its engine's memory and with it the version, or was requested to; or its process has exited."""
    REPLACED = "replaced"
    """Another process has taken the name."""
    RECONNECTED = "reconnected"
    """The same process can be reached again: announcements to it may be lost."""
    OFFERED_AGAIN = "offered again"
    """The files of the announced version were replaced."""
    PINNED = "pinned"
    """It must load the version of an evaluation and keep it."""
    UNPINNED = "unpinned"


class VersionAction(Enum):
    """What an event changes in addition to the state."""

    SET_ANNOUNCED = "set announced"
    SET_VERSION = "set version"
    START_DEADLINE = "start deadline"
    STOP_DEADLINE = "stop deadline"
    SET_QUARANTINE = "set quarantine"
    CLEAR_QUARANTINE = "clear quarantine"
    """The reason, the attempts, and the version that could not be loaded."""
    CLEAR_ATTEMPTS = "clear attempts"
    REPEAT_ANNOUNCEMENT = "repeat announcement"
    FORGET_VERSIONS = "forget versions"
    SET_UNLOADABLE = "set unloadable"
    SET_PIN = "set pin"
    CLEAR_PIN = "clear pin"


_S, _E, _A = VersionState, VersionEvent, VersionAction

_STATES = (_S.IDLE, _S.LOADING, _S.STAGED, _S.SWAPPING)
_QUARANTINED = (_S.QUARANTINED, _S.RETRYING, _S.RETRY_STAGED, _S.RETRY_SWAPPING)

_STAGED = (_S.STAGED, _S.RETRY_STAGED)
_SWAPPING = (_S.SWAPPING, _S.RETRY_SWAPPING)

_Row = tuple[VersionState | None, ...]

_ROWS: dict[VersionEvent, tuple[_Row, _Row, tuple[VersionAction, ...]]] = {
    _E.ANNOUNCED: ((_S.LOADING,) * 4, (_S.RETRYING,) * 4, (_A.SET_ANNOUNCED, _A.START_DEADLINE)),
    # Also from IDLE and QUARANTINED: the message may be late or arrive again.
    _E.STAGED: (
        (_S.STAGED, _S.STAGED, _S.STAGED, None),
        (_S.RETRY_STAGED, _S.RETRY_STAGED, _S.RETRY_STAGED, None),
        (_A.STOP_DEADLINE,),
    ),
    _E.TURN_GRANTED: (
        (None, None, _S.SWAPPING, None),
        (None, None, _S.RETRY_SWAPPING, None),
        (_A.START_DEADLINE,),
    ),
    _E.LOADED: ((_S.IDLE,) * 4, (_S.IDLE,) * 4, (_A.SET_VERSION, _A.STOP_DEADLINE, _A.CLEAR_QUARANTINE)),
    # It can load versions, so the quarantine ends, but the announced version is still expected: the deadline continues.
    _E.LOADED_OLDER: (_STATES, _STATES, (_A.SET_VERSION, _A.CLEAR_QUARANTINE)),
    # Also from IDLE: a worker that has the version may report that it has not.
    _E.FAILED: ((_S.QUARANTINED,) * 4, (_S.QUARANTINED,) * 4, (_A.STOP_DEADLINE, _A.SET_QUARANTINE)),
    _E.UNLOADABLE: ((_S.IDLE,) * 4, (_S.QUARANTINED,) * 4, (_A.STOP_DEADLINE, _A.SET_UNLOADABLE)),
    _E.OVERDUE: (
        (None, _S.QUARANTINED, None, _S.QUARANTINED),
        (None, _S.QUARANTINED, None, _S.QUARANTINED),
        (_A.STOP_DEADLINE, _A.SET_QUARANTINE),
    ),
    _E.DRAINING: ((_S.IDLE,) * 4, (_S.QUARANTINED,) * 4, (_A.STOP_DEADLINE,)),
    # A quarantine continues after the release: the same process may fail again with the next version.
    _E.MEMORY_RELEASED: ((_S.IDLE,) * 4, (_S.QUARANTINED,) * 4, (_A.FORGET_VERSIONS, _A.STOP_DEADLINE)),
    _E.REPLACED: ((_S.IDLE,) * 4, (_S.IDLE,) * 4, (_A.FORGET_VERSIONS, _A.STOP_DEADLINE, _A.CLEAR_QUARANTINE)),
    _E.RECONNECTED: (_STATES, _QUARANTINED, (_A.REPEAT_ANNOUNCEMENT,)),
    _E.OFFERED_AGAIN: (_STATES, _QUARANTINED, (_A.REPEAT_ANNOUNCEMENT, _A.CLEAR_ATTEMPTS)),
    _E.PINNED: (_STATES, (None,) * 4, (_A.SET_PIN,)),
    _E.UNPINNED: (_STATES, _QUARANTINED, (_A.CLEAR_PIN,)),
}
"""By event: the next state from each of the first four states and of the second four, and the actions."""

_ALSO = {(_S.QUARANTINED, _E.LOADED_OLDER): (_A.REPEAT_ANNOUNCEMENT,)}
"""Actions of single pairs. In these the deadline has passed: without another announcement nothing would be expected."""

TABLE: dict[VersionState, dict[VersionEvent, tuple[VersionState, tuple[VersionAction, ...]]]] = {
    state: {
        event: (following, (*actions, *_ALSO.get((state, event), ())))
        for event, (first, second, actions) in _ROWS.items()
        if (following := (*first, *second)[place]) is not None
    }
    for place, state in enumerate((*_STATES, *_QUARANTINED))
}


@dataclass(slots=True)
class WorkerVersion:
    """Versions of one worker. Read it anywhere; change it only through its methods.

    Example:
        >>> weights = WorkerVersion()
        >>> weights.announce(3, "l0", 0, due_s=120.0, retry_at_s=5.0)
        >>> weights.load(3)
        >>> weights.state, weights.version
        (<VersionState.IDLE: 'idle'>, 3)
    """

    state: VersionState = VersionState.IDLE
    version: int = NO_VERSION
    """Loaded."""
    announced: int = NO_VERSION
    """Newest version announced to this process."""
    announced_lineage: str = ""
    """Lineage of the trainer that published it."""
    announced_writing: int = 0
    """Number of rewrites of its files at that time."""
    must_announce_again: bool = False
    """The announcement must be repeated: it may have been lost during a silence, or its files were replaced."""
    quarantine: str = ""
    """Why it gets no new leases; empty: it does. Only non-empty in the second four states."""
    load_attempts: int = 0
    """Announcements of the same version so far."""
    retry_at_s: float = 0.0
    """Time after which the version is announced again to a quarantined worker."""
    load_due_s: float = math.inf
    """Deadline to stage the announced version, or to swap in the staged one; infinite: nothing is expected."""
    unloadable: int = NO_VERSION
    """Newest version it failed to load for an evaluation."""
    pin: EvalJob | None = None
    """The evaluation whose version it keeps; None in the second four states."""
    is_staged: bool = False
    """It waits for its turn to swap. Derived from the state, like `has_turn`; both are read for every worker after
    every event of a run with `swap: rolling`.
    """
    has_turn: bool = False
    """It has the turn to swap in the staged version."""

    # ------------------------------------------------------------ events

    def announce(self, version: int, lineage: str, writing: int, *, due_s: float, retry_at_s: float) -> None:
        """Record that this version, rewritten `writing` times, is announced to the worker."""
        self._happen(_E.ANNOUNCED, version=version, lineage=lineage, writing=writing, at_s=due_s)
        self.retry_at_s = retry_at_s

    def stage(self) -> None:
        """Record that it has the announced version on its host."""
        self._happen(_E.STAGED)

    def grant_turn(self, due_s: float) -> None:
        """Record that it is granted its turn to swap."""
        self._happen(_E.TURN_GRANTED, at_s=due_s)

    def load(self, version: int) -> None:
        """Record that it samples with this version. A late report does not revert a newer version."""
        is_reached = max(self.version, version) >= self.announced
        self._happen(_E.LOADED if is_reached else _E.LOADED_OLDER, version=version)

    def fail(self, reason: str, retry_at_s: float) -> None:
        """Quarantine it, because it cannot load the announced version."""
        self._happen(_E.FAILED, reason=reason, at_s=retry_at_s)

    def mark_unloadable(self, version: int) -> None:
        """Record that it cannot load the version of its evaluation."""
        self._happen(_E.UNLOADABLE, version=version)

    def expire(self, reason: str, retry_at_s: float) -> None:
        """Quarantine it, because the deadline has passed."""
        self._happen(_E.OVERDUE, reason=reason, at_s=retry_at_s)

    def drain(self) -> None:
        """Record that it drains."""
        self._happen(_E.DRAINING)

    def forget(self) -> None:
        """Record that it has no version, and that none is on its way to it."""
        self._happen(_E.MEMORY_RELEASED)

    def replace(self) -> None:
        """Record that another process has taken the name."""
        self._happen(_E.REPLACED)

    def reconnect(self) -> None:
        """Record that the same process can be reached again."""
        self._happen(_E.RECONNECTED)

    def offer_again(self) -> None:
        """Request another announcement of the version, as if for the first time."""
        self._happen(_E.OFFERED_AGAIN)

    def pin_to(self, job: EvalJob) -> None:
        """Record the evaluation whose version it must keep."""
        self._happen(_E.PINNED, job=job)

    def unpin(self) -> None:
        """Record that it follows the newest version again."""
        self._happen(_E.UNPINNED)

    def _happen(
        self,
        event: VersionEvent,
        *,
        version: int = NO_VERSION,
        lineage: str = "",
        writing: int = 0,
        reason: str = "",
        at_s: float = math.inf,
        job: EvalJob | None = None,
    ) -> None:
        self.state, actions = transition(TABLE, self.state, event)
        self.is_staged, self.has_turn = self.state in _STAGED, self.state in _SWAPPING
        for action in actions:
            match action:
                case VersionAction.SET_ANNOUNCED:
                    self.load_attempts = self.load_attempts + 1 if version == self.announced else 1
                    self.announced, self.announced_lineage, self.announced_writing = version, lineage, writing
                    self.must_announce_again = False
                case VersionAction.SET_VERSION:
                    self.version = max(self.version, version)
                case VersionAction.START_DEADLINE:
                    self.load_due_s = at_s
                case VersionAction.STOP_DEADLINE:
                    self.load_due_s = math.inf
                case VersionAction.SET_QUARANTINE:
                    self.quarantine, self.retry_at_s = reason, at_s
                case VersionAction.CLEAR_QUARANTINE:
                    self.quarantine, self.load_attempts, self.unloadable = "", 0, NO_VERSION
                case VersionAction.CLEAR_ATTEMPTS:
                    self.load_attempts = 0
                case VersionAction.REPEAT_ANNOUNCEMENT:
                    self.must_announce_again = True
                case VersionAction.FORGET_VERSIONS:
                    self.version = self.announced = NO_VERSION
                case VersionAction.SET_UNLOADABLE:
                    self.unloadable = max(self.unloadable, version)
                case VersionAction.SET_PIN:
                    self.pin = job
                case VersionAction.CLEAR_PIN:
                    self.pin = None
