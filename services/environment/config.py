"""Settings of the environments that a reward service runs. Does not import torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from areal_like import limits
from areal_like.environment import MAX_CALLS
from areal_like.settings import Settings

BUILT_IN_ENVIRONMENTS = {
    "guess_number": "areal_like.tasks.guess_number:GuessNumber",
    "tool_sum": "areal_like.tasks.tool_sum:ToolSum",
    "tools": "services.environment.tools:ToolEnvironment",
    "openenv": "services.environment.adapters.openenv:OpenEnvEnvironment",
    "textarena": "services.environment.adapters.textarena:TextArenaEnvironment",
    "gymnasium": "services.environment.adapters.gymnasium:GymnasiumEnvironment",
    "reasoning_gym": "services.reward.scorers.reasoning_gym_attempts:ReasoningGymEnvironment",
}
"""Built-in environments by `kind`."""

CALL_TIMEOUT_S, MAX_TOOL_CALLS, MAX_RESULT_CHARS = 5.0, 4, 3500
"""Defaults of the environment `tools`: `call_timeout_s`, `max_calls`, `max_result_chars`."""
_MARK_BYTES = 64
"""Upper bound of the mark of a truncated result, and of the answer to a call beyond `max_calls`."""


class EnvironmentSettings(Settings):
    """The environment of episodes, and its processes."""

    kind: str
    """`guess_number`, `tool_sum`, `tools` (functions that a policy calls), `openenv`, `textarena`, `gymnasium`,
    `reasoning_gym` (tasks of these packages), or your own `module:Class`."""
    options: dict[str, Any] = Field({})
    """Keyword arguments of its constructor."""
    num_processes: int = Field(2, gt=0, le=limits.THREADS)
    """Number of processes among which episodes are divided; each runs many at once. If one is lost, the others
    continue."""
    step_timeout_s: float = Field(10.0, gt=0, le=limits.SECONDS)
    """Longest `reset` or `step`. A longer one is cancelled, or its process is killed; its verdict is `timed_out`, and
    other episodes of the process are replayed in another one."""
    retries: int = Field(1, ge=0, le=limits.STEPS)
    """Number of replays of an episode that hung or crashed its process, before that becomes its verdict."""
    close_timeout_s: float = Field(2.0, gt=0, le=limits.SECONDS)
    """Longest `close`; a longer one is interrupted. After three of these a process no longer calls `close`."""
    max_hangs: int = Field(4, ge=0, le=limits.STEPS)
    """Number of consecutive hangs of episodes of one row (without a successful one in between) after which the row is
    quarantined: its further episodes get the verdict `timed_out` at once. 0: never."""
    quarantine_s: float = Field(600.0, gt=0, le=limits.SECONDS)
    """Duration of a quarantine; after it, one more hang renews it."""
    max_episodes: int = Field(8192, gt=0, le=limits.GROUPS)
    """Number of episodes held at once. For a further one, the episode that has waited longest for its next action is
    evicted; it is replayed when it continues."""
    max_observation_kb: int = Field(64, gt=0, le=512)
    """Longest observation, kB of UTF-8; a longer one causes the verdict `invalid`."""
    max_memory_mb: int = Field(4096, gt=0, le=limits.MEGABYTES)
    """Resident memory of a process and its descendants; above it the process is killed, and the episode that used most
    of it fails."""
    max_episode_memory_mb: int = Field(512, gt=0, le=limits.MEGABYTES)
    """Memory by which a process may grow in the calls of one episode."""
    max_episode_files: int = Field(64, ge=0, le=limits.DEVICES)
    """Number of files and sockets that one episode may keep open."""
    recycle_after: int = Field(20_000, gt=0, le=limits.ROWS)
    """Number of episodes after which a process accepts no more, and exits with its last one."""

    @property
    def import_path(self) -> str:
        """`module:Class`."""
        return BUILT_IN_ENVIRONMENTS.get(self.kind, self.kind)

    @property
    def call_timeout_s(self) -> float | None:
        """The option of the environment `tools`; None for another environment or an invalid option."""
        value = self.options.get("call_timeout_s", CALL_TIMEOUT_S)
        return float(value) if self.kind == "tools" and isinstance(value, int | float) else None

    @property
    def max_turn_bytes(self) -> int | None:
        """Longest results of one turn of the environment `tools`: four bytes per character, and a mark for each result.
        None as for `call_timeout_s`."""
        num_calls = self.options.get("max_calls", MAX_TOOL_CALLS)
        num_chars = self.options.get("max_result_chars", MAX_RESULT_CHARS)
        if self.kind != "tools" or not isinstance(num_calls, int) or not isinstance(num_chars, int):
            return None
        return min(num_calls, MAX_CALLS) * 4 * num_chars + MAX_CALLS * _MARK_BYTES
