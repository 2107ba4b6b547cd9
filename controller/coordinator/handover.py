"""The handover of devices that engines and trainer share (`placement: colocated`), as two transition tables.

Pure: no clock, no memory, no I/O. A pair of state and event that is not listed raises `UnlistedTransition`
(transitions.py). Events are raised and actions carried out in colocation.py.

`TURNS` says whose turn it is to use the devices:

    SETUP      a trainer starts, for the first time or again: it may use the devices until it has published a version
    ENGINES    versions may be announced, which makes engines take memory, and samples leased
    RELEASING  a batch is held back until no engine has memory; nothing is announced or leased
    TRAINER    the trainer has the batch, and with it the devices until it has published its version

    SETUP --PUBLISHED--> ENGINES --BATCH_READY--> RELEASING --ENGINES_EMPTY--> TRAINER --PUBLISHED--> ENGINES
                            ^---------TRAINER_DIED---'         SETUP <--TRAINER_DIED--'

`ENGINE` is the known state of one worker's engine:

    EMPTY      it has no memory, and no message is on its way that would make it allocate any
    HOLDING    a version was announced to this process: it has memory, or may allocate it at any time
    RELEASING  it was requested to release; its answer with the number of that request is awaited
    ENDING     it did not answer in time: its process will be ended

Each request to release has a unique number, which the answer contains. An answer with a different number than that of
the last request is LATE_RELEASE: the engine may have allocated memory since. From the request on, a worker has no
version, so it gets no leases, and no version is announced to it before it is EMPTY. This holds whatever happens to the
trainer.

A worker that cannot be reached may be alive, so its engine keeps its state; the request is sent (again) once it sends
a message.
"""

from __future__ import annotations

from enum import Enum


class Turn(Enum):
    """Whose turn it is to use the devices."""

    SETUP = "setup"
    ENGINES = "engines"
    RELEASING = "releasing"
    TRAINER = "trainer"


class TurnEvent(Enum):
    """Events of the turn."""

    BATCH_READY = "batch ready"
    """The batch of a step that the trainer requested is complete; no lease runs and no evaluation needs an engine."""
    BATCH_AGAIN = "batch again"
    """The trainer requests the batch of this turn again: it may not have received it."""
    ENGINES_EMPTY = "engines empty"
    PUBLISHED = "published"
    """The trainer has released its memory and announced the version, which it had copied before."""
    TRAINER_DIED = "trainer died"


class TurnAction(Enum):
    """Actions of the coordinator."""

    HOLD_BATCH = "hold batch"
    SEND_BATCH = "send batch"
    DROP_BATCH = "drop batch"
    """It was prepared for a trainer that is lost; the next trainer sends its own request."""


class Engine(Enum):
    """Known state of one engine's memory."""

    EMPTY = "empty"
    HOLDING = "holding"
    RELEASING = "releasing"
    ENDING = "ending"


class EngineEvent(Enum):
    """Events of one engine."""

    ANNOUNCED = "announced"
    """A version is sent to it."""
    WANTED = "wanted"
    """The trainer needs the devices, and the worker can be reached."""
    RELEASED = "released"
    """It answered the last request."""
    LATE_RELEASE = "late release"
    """It answered an earlier request, or no request."""
    OVERDUE = "overdue"
    """The deadline of the release has passed."""
    BACK = "back"
    """The same process can be reached again: messages sent to it may be lost."""
    ENDED = "ended"
    """Its process has exited, or a new process has taken its name."""


class EngineAction(Enum):
    """Actions of the coordinator."""

    REQUEST_RELEASE = "request release"
    """With a new number and a new deadline."""
    FORGET = "forget"
    """It has no version, and none is on its way to it."""
    END_PROCESS = "end process"
    REPORT_LATE = "report late"


TURNS: dict[Turn, dict[TurnEvent, tuple[Turn, tuple[TurnAction, ...]]]] = {
    Turn.SETUP: {
        TurnEvent.PUBLISHED: (Turn.ENGINES, ()),
        TurnEvent.TRAINER_DIED: (Turn.SETUP, ()),
    },
    Turn.ENGINES: {
        TurnEvent.BATCH_READY: (Turn.RELEASING, (TurnAction.HOLD_BATCH,)),
        # A restarted trainer loads into host memory, so the engines keep the devices.
        TurnEvent.PUBLISHED: (Turn.ENGINES, ()),
        TurnEvent.TRAINER_DIED: (Turn.ENGINES, ()),
    },
    Turn.RELEASING: {
        TurnEvent.BATCH_AGAIN: (Turn.RELEASING, (TurnAction.HOLD_BATCH,)),
        # From an older step than that of the held batch; it is announced in the engines' next turn.
        TurnEvent.PUBLISHED: (Turn.RELEASING, ()),
        TurnEvent.ENGINES_EMPTY: (Turn.TRAINER, (TurnAction.SEND_BATCH,)),
        TurnEvent.TRAINER_DIED: (Turn.ENGINES, (TurnAction.DROP_BATCH,)),
    },
    Turn.TRAINER: {
        # No BATCH_READY: while it replays, the next batch is already known, but the version of this one must be
        # published first. With both available it would use the devices again while the engines use them.
        TurnEvent.BATCH_AGAIN: (Turn.TRAINER, (TurnAction.SEND_BATCH,)),
        TurnEvent.PUBLISHED: (Turn.ENGINES, ()),
        # The system may still be freeing the memory of the exited process; its successor starts after that.
        TurnEvent.TRAINER_DIED: (Turn.SETUP, ()),
    },
}

_ENDED: tuple[Engine, tuple[EngineAction, ...]] = (Engine.EMPTY, (EngineAction.FORGET,))

ENGINE: dict[Engine, dict[EngineEvent, tuple[Engine, tuple[EngineAction, ...]]]] = {
    Engine.EMPTY: {
        EngineEvent.ANNOUNCED: (Engine.HOLDING, ()),
        EngineEvent.LATE_RELEASE: (Engine.EMPTY, (EngineAction.REPORT_LATE,)),
        EngineEvent.BACK: (Engine.EMPTY, ()),
        EngineEvent.ENDED: _ENDED,
    },
    Engine.HOLDING: {
        EngineEvent.ANNOUNCED: (Engine.HOLDING, ()),
        EngineEvent.WANTED: (Engine.RELEASING, (EngineAction.FORGET, EngineAction.REQUEST_RELEASE)),
        EngineEvent.LATE_RELEASE: (Engine.HOLDING, (EngineAction.REPORT_LATE,)),
        EngineEvent.BACK: (Engine.HOLDING, ()),
        EngineEvent.ENDED: _ENDED,
    },
    Engine.RELEASING: {
        EngineEvent.RELEASED: (Engine.EMPTY, ()),
        EngineEvent.LATE_RELEASE: (Engine.RELEASING, (EngineAction.REPORT_LATE,)),
        EngineEvent.OVERDUE: (Engine.ENDING, (EngineAction.END_PROCESS,)),
        EngineEvent.BACK: (Engine.RELEASING, (EngineAction.REQUEST_RELEASE,)),
        EngineEvent.ENDED: _ENDED,
    },
    Engine.ENDING: {
        EngineEvent.RELEASED: (Engine.EMPTY, ()),
        EngineEvent.LATE_RELEASE: (Engine.ENDING, (EngineAction.REPORT_LATE,)),
        EngineEvent.BACK: (Engine.RELEASING, (EngineAction.REQUEST_RELEASE,)),
        EngineEvent.ENDED: _ENDED,
    },
}
