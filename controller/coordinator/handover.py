"""The handover of devices that engines and trainer share (`placement: colocated`), as two transition tables.

Owns: the states, the events, and what follows from each pair. Pure: no clock, no memory, no I/O. A pair that is not
listed raises `UnlistedTransition` (transitions.py).
Refuses: when an event has happened, and carrying out an action (both are colocation.py's).

`TURNS` says whose turn it is to use the devices:

    SETUP      a trainer starts, for the first time or again: it may use the devices until it has published a version
    ENGINES    versions may be announced, which makes engines take memory, and samples leased
    RELEASING  a batch is held back until no engine has memory; nothing is announced or leased
    TRAINER    the trainer has the batch, and with it the devices until it has published its version

    SETUP --PUBLISHED--> ENGINES --BATCH_READY--> RELEASING --ENGINES_EMPTY--> TRAINER --PUBLISHED--> ENGINES
                            ^---------TRAINER_DIED---'         SETUP <--TRAINER_DIED--'

`ENGINE` says what is known of one worker's engine:

    EMPTY      it has no memory, and nothing is on its way to it that would make it take any
    HOLDING    a version was announced to this process: it has memory, or will take it at any time
    RELEASING  it was asked to release; its answer with the number of that request is awaited
    ENDING     it did not answer in time: its process is to be ended

Each request to release has a number of its own, and the answer carries it. An answer with another number than that of
the last request is LATE_RELEASE: the engine may have taken memory since. From the moment it is asked, a worker has no
version, so it gets no leases, and it is announced none before it is EMPTY. That holds whatever happens to the trainer.

A worker that is out of reach may be alive, so its engine keeps its state; it is asked (again) once it sends something.
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
    """What can happen to the turn."""

    BATCH_READY = "batch ready"
    """The batch of a step that the trainer asks for is settled; no lease runs and no evaluation needs an engine."""
    BATCH_AGAIN = "batch again"
    """The trainer asks again for the batch of this very turn: it may not have received it."""
    ENGINES_EMPTY = "engines empty"
    PUBLISHED = "published"
    """The trainer has released its memory and announced the version it had copied before."""
    TRAINER_DIED = "trainer died"


class TurnAction(Enum):
    """What the coordinator does then."""

    HOLD_BATCH = "hold batch"
    SEND_BATCH = "send batch"
    DROP_BATCH = "drop batch"
    """It was meant for a trainer that is dead; the next one asks for what it needs."""


class Engine(Enum):
    """What is known of one engine's memory."""

    EMPTY = "empty"
    HOLDING = "holding"
    RELEASING = "releasing"
    ENDING = "ending"


class EngineEvent(Enum):
    """What can happen to one engine."""

    ANNOUNCED = "announced"
    """A version is sent to it."""
    WANTED = "wanted"
    """The devices are to go to the trainer, and the worker can be reached."""
    RELEASED = "released"
    """It answered the last request."""
    LATE_RELEASE = "late release"
    """It answered an earlier request, or none."""
    OVERDUE = "overdue"
    """The time to release is over."""
    BACK = "back"
    """The same process, after it was out of reach: what was sent to it may be lost."""
    ENDED = "ended"
    """Its process is gone, or a new one of the same name has come."""


class EngineAction(Enum):
    """What the coordinator does then."""

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
        # A trainer that starts again loads into host memory, so the engines keep the devices.
        TurnEvent.PUBLISHED: (Turn.ENGINES, ()),
        TurnEvent.TRAINER_DIED: (Turn.ENGINES, ()),
    },
    Turn.RELEASING: {
        TurnEvent.BATCH_AGAIN: (Turn.RELEASING, (TurnAction.HOLD_BATCH,)),
        # Of an older step than that of the held batch; it is announced in the engines' next turn.
        TurnEvent.PUBLISHED: (Turn.RELEASING, ()),
        TurnEvent.ENGINES_EMPTY: (Turn.TRAINER, (TurnAction.SEND_BATCH,)),
        TurnEvent.TRAINER_DIED: (Turn.ENGINES, (TurnAction.DROP_BATCH,)),
    },
    Turn.TRAINER: {
        # No BATCH_READY: while it replays, the next batch is known already, but the version of this one is to be
        # published first. With both at hand it would take the devices again while the engines take them.
        TurnEvent.BATCH_AGAIN: (Turn.TRAINER, (TurnAction.SEND_BATCH,)),
        TurnEvent.PUBLISHED: (Turn.ENGINES, ()),
        # The system may still be freeing the dead process's memory; its successor starts after that.
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
