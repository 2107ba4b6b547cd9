"""Handles the requests of episodes: one reply for each request, whichever process has the environment.

It orders calls, replays episodes, detects duplicates, and bounds the number of episodes. Sockets are in
services/reward/server.py, processes in pool.py.

Replay: an episode is replayed from its history if its process was lost, if it was evicted from its process, or if it
comes from another service or worker. Each reply must be the same as before (`Step.digest`); an environment that replies
differently gets the verdict `invalid`.

Faults: an episode whose code made a process hang or die is replayed `retries` times, then it has failed. Other episodes
of that process are replayed without limit, because each loss of a process uses up an attempt of the one at fault. If
none is at fault, MAX_LOSSES bounds the replays. If episodes of one row hang repeatedly, no more of them are started
(quarantine.py); those that have had a reply continue.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal

import msgspec

from areal_like.environment import MAX_ACTION_CHARS, MAX_TURNS, Step, num_action_chars
from areal_like.wire.messages import EnvironmentReply, EnvironmentRequest, EnvironmentStatus, EpisodeHistory
from services.environment.config import EnvironmentSettings
from services.environment.host_process import HostProcess
from services.environment.job import Act, Answered, Begin, Close, Failed
from services.environment.pool import HostPool
from services.environment.quarantine import Quarantine

log = logging.getLogger(__name__)

MAX_LOSSES = 8
"""Number of losses of its process for which no episode was at fault, after which an episode has failed."""

Key = tuple[str, str]
Reply = Callable[[str, EnvironmentReply], bool]


class Episode:
    """One episode. Replies exist for turns 0 to len(digests) - 1; `cursor` is the next call of its environment."""

    def __init__(self, number: int, key: Key, history: EpisodeHistory) -> None:
        self.number, self.key = number, key
        self.row, self.seed = history.row, history.seed
        self.actions, self.digests = list(history.actions), list(history.digests)
        self.cursor = 0
        self.host: HostProcess | None = None
        self.is_calling = False
        self.pending: EnvironmentRequest | None = None
        self.last: EnvironmentReply | None = None
        self.num_faults = self.num_losses = 0

    @property
    def next_turn(self) -> int:
        """The first turn without a reply."""
        return len(self.digests)

    @property
    def has_failed(self) -> bool:
        """Whether it has failed, and so has its verdict."""
        return self.last is not None and self.last.status != "answered"


class EpisodeScheduler:
    """Call `start`, then `run` as a task, and `offer` and `close_episodes` from the server's intake. `reply(peer,
    message)` sends a message."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        reply: Reply,
        neighbours: Callable[[], frozenset[int]] = frozenset,
        pool: HostPool | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._settings, self._reply = settings, reply
        self.pool = pool or HostPool(settings, self.on_message, self.on_lost, self.on_ready, neighbours)
        self._quarantine = quarantine or Quarantine(settings)
        self._episodes: OrderedDict[Key, Episode] = OrderedDict()
        """Episodes, the least recently used first."""
        self._by_number: dict[int, Episode] = {}
        self._homeless: dict[Key, None] = {}
        """Episodes that wait for a process, in order."""
        self._numbers = itertools.count(1)
        self._incarnations: dict[str, str] = {}
        self.is_draining = False
        self._counters: Counter[str] = Counter()

    async def start(self) -> None:
        """Start the processes. Raises UserError for an environment that cannot be used."""
        await self.pool.start()

    async def run(self) -> None:
        """Serve until cancelled. Raises OperationError if its processes do not start."""
        await self.pool.run()

    async def close(self) -> None:
        """End all processes."""
        await self.pool.close()

    @property
    def num_open(self) -> int:
        """Number of requests that a client waits for."""
        return sum(episode.pending is not None for episode in self._episodes.values())

    def counters(self) -> dict[str, float]:
        """Counters for heartbeats and statistics."""
        held = {"episodes": len(self._episodes), "processes": self.pool.num_ready}
        return {f"environment.{name}": float(n) for name, n in {**held, **self._counters, **self.pool.counters}.items()}

    # ------------------------------------------------------------ clients

    def offer(self, peer: str, request: EnvironmentRequest) -> None:
        """Accept a request; it is answered by `reply`, at most once each time it is sent."""
        key = (peer, request.episode_id)
        episode = self._episodes.get(key)
        if episode is None:
            if self.is_draining:
                self._refuse(key, request.turn, "draining")
                return
            if request.history is None:
                self._refuse(key, request.turn, "unknown")
                return
            if fault := _fault_of(request, request.history):
                self._refuse(key, request.turn, "invalid", fault)
                return
            if request.turn == 0 and (fault := self._quarantine.reason(request.history.row)):
                self._counters["refused_quarantined"] += 1
                self._refuse(key, request.turn, "timed_out", fault)
                return
            if not self._make_room():
                self._refuse(key, request.turn, "full")
                return
            episode = Episode(next(self._numbers), key, request.history)
            self._episodes[key] = self._by_number[episode.number] = episode
            self._counters["begun"] += 1
        self._episodes.move_to_end(key)
        if episode.has_failed or (episode.last is not None and request.turn == episode.last.turn):
            self._counters["duplicates"] += 1
            assert episode.last is not None
            self._send(key, msgspec.structs.replace(episode.last, turn=request.turn))
        elif request.turn != episode.next_turn:
            self._behind(episode, request)
        elif episode.pending is not None:
            self._counters["duplicates"] += 1
        else:
            episode.pending = request
            if request.turn:
                episode.actions.append(request.action)
            self._advance(episode)

    def close_episodes(self, peer: str, episode_ids: tuple[str, ...]) -> None:
        """End episodes that their client has finished."""
        for episode_id in episode_ids:
            episode = self._episodes.get((peer, episode_id))
            if episode is not None and episode.digests and episode.pending is None and not episode.has_failed:
                self._quarantine.succeeded(episode.row)
            self._forget((peer, episode_id))

    def welcome(self, peer: str, incarnation: str) -> None:
        """Handle a client's Hello. With a new incarnation, its earlier episodes are dropped."""
        if self._incarnations.get(peer) != incarnation:
            self.dismiss(peer)
            self._incarnations[peer] = incarnation

    def dismiss(self, peer: str) -> None:
        """Drop the episodes of a client that is lost."""
        self._incarnations.pop(peer, None)
        for key in [key for key in self._episodes if key[0] == peer]:
            self._forget(key)

    def refuse_open(self) -> int:
        """Refuse all waiting requests at the end of a drain. Returns their number."""
        waiting = [episode for episode in self._episodes.values() if episode.pending is not None]
        for episode in waiting:
            assert episode.pending is not None
            self._refuse(episode.key, episode.pending.turn, "draining")
            self._forget(episode.key)
        return len(waiting)

    def _behind(self, episode: Episode, request: EnvironmentRequest) -> None:
        """Handle a request for another turn than the next one. An earlier turn is a late duplicate; a later one means
        that the client has used another service meanwhile."""
        if request.turn < episode.next_turn:
            self._counters["duplicates"] += 1
        else:
            self._forget(episode.key)
            self._refuse(episode.key, request.turn, "unknown")

    def _make_room(self) -> bool:
        """Evict the episode that has waited longest. False if all are busy."""
        if len(self._episodes) < self._settings.max_episodes:
            return True
        idle = next((episode for episode in self._episodes.values() if episode.pending is None), None)
        if idle is None:
            return False
        self._counters["evicted"] += 1
        self._forget(idle.key)
        return True

    def _refuse(self, key: Key, turn: int, status: EnvironmentStatus, reason: str = "") -> None:
        self._counters[status] += 1
        self._send(key, EnvironmentReply(episode_id=key[1], turn=turn, status=status, reason=reason))

    def _send(self, key: Key, reply: EnvironmentReply) -> None:
        if not self._reply(key[0], reply):
            self._counters["undelivered"] += 1  # the client resends

    # ------------------------------------------------------------ processes

    def on_message(self, host: HostProcess, message: Answered | Failed) -> None:
        """Handle a process's message about an episode. Messages of processes that no longer have it are ignored."""
        episode = self._by_number.get(message.episode)
        if episode is None or not episode.is_calling or episode.host is not host:
            return
        episode.is_calling = False
        if isinstance(message, Failed):
            episode.host = None
            self._faulted(episode, message.kind, message.reason, may_retry=message.kind == "timed_out")
            return
        turn, step = episode.cursor, message.step
        episode.cursor += 1
        if turn < len(episode.digests):
            self._counters["replayed"] += 1
            if step.digest != episode.digests[turn]:
                what = f"the result of turn {turn} was different when the episode was replayed"
                self._fail(episode, "invalid", f"the environment is not deterministic: {what}")
                return
        else:
            self._answer(episode, turn, step)
        self._advance(episode)

    def on_ready(self) -> None:
        """Assign waiting episodes to processes."""
        waiting, self._homeless = list(self._homeless), {}
        for key in waiting:
            if (episode := self._episodes.get(key)) is not None:
                self._advance(episode)

    def on_lost(self, host: HostProcess, reason: str) -> None:
        """Handle the loss of a process."""
        for number in list(host.episodes):
            episode = self._by_number.get(number)
            if episode is None or episode.has_failed:
                continue
            was_calling = episode.is_calling
            episode.host, episode.cursor, episode.is_calling = None, 0, False
            if number == host.culprit:
                kind: Literal["timed_out", "crashed"] = "timed_out" if host.culprit_kind == "timed_out" else "crashed"
                self._faulted(episode, kind, reason, may_retry=True)
                continue
            self._counters["moved"] += 1
            episode.num_losses += was_calling and not host.culprit and not host.makes_room
            if episode.num_losses > MAX_LOSSES:
                self._fail(
                    episode,
                    "crashed",
                    f"the process of the episode was lost {episode.num_losses} times; the last reason: {reason}",
                )
            else:
                self._advance(episode)

    def _advance(self, episode: Episode) -> None:
        """Make the next call: one of a replay, or the requested one."""
        is_due = episode.pending is not None and episode.cursor <= episode.next_turn
        if episode.is_calling or not is_due or episode.has_failed:
            return
        if episode.host is None:
            episode.cursor = 0
            episode.host = self.pool.place()
            if episode.host is None:
                self._homeless[episode.key] = None
                return
        episode.is_calling = True
        if episode.cursor == 0:
            episode.host.send(Begin(episode=episode.number, row=episode.row, seed=episode.seed))
            self.pool.look_after(episode.host)
        else:
            episode.host.send(Act(episode=episode.number, action=episode.actions[episode.cursor - 1]))

    def _answer(self, episode: Episode, turn: int, step: Step) -> None:
        episode.digests.append(step.digest)
        episode.pending = None
        attempts = episode.num_faults + 1
        episode.last = EnvironmentReply(
            episode_id=episode.key[1], turn=turn, status="answered", step=step, attempts=attempts
        )
        self._counters["answered"] += 1
        if step.is_done:
            self._quarantine.succeeded(episode.row)
        self._send(episode.key, episode.last)

    def _faulted(self, episode: Episode, kind: Literal["timed_out", "crashed", "invalid"], reason: str, *,
                 may_retry: bool) -> None:  # fmt: skip
        episode.cursor = 0
        episode.num_faults += 1
        if kind == "timed_out":
            self._note_hang(episode)
        if episode.has_failed:
            return
        may_retry = may_retry and not self._quarantine.reason(episode.row)
        if may_retry and episode.num_faults <= self._settings.retries:
            self._counters["retries"] += 1
            self._advance(episode)
        else:
            self._fail(episode, kind, reason)

    def _note_hang(self, episode: Episode) -> None:
        """Count a hang. If it quarantines the row, its episodes without a reply fail, because each would hang in
        turn.
        """
        if not self._quarantine.hung(episode.row):
            return
        self._counters["quarantined"] += 1
        reason = self._quarantine.reason(episode.row)
        log.warning("a row of the environment is quarantined: %s", reason)
        for other in list(self._episodes.values()):
            if other.row == episode.row and not other.digests and other.pending is not None:
                self._fail(other, "timed_out", reason)

    def _fail(self, episode: Episode, kind: Literal["timed_out", "crashed", "invalid"], reason: str) -> None:
        """Set its verdict, which also answers later requests, and remove it from its process."""
        self._leave_host(episode)
        turn = episode.pending.turn if episode.pending is not None else episode.next_turn
        episode.pending = None
        episode.last = EnvironmentReply(
            episode_id=episode.key[1], turn=turn, status=kind, reason=reason, attempts=max(episode.num_faults, 1)
        )
        self._counters[kind] += 1
        self._send(episode.key, episode.last)

    def _leave_host(self, episode: Episode) -> None:
        if episode.host is not None:
            episode.host.send(Close(episode=episode.number))
            self.pool.look_after(episode.host)
            episode.host = None
        episode.is_calling = False

    def _forget(self, key: Key) -> None:
        episode = self._episodes.pop(key, None)
        self._homeless.pop(key, None)
        if episode is not None:
            del self._by_number[episode.number]
            self._leave_host(episode)


def _fault_of(request: EnvironmentRequest, history: EpisodeHistory) -> str:
    """Why this is not a valid history of an episode; empty if it is."""
    num_actions = max(request.turn - 1, 0)
    if not 0 <= request.turn <= MAX_TURNS:
        return f"turn {request.turn} is not between 0 and {MAX_TURNS}"
    if len(history.digests) != request.turn or len(history.actions) != num_actions:
        lengths = f"{len(history.actions)} actions and {len(history.digests)} results"
        return f"turn {request.turn} does not match a history of {lengths}"
    if any(num_action_chars(action) > MAX_ACTION_CHARS for action in (request.action, *history.actions)):
        return f"an action has more than {MAX_ACTION_CHARS} characters"
    return ""
