"""What an environment is: a port that users implement, and what crosses from it to a workflow.

Owns: `Environment`, `Step`, checks of what an environment returned, digests of answers. Refuses: running one
(services/environment), the turns of an episode (rollout/episode.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

MAX_COMPONENTS = 64
"""Named numbers of one step."""
MAX_ACTION_CHARS = 1 << 20
"""Longest text of one turn that an environment is given."""
MAX_TURNS = 4096
"""Steps of one episode."""
MAX_REWARD = 3.4e38
"""Largest reward of one step; training holds them as float32, in which a larger one is infinite."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to one action, or to `reset`.

    observation: text that the policy sees next; empty: none. reward: of this turn alone, at most MAX_REWARD, 0 of
    `reset`; an episode's reward is the sum. is_done: the environment has ended the episode. components: named numbers
    for reports, of which those of the last step count; an evaluation averages `correct`.
    """

    observation: str = ""
    reward: float = 0.0
    is_done: bool = False
    components: dict[str, float] = {}

    @property
    def digest(self) -> str:
        """Tells answers apart: when an episode is replayed, each must come again."""
        words = msgspec.msgpack.encode((self.observation, self.reward, self.is_done))
        return hashlib.blake2b(words, digest_size=8).hexdigest()


Returned = Step | tuple[str, float, bool] | str | None


@runtime_checkable
class Environment(Protocol):
    """One episode. An object is made for each, with `reward.environment.options` as keyword arguments; its methods may
    be `async`. A method `close()`, where there is one, is called at the end.

    An environment must be deterministic: the same row, seed and actions give the same answers. An episode that lost its
    process is replayed in another one.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Returned | Awaitable[Returned]:
        """Begin.

        Args:
            row: the data row.
            seed: the same for all samples of a group, so that they begin alike.

        Returns:
            What the policy sees after its prompt: text, a `Step`, or None for nothing.
        """
        ...

    def step(self, action: str) -> Returned | Awaitable[Returned]:
        """Take one action.

        Args:
            action: what the policy wrote in this turn, without special tokens.

        Returns:
            (observation, reward, done), or a `Step`.
        """
        ...


class NoStep(ValueError):
    """An environment returned something that is no answer."""


def as_step(returned: Any, *, is_reset: bool, max_bytes: int) -> Step:
    """Check what a method of an environment returned.

    Args:
        returned: its value.
        is_reset: it came from `reset`, which may return text or None.
        max_bytes: longest observation, in UTF-8.

    Raises:
        NoStep: it is no answer; the text says why.

    Example:
        >>> as_step(("<", -0.1, False), is_reset=False, max_bytes=10).observation
        '<'
    """
    if is_reset and (returned is None or isinstance(returned, str)):
        returned = Step(observation=returned or "")
    if isinstance(returned, tuple) and len(returned) == 3:
        returned = Step(observation=returned[0], reward=returned[1], is_done=returned[2])
    if not isinstance(returned, Step):
        wanted = "text, a Step or None" if is_reset else "(observation, reward, done) or a Step"
        raise NoStep(f"returned {type(returned).__name__} instead of {wanted}")
    observation = "" if returned.observation is None else returned.observation
    if not isinstance(observation, str):
        raise NoStep(f"its observation is not text but {type(observation).__name__}")
    encoded = str.encode(observation, "utf-8", "replace")  # of a subclass as well
    if len(encoded) > max_bytes:
        raise NoStep(f"its observation has {len(encoded)} bytes, more than {max_bytes}")
    if is_reset and returned.is_done:
        raise NoStep("was done before the first action")
    if type(returned.is_done).__name__ not in ("bool", "bool_"):  # NumPy's as well; anything else may be a mistake
        raise NoStep(f"its done is not true or false but {type(returned.is_done).__name__}")
    reward = _number("reward", returned.reward)
    if abs(reward) > MAX_REWARD:
        raise NoStep(f"its reward {reward:g} is beyond float32, {MAX_REWARD:.2g}")
    if is_reset and reward:
        raise NoStep(f"gave a reward of {reward:g} before the first action, which no action earned")
    return Step(
        observation=encoded.decode("utf-8"),
        reward=reward,
        is_done=bool(returned.is_done),
        components=_components(returned.components),
    )


def _components(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise NoStep(f"its components are not a dict but {type(found).__name__}")
    if len(found) > MAX_COMPONENTS:
        raise NoStep(f"gave {len(found)} components, at most {MAX_COMPONENTS} are kept")
    pairs = [(str.encode(str(name), "utf-8", "replace").decode("utf-8"), value) for name, value in found.items()]
    return {name[:100]: _number(f"component {name[:40]!r}", value) for name, value in pairs}


def _number(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise NoStep(f"its {what} is not a finite number but {str(value)[:40]}")
    return number
