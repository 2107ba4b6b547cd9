"""The interface of environments that users implement, and the types that pass between an environment and a workflow.

Environments run in services/environment; the turns of an episode are in rollout/episode.py and rollout/tool_episode.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from areal_like.tool_call import ToolCall

MAX_COMPONENTS = 64
"""Largest number of components of one step."""
MAX_ACTION_CHARS = 1 << 20
"""Longest text of one turn that is passed to an environment."""
MAX_CALLS = 64
"""Largest number of tool calls in one turn that are passed to an environment."""
MAX_TURNS = 4096
"""Largest number of steps of one episode."""
MAX_REWARD = 3.4e38
"""Largest reward of one step; training stores rewards as float32, in which a larger one is infinite."""


Action = str | tuple[ToolCall, ...]
"""The policy's action in one turn: its text, or with the workflow `tools` its tool calls, including malformed ones."""


def num_action_chars(action: Action) -> int:
    """Size of an action, which MAX_ACTION_CHARS bounds."""
    if isinstance(action, str):
        return len(action)
    return sum(len(call.name) + len(call.arguments) + len(call.fault) for call in action)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to one action, or to `reset`.

    observation: text that the policy sees next; empty: none. results: the results of tool calls, one text for each, in
    the same order. tools: from `reset` only, the available tools in the form that chat templates take
    (`Tool.declaration`). reward: the reward of this turn, at most MAX_REWARD, and 0 for `reset`; an episode's reward is
    the sum. is_done: the environment has ended the episode. components: named numbers for reports; those of the last
    step count, and an evaluation averages `correct`.
    """

    observation: str = ""
    reward: float = 0.0
    is_done: bool = False
    components: dict[str, float] = {}
    results: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the step: when an episode is replayed, each step must have the same digest. Tool results are not
        included, because the results that the policy saw are already in its transcript."""
        words = msgspec.msgpack.encode((self.observation, self.reward, self.is_done))
        return hashlib.blake2b(words, digest_size=8).hexdigest()


Returned = Step | tuple[str, float, bool] | str | None


@runtime_checkable
class Environment(Protocol):
    """One episode. An object is created for each episode, with `reward.environment.options` as keyword arguments. Its
    methods may be `async`. If it has a method `close()`, that is called at the end.

    An environment must be deterministic: the same row, seed and actions give the same answers. An episode whose process
    is lost is replayed in another process.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Returned | Awaitable[Returned]:
        """Begin the episode.

        Args:
            row: the data row.
            seed: the same for all samples of a group, so that they begin in the same state.

        Returns:
            What the policy sees after its prompt: text, a `Step`, or None for nothing.
        """
        ...

    def step(self, action: Action) -> Returned | Awaitable[Returned]:
        """Take one action.

        Args:
            action: what the policy wrote in this turn, without special tokens; with the workflow `tools` its calls.

        Returns:
            (observation, reward, done), or a `Step`.
        """
        ...


class InvalidStep(ValueError):
    """An environment returned a value that is not a valid step."""


def as_step(returned: Any, *, is_reset: bool, max_bytes: int) -> Step:
    """Check the return value of a method of an environment.

    Args:
        returned: the value.
        is_reset: the method was `reset`, which may return text or None.
        max_bytes: longest observation, in UTF-8.

    Raises:
        InvalidStep: the value is not valid; the message says why.

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
        raise InvalidStep(f"returned {type(returned).__name__} instead of {wanted}")
    observation = "" if returned.observation is None else returned.observation
    if not isinstance(observation, str):
        raise InvalidStep(f"its observation is not text but {type(observation).__name__}")
    encoded = str.encode(observation, "utf-8", "replace")  # also for a subclass of str
    if len(encoded) > max_bytes:
        raise InvalidStep(f"its observation has {len(encoded)} bytes, more than {max_bytes}")
    results, tools = _results(returned.results, max_bytes - len(encoded)), _tools(returned.tools, max_bytes)
    if is_reset and returned.is_done:
        raise InvalidStep("is done before the first action")
    if type(returned.is_done).__name__ not in (
        "bool",
        "bool_",
    ):  # NumPy's bool is accepted; anything else may be a mistake
        raise InvalidStep(f"its `done` is not true or false but {type(returned.is_done).__name__}")
    reward = _number("reward", returned.reward)
    if abs(reward) > MAX_REWARD:
        raise InvalidStep(f"its reward {reward:g} is outside the range of float32 (at most {MAX_REWARD:.2g})")
    if is_reset and reward:
        raise InvalidStep(f"gave a reward of {reward:g} before the first action")
    return Step(
        observation=encoded.decode("utf-8"),
        reward=reward,
        is_done=bool(returned.is_done),
        components=_components(returned.components),
        results=results,
        tools=tools,
    )


def _results(found: Any, max_bytes: int) -> tuple[str, ...]:
    if not isinstance(found, tuple | list) or not all(isinstance(one, str) for one in found):
        raise InvalidStep("its results are not a list of strings")
    encoded = [str.encode(one, "utf-8", "replace") for one in found]
    if (num_bytes := sum(map(len, encoded))) > max(max_bytes, 0):
        raise InvalidStep(f"its results have {num_bytes} bytes, more than {max_bytes}")
    return tuple(one.decode("utf-8") for one in encoded)


def _tools(found: Any, max_bytes: int) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, tuple | list) or not all(isinstance(one, dict) for one in found):
        raise InvalidStep("its tools are not a list of dicts")
    try:
        encoded = msgspec.json.encode(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStep(f"its tools are not JSON ({error})") from None
    if len(encoded) > max_bytes:
        raise InvalidStep(f"its tools have {len(encoded)} bytes, more than {max_bytes}")
    return tuple(msgspec.json.decode(encoded))


def _components(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise InvalidStep(f"its components are not a dict but {type(found).__name__}")
    if len(found) > MAX_COMPONENTS:
        raise InvalidStep(f"returned {len(found)} components, but at most {MAX_COMPONENTS} are allowed")
    pairs = [(str.encode(str(name), "utf-8", "replace").decode("utf-8"), value) for name, value in found.items()]
    return {name[:100]: _number(f"component {name[:40]!r}", value) for name, value in pairs}


def _number(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidStep(f"its {what} is not a finite number but {str(value)[:40]}")
    return number
