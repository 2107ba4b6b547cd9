"""What differs between the servers of different engines, for the keeper and the attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from areal_like.wire.messages import Sampling
from rollout.engine.server.http import ServerClient

ClientT = TypeVar("ClientT", bound=ServerClient)


@dataclass(frozen=True)
class ModelFolder:
    """The folder that a server is started with, and the version of the weights in it (-1: none to load)."""

    folder: Path
    version: int


class ServerLimits(Protocol):
    """The settings of an engine's section by which its servers are watched; meanings in rollout/config.py."""

    @property
    def control_timeout_s(self) -> float: ...

    @property
    def load_timeout_s(self) -> float: ...

    @property
    def stall_timeout_s(self) -> float: ...

    @property
    def max_restarts(self) -> int: ...

    @property
    def restart_window_s(self) -> float: ...


@dataclass(frozen=True)
class ServerStart:
    """How one server process is started."""

    command: Sequence[str]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class AnswerRequest:
    """One attempt: `tokens` are the prompt and the answer so far, of which at most `max_new_tokens` more are sampled.

    `ticket` names it for `ServerClient.abort`. Prefixes may be shared by requests of equal `prefix_key`.
    """

    ticket: str
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    prefix_key: str


class ServerKind(Protocol[ClientT]):
    """Knows how the servers of one engine are started and called."""

    @property
    def title(self) -> str:
        """Name in messages."""
        ...

    @property
    def section(self) -> str:
        """Key of its settings, such as `rollout.engine.sglang`."""
        ...

    @property
    def scratch_prefix(self) -> str:
        """Prefix of the folders of its servers in the folder for temporary files."""
        ...

    @property
    def shared_memory(self) -> tuple[str, ...]:
        """Prefixes of the files in /dev/shm that its servers leave when they are killed."""
        ...

    def connect(self, url: str, key: str | None) -> ClientT:
        """A client of the server at that address. `key`: sent with every request; None: it requires none."""
        ...

    def plan_start(self, home: ModelFolder, scratch: Path, *, key: str, port: int, seed: int) -> ServerStart:
        """The command and the environment of a server that requires `key`; its files are in `scratch`."""
        ...

    async def prepare(self, client: ClientT, home: ModelFolder, *, is_launched: bool) -> bool:
        """Called once for each server, when it responds: bring it to the version of `home`. Returns whether its events
        contain new tokens only. Raises ServerGone, ServerRefused."""
        ...

    def explain(self, tail: str, ended: str, log_path: Path) -> Exception:
        """Why a server did not start, by the end of its log: a UserError if a restart would fail in the same way, else
        an EngineError."""
        ...

    def body(self, request: AnswerRequest) -> dict[str, Any]:
        """The request as the server expects it."""
        ...
