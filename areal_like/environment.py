"""What an environment is: a port that users implement, and what crosses from it to a workflow.

Owns: `Environment`, `Action`, `Step`, checks of what an environment returned, digests of answers. Refuses: running one
(services/environment), the turns of an episode (rollout/episode.py, rollout/tool_episode.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from areal_like.tool_call import ToolCall

MAX_COMPONENTS = 64
"""Named numbers of one step."""
MAX_ACTION_CHARS = 1 << 20
"""Longest text of one turn that an environment is given."""
MAX_CALLS = 64
"""Calls of tools in one turn that an environment is given."""
MAX_TURNS = 4096
"""Steps of one episode."""
MAX_REWARD = 3.4e38
"""Largest reward of one step; training holds them as float32, in which a larger one is infinite."""


Action = str | tuple[ToolCall, ...]
"""What a policy did in one turn: its text, or with the workflow `tools` the calls in it, malformed ones included."""


def num_action_chars(action: Action) -> int:
    """Size of an action, which MAX_ACTION_CHARS bounds."""
    if isinstance(action, str):
        return len(action)
    return sum(len(call.name) + len(call.arguments) + len(call.fault) for call in action)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An environment's answer to one action, or to `reset`.

    observation: text that the policy sees next; empty: none. results: in answer to tool calls, a text for each, in the
    same order. tools: of `reset`, the tools that there are, each as chat templates take it (`Tool.declaration`).
    reward: of this turn alone, at most MAX_REWARD, 0 of `reset`; an episode's reward is the sum. is_done: the
    environment has ended the episode. components: named numbers for reports, of which those of the last step count; an
    evaluation averages `correct`.
    """

    observation: str = ""
    reward: float = 0.0
    is_done: bool = False
    components: dict[str, float] = {}
    results: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """Tells answers apart: when an episode is replayed, each must come again. Results of tools need not: what a
        policy was shown is in its transcript already."""
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

    def step(self, action: Action) -> Returned | Awaitable[Returned]:
        """Take one action.

        Args:
            action: what the policy wrote in this turn, without special tokens; with the workflow `tools` its calls.

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
    results, tools = _results(returned.results, max_bytes - len(encoded)), _tools(returned.tools, max_bytes)
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
        results=results,
        tools=tools,
    )


def _results(found: Any, max_bytes: int) -> tuple[str, ...]:
    if not isinstance(found, tuple | list) or not all(isinstance(one, str) for one in found):
        raise NoStep("its results are not a list of texts")
    encoded = [str.encode(one, "utf-8", "replace") for one in found]
    if (num_bytes := sum(map(len, encoded))) > max(max_bytes, 0):
        raise NoStep(f"its results have {num_bytes} bytes, more than {max_bytes}")
    return tuple(one.decode("utf-8") for one in encoded)


def _tools(found: Any, max_bytes: int) -> tuple[dict[str, Any], ...]:
    if not isinstance(found, tuple | list) or not all(isinstance(one, dict) for one in found):
        raise NoStep("its tools are not a list of dicts")
    try:
        encoded = msgspec.json.encode(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoStep(f"its tools are not JSON ({error})") from None
    if len(encoded) > max_bytes:
        raise NoStep(f"its tools have {len(encoded)} bytes, more than {max_bytes}")
    return tuple(msgspec.json.decode(encoded))


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
