"""The environment `textarena`: a game for one player of the package textarena.

The wrappers that repeat the whole game in every observation are left out, because the policy has earlier turns in its
context. Games use the global generators of `random` and NumPy at any step: each episode has separate generator states,
which are set for its calls, so that episodes of one process are independent and can be replayed.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from areal_like.environment import Step
from areal_like.errors import UserError
from services.environment.adapters.actions import OPTIONS, check_mapping, require

MAX_SEED = 2**31
"""Largest seed of NumPy's generators."""


class TextArenaEnvironment:
    """One game."""

    def __init__(self, *, id: str, game: Mapping[str, Any] | None = None, correct_at: float = 1.0) -> None:
        """Args:
            id: name of the game, such as `GuessTheNumber-v0`. game: keyword arguments of the game's class, such as
                {max_number: 50}.
            correct_at: reward from which a game counts as won (`correct`).

        Raises:
            UserError: textarena is missing, or the game cannot be created.
        """
        require("textarena", "textarena", "textarena")
        self._id, self._arguments, self._correct_at = id, check_mapping("game", game), correct_at
        self._state: Any = None
        with self._own_random():
            _check(id, json.dumps(self._arguments, sort_keys=True, default=repr), self._arguments)
            self._game = _made(id, self._arguments)

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin a game."""
        with self._own_random():
            random.seed(seed)
            np.random.seed(seed % MAX_SEED)
            self._game.reset(num_players=1, seed=seed % MAX_SEED)
            return self._news()

    def step(self, action: str) -> Step:
        """Make a move; the last move has the game's reward."""
        with self._own_random():
            is_done, _ = self._game.step(action=action)
            if not is_done:
                return Step(observation=self._news(), is_done=is_done)
            rewards, infos = self._game.close()
        # A game without a reward is a failure, not a reward of 0: the check of steps rejects None.
        reward = (rewards or {}).get(0)
        info = (infos or {}).get(0) or {}
        parts = {"invalid_move": float(bool(info.get("invalid_move")))}
        if isinstance(reward, int | float):
            parts["correct"] = float(reward >= self._correct_at)
        return Step(reward=reward, is_done=is_done, components=parts)  # type: ignore[arg-type]

    def _news(self) -> str:
        """The game's messages since the last move, without the move itself."""
        player, messages = self._game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player).strip()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate(), np.random.get_state()
        if self._state is not None:
            _set_random(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            _set_random(others)


def _set_random(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


_CHECKED: set[tuple[str, str]] = set()
"""Games that can be played in this process."""


def _check(name: str, written: str, arguments: Mapping[str, Any]) -> None:
    """Start a game once, to check it. `written`: the arguments as text. Raises UserError."""
    if (name, written) in _CHECKED:
        return
    game = _made(name, arguments)
    try:
        game.reset(num_players=1, seed=0)
    except Exception as error:  # the game's own code, which often raises AssertionError
        what = f"{name} cannot be started with one player ({_first_line(error)})"
        remedy = "choose a game for one player, for example GuessTheNumber-v0"
        raise UserError(what, where=f"{OPTIONS}.id", remedy=remedy) from error
    _CHECKED.add((name, written))


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if any(map(str.isalnum, line))]
    return f"{type(error).__name__}: {''.join(lines[:1]).strip()}"


def _made(name: str, arguments: Mapping[str, Any]) -> Any:
    """Create the game without wrappers of its observations. Raises UserError."""
    textarena = importlib.import_module("textarena")
    registered = textarena.envs.registration.ENV_REGISTRY
    if name not in registered:
        import difflib

        near = difflib.get_close_matches(str(name), registered, n=2)
        remedy = f"did you mean {' or '.join(near)}?" if near else "choose a game, for example GuessTheNumber-v0"
        raise UserError(f"textarena has no game {name!r}", where=f"{OPTIONS}.id", remedy=remedy)
    try:
        made = textarena.make(name, **arguments)
    except Exception as error:  # the game's own code, which may need data, a key, or other arguments
        what = f"{name} cannot be created ({_first_line(error)})"
        remedy = (
            "use a different game or different options.game; some games need downloaded word lists or the API key of a "
            "model"
        )
        raise UserError(what, where=OPTIONS, remedy=remedy) from error
    layers = []
    while isinstance(made, textarena.Wrapper):
        if not isinstance(made, textarena.ObservationWrapper):
            layers.append(made)
        made = made.env
    for layer in reversed(layers):
        layer.env = made
        made = layer
    return made
