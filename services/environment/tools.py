"""The environment `tools`: runs the tools that a policy calls, and answers each call with a text.

Rewards come from the scorers of the last answer (workflow `tools`). Calls are parsed in rollout/chat; tools are defined
in areal_like/tools.py.

The calls of one turn share a deadline and run in order. A call that fails is answered with the error message, from
which the policy can learn, and the episode continues. A tool that is not `async` is interrupted by a signal, which
stops Python code; if it hangs in a native library, its process is killed after `step_timeout_s`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from areal_like.tools import Tool, WrongArguments, by_name, load_tools
from services.environment.config import CALL_TIMEOUT_S, MAX_RESULT_CHARS, MAX_TOOL_CALLS
from services.environment.interruption import CallTimedOut, interrupted
from services.environment.mcp_servers import McpServer

WHERE = "reward.environment.options"
EXAMPLE = 'tools: ["my_tools:search"]'
CUT_MARK = "\n[... {num} characters omitted]"
"""Appended to a result that was truncated."""
FAILURES = ("malformed", "unknown", "wrong_arguments", "raised", "timed_out")
"""Kinds of failed calls, each counted in the component `tool_KIND`."""
BUILT_IN_TOOLS = {"python": "services.reward.python_tool:python_tool"}
"""Factories of the built-in tools, by name."""


class ToolEnvironment:
    """Runs tools. Created for each episode, with `reward.environment.options`."""

    def __init__(
        self,
        *,
        tools: Sequence[str] = (),
        mcp: Mapping[str, Any] | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_calls: int = MAX_TOOL_CALLS,
        max_result_chars: int = MAX_RESULT_CHARS,
    ) -> None:
        """Args:
            tools: built-in tools, and import paths (`module:FUNCTION`) of functions, `Tool`s, or lists of these.
            mcp: MCP servers by name, each `{command: [PROGRAM, ARGUMENT, ...], env: {...}}` or `{url: ADDRESS}`.
            call_timeout_s: longest call, and longest time of all calls of a turn together; below `step_timeout_s`.
            max_calls: largest number of calls of one turn; further ones are answered as failed. max_result_chars: a
                longer result is truncated and marked. All results of a turn together are bounded by
                `max_observation_kb`, in UTF-8: `max_calls` of this length must fit it.

        Raises:
            UserError: a tool that cannot be used, or an invalid bound.
        """
        if isinstance(tools, str) or not (tools or mcp):
            what = f"`tools` must be a {'list' if mcp else 'non-empty list'}, not {tools!r}"
            raise UserError(what, where=WHERE, remedy=f"write, for example, {EXAMPLE}{'' if mcp else '; or set mcp'}")
        if not isinstance(tools, list | tuple) or not all(isinstance(one, str) for one in tools):
            raise UserError(
                f"`tools` must be a list of names, not {tools!r}", where=WHERE, remedy=f"write, for example, {EXAMPLE}"
            )
        if mcp is not None and not isinstance(mcp, Mapping):
            kind = type(mcp).__name__  # a value may contain a key
            remedy = "write a mapping of names to servers, for example {archive: {url: ...}}"
            raise UserError(f"`mcp` must be a mapping, not {kind}", where=WHERE, remedy=remedy)
        _check_bounds(call_timeout_s, {"max_calls": max_calls, "max_result_chars": max_result_chars})
        self._call_timeout_s, self._max_calls, self._max_result_chars = call_timeout_s, max_calls, max_result_chars
        self._tools = dict(_loaded(tuple(tools)))
        self._servers = _servers(msgspec.json.encode(mcp or {}))
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Step:
        """Declare the tools. Raises McpFailed if a server cannot be used."""
        offered = [tool for server in self._servers for tool in await server.tools()]
        self._tools = by_name([*self._tools.values(), *offered], f"{WHERE}.mcp")
        return Step(tools=tuple(tool.declaration for tool in self._tools.values()))

    async def step(self, action: tuple[ToolCall, ...]) -> Step:
        """Run the calls of one turn."""
        if isinstance(action, str):
            raise TypeError("the environment `tools` accepts tool calls, not text; set rollout.workflow: tools")
        started_s = time.monotonic()
        results = []
        for number, call in enumerate(action, 1):
            self._counts["calls"] += 1
            left_s = self._call_timeout_s - (time.monotonic() - started_s)
            if number > self._max_calls:
                results.append(self._failed("malformed", "too many calls in one turn"))
            else:
                results.append(self._shortened(await self._answer(call, left_s)))
        self._seconds += time.monotonic() - started_s
        names = ("calls", *FAILURES, "truncated")
        counts = {f"tool_{name}": float(self._counts[name]) for name in names}
        return Step(results=tuple(results), components={**counts, "tool_s": self._seconds})

    async def _answer(self, call: ToolCall, left_s: float) -> str:
        """The result of a call for the policy. Exceptions of the tool are not raised."""
        if call.fault:
            return self._failed("malformed", f"the call cannot be read: {call.fault}")
        tool = self._tools.get(call.name)
        if tool is None:
            return self._failed(
                "unknown", f"there is no tool {call.name!r}; the available tools are {', '.join(self._tools)}"
            )
        if left_s <= 0:
            return self._late()
        try:
            returned = interrupted(lambda: tool.run(json.loads(call.arguments)), left_s)
            if inspect.isawaitable(returned):
                async with asyncio.timeout(left_s):
                    returned = await returned
            return returned if isinstance(returned, str) else msgspec.json.encode(returned, enc_hook=str).decode()
        except WrongArguments as error:
            return self._failed("wrong_arguments", f"the arguments of {call.name} are wrong: {error}")
        except (TimeoutError, CallTimedOut):
            return self._late()
        except Exception as error:  # the user's code; the policy sees the exception
            return self._failed("raised", f"{call.name} failed ({type(error).__name__}: {error})")

    def _late(self) -> str:
        return self._failed("timed_out", f"the tool returned no result within {self._call_timeout_s:g} s")

    def _failed(self, kind: str, words: str) -> str:
        self._counts[kind] += 1
        return f"Error: {words}"

    def _shortened(self, result: str) -> str:
        num_over = len(result) - self._max_result_chars
        if num_over <= 0:
            return result
        self._counts["truncated"] += 1
        return result[: self._max_result_chars] + CUT_MARK.format(num=num_over)


def _check_bounds(call_timeout_s: Any, counts: Mapping[str, Any]) -> None:
    """Raise UserError for a bound that is not positive, or of another type."""
    is_number = isinstance(call_timeout_s, int | float) and not isinstance(call_timeout_s, bool)
    if not is_number or not 0 < call_timeout_s < math.inf:
        raise UserError(
            f"call_timeout_s must be a finite number of seconds greater than 0, not {call_timeout_s!r}", where=WHERE
        )
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}", where=WHERE)


@lru_cache(maxsize=4)
def _loaded(names: tuple[str, ...]) -> Mapping[str, Tool]:
    """Loaded once for all episodes of a process."""
    return load_tools(names, BUILT_IN_TOOLS, f"{WHERE}.tools")


@lru_cache(maxsize=4)
def _servers(specs: bytes) -> tuple[McpServer, ...]:
    """Loaded once for all episodes of a process."""
    named = msgspec.json.decode(specs)
    return tuple(McpServer(name, spec, f"{WHERE}.mcp.{name}") for name, spec in named.items())
