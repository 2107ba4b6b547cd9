"""Transition tables: (state, event) gives the next state and the actions; a pair that is not listed is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Action = TypeVar("Action", bound=Enum)


class UnlistedTransition(AssertionError):
    """An event was raised in a state in which it must not occur, which is a bug in the caller."""


def transition(
    table: Mapping[State, Mapping[Event, tuple[State, tuple[Action, ...]]]], state: State, event: Event
) -> tuple[State, tuple[Action, ...]]:
    """Look up the next state and the actions. Raises UnlistedTransition."""
    try:
        return table[state][event]
    except KeyError:
        kind = type(state).__name__.lower()
        raise UnlistedTransition(f"{event.value!r} must not happen in state {state.value!r} of {kind}") from None
