"""A desk of episodes whose processes and clients the test plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_like.environment import Step
from areal_like.wire.messages import EnvironmentReply, EnvironmentRequest, EpisodeHistory
from services.environment.config import EnvironmentSettings
from services.environment.episode_scheduler import EpisodeScheduler
from services.environment.job import Act, Answered, Begin, Close
from services.environment.quarantine import Quarantine


class FakeHost:
    def __init__(self) -> None:
        self.sent: list[Begin | Act | Close] = []
        self.episodes: set[int] = set()
        self.culprit, self.culprit_kind, self.makes_room = 0, "crashed", False

    def send(self, message: Begin | Act | Close) -> None:
        self.sent.append(message)
        (self.episodes.discard if isinstance(message, Close) else self.episodes.add)(message.episode)


class FakePool:
    def __init__(self) -> None:
        self.hosts = [FakeHost()]
        self.num_ready, self.counters = 1, dict[str, int]()
        self.looked_after: list[FakeHost] = []

    def place(self) -> FakeHost | None:
        return min(self.hosts, key=lambda host: len(host.episodes), default=None)

    def look_after(self, host: FakeHost) -> None:
        self.looked_after.append(host)


class Stage:
    """A desk, its replies, and the clients' side of an episode."""

    def __init__(self, clock: Callable[[], float] | None = None, **settings: Any) -> None:
        """clock: of the quarantine."""
        self.replies: list[tuple[str, EnvironmentReply]] = []
        self.is_reachable = True
        self.pool = FakePool()
        chosen = EnvironmentSettings(kind="guess_number", **settings)
        self.desk = EpisodeScheduler(
            chosen,
            self.take,
            pool=self.pool,  # type: ignore[arg-type]
            quarantine=Quarantine(chosen, clock) if clock is not None else None,
        )

    def take(self, peer: str, reply: EnvironmentReply) -> bool:
        self.replies.append((peer, reply))
        return self.is_reachable

    @property
    def host(self) -> FakeHost:
        return self.pool.hosts[0]

    @property
    def last(self) -> EnvironmentReply:
        return self.replies[-1][1]

    def ask(
        self, name: str, turn: int, action: str = "", history: EpisodeHistory | None = None, peer: str = "rollout-0"
    ) -> None:
        if turn == 0 and history is None:
            history = EpisodeHistory(row={"name": name}, seed=4)
        request = EnvironmentRequest(episode_id=name, turn=turn, action=action, history=history)
        self.desk.offer(peer, request)

    def answer(self, step: Step, host: FakeHost | None = None) -> None:
        """The process answers the newest call."""
        host = host or self.host
        self.desk.on_message(host, Answered(episode=host.sent[-1].episode, step=step))  # type: ignore[arg-type]

    def begun(self, name: str = "a") -> Stage:
        self.ask(name, 0)
        self.answer(Step(observation="go"))
        return self

    def lose(self, host: FakeHost, culprit: int = 0) -> FakeHost:
        """A process is gone and another one there."""
        self.pool.hosts[self.pool.hosts.index(host)] = fresh = FakeHost()
        host.culprit = culprit
        self.desk.on_lost(host, "it was killed by signal SIGKILL")  # type: ignore[arg-type]
        return fresh
