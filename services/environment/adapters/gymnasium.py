"""The environment `gymnasium`: an environment of the `gymnasium` package whose actions a policy can write.

It converts texts to actions and observations to texts. Only the action spaces `Text` and `Discrete` are supported, and
no images.

An observation that is text is shown unchanged, others as rendered in the mode `ansi` if there is one, otherwise as
JSON. A text that is not an action is answered with the available actions, and does not count as a step of the
environment.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from areal_like.environment import Step
from areal_like.errors import UserError
from services.environment.adapters.actions import OPTIONS, ActionPattern, check_mapping, require

Observe = Literal["auto", "drawing", "values"]
_COLOURED = re.compile(r"(?:\x1b\[(?!0m)[0-9;]+m)+(.*?)(?:\x1b\[0m)+", re.DOTALL)
"""Escape sequences of colours, with which renderings mark positions, such as the agent's."""
MAX_LISTED = 20
"""Largest number of actions that an answer lists."""


class GymnasiumEnvironment:
    """One episode."""

    def __init__(
        self, *, id: str, make: Mapping[str, Any] | None = None, actions: Sequence[str] | None = None,
        pattern: str | None = None, observe: Observe = "auto", correct_at: float | None = None,
    ) -> None:  # fmt: skip
        """Args:
            id: as for `gymnasium.make`; `module:Name-v0` imports the module first.
            make: keyword arguments of `gymnasium.make`.
            actions: names of the actions of a `Discrete` space, in order; None: their numbers.
            pattern: a regular expression that finds the action in a turn; None: the whole turn.
            observe: `drawing`: the mode `ansi`. `values`: the observation. `auto`: see the module.
            correct_at: sum of rewards from which an episode counts as `correct`; None: if `info` has `is_success`.

        Raises:
            UserError: gymnasium is missing, the environment cannot be created, or its actions cannot be written.
        """
        require("gymnasium", "gymnasium", "gymnasium")
        if observe not in ("auto", "drawing", "values"):
            what = f"observe must be auto, drawing or values, not {observe!r}"
            raise UserError(what, where=f"{OPTIONS}.observe")
        self._pattern, self._correct_at = ActionPattern(pattern), correct_at
        self._environment, self._is_drawn = _made(id, check_mapping("make", make), observe)
        self._spaces = importlib.import_module("gymnasium.spaces")
        self._names = self._action_names(id, actions)
        self._sum, self._num_invalid = 0.0, 0

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Begin; the row is not used."""
        observation, _ = self._environment.reset(seed=seed)
        return self._text(observation)

    def step(self, action: str) -> Step:
        """Take the action in a text."""
        found = self._pattern.find(action)
        taken = None if found is None else self._as_action(found)
        if taken is None:
            self._num_invalid += 1
            shown = f"{found[:100]!r} is no action" if found is not None else "There is no action"
            return Step(observation=f"{shown}. {self._known()}", components=self._parts({}, is_truncated=False))
        observation, reward, is_terminated, is_truncated, info = self._environment.step(taken)
        self._sum += float(reward) if isinstance(reward, int | float | np.number) else 0.0
        return Step(
            observation=self._text(observation),
            reward=reward,
            is_done=is_truncated
            or is_terminated,  # unchanged: values that are not booleans are rejected by the check of steps
            components=self._parts(info, is_truncated=bool(is_truncated)),
        )

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _action_names(self, name: str, actions: Sequence[str] | None) -> list[str] | None:
        """Names of the actions of a discrete space; None for a text space."""
        space = self._environment.action_space
        if isinstance(space, self._spaces.Text):
            if actions is not None:
                what = f"{name} has a text action space, so its actions cannot be listed"
                raise UserError(what, where=f"{OPTIONS}.actions", remedy="remove this option")
            return None
        if not isinstance(space, self._spaces.Discrete):
            what = (
                f"the action space of {name} is {space}, which is not supported because its actions cannot be written "
                "as text"
            )
            raise UserError(
                what, where=f"{OPTIONS}.id", remedy="use an environment with a Text or Discrete action space"
            )
        if actions is None:
            return [str(space.start + number) for number in range(space.n)]
        if isinstance(actions, str) or len(actions) != space.n or len({str(one).lower() for one in actions}) != space.n:
            what = f"{name} has {space.n} actions, but {actions!r} does not list each of them once"
            raise UserError(what, where=f"{OPTIONS}.actions", remedy=f"use a list of {space.n} different names")
        return [str(one) for one in actions]

    def _as_action(self, text: str) -> Any:
        if self._names is None:
            return text if self._environment.action_space.contains(text) else None
        wanted = text.lower()
        places = (place for place, name in enumerate(self._names) if name.lower() == wanted)
        place = next(places, None)
        return None if place is None else self._environment.action_space.start + place

    def _known(self) -> str:
        if self._names is None:
            return "Write a text that the environment accepts."
        more = ", ..." if len(self._names) > MAX_LISTED else ""
        return f"The actions are {', '.join(self._names[:MAX_LISTED])}{more}."

    def _text(self, observation: Any) -> str:
        if self._is_drawn:
            return _COLOURED.sub(r"[\1]", self._environment.render()).strip()
        return observation if isinstance(observation, str) else json.dumps(_plain(observation))

    def _parts(self, info: Mapping[str, Any], *, is_truncated: bool) -> dict[str, float]:
        parts = {"invalid_actions": float(self._num_invalid), "truncated": float(is_truncated)}
        if "is_success" in info:
            parts["correct"] = float(bool(info["is_success"]))
        elif self._correct_at is not None:
            parts["correct"] = float(self._sum >= self._correct_at)
        return parts


def _plain(value: Any) -> Any:
    """Convert an observation to JSON types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _made(name: str, arguments: Mapping[str, Any], observe: Observe) -> tuple[Any, bool]:
    """Create the environment; returns it and whether its observations are rendered. Raises UserError."""
    gymnasium = importlib.import_module("gymnasium")
    try:
        made = gymnasium.make(name, disable_env_checker=True, **arguments)
        is_text = isinstance(made.observation_space, gymnasium.spaces.Text)
        can_draw = "ansi" in made.metadata.get("render_modes", ())
        is_drawn = observe == "drawing" or (observe == "auto" and can_draw and not is_text)
        if is_drawn and can_draw and made.render_mode != "ansi":
            made.close()
            made = gymnasium.make(name, disable_env_checker=True, **{**arguments, "render_mode": "ansi"})
    except Exception as error:  # the environment's own code
        reason = (str(error).strip().splitlines() or [""])[0]
        what = f"{name} cannot be created ({type(error).__name__}: {reason})"
        raise UserError(what, where=OPTIONS, remedy="correct the option `id` or `make`") from error
    if is_drawn and not can_draw:
        what = f"{name} does not support the render mode ansi"
        raise UserError(what, where=f"{OPTIONS}.observe", remedy="observe: values")
    return made, is_drawn
