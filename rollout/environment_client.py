"""Episodes in environments of the reward services: every call ends with a reply or with the episode's verdict.

It tracks calls in flight, assigns episodes to services and moves them, and enforces the total deadline of a call.
Connections are in reward_client.py, which passes on replies and reports when a service restarted or stopped responding.
The turns of an episode are in episode.py. Retries after a fault of an environment are made by the service.

A service that does not know an episode replays it from its history, so nothing is lost with a service: a request that
is resent, or sent to another service, has the same reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Self

import msgspec

from areal_like.clock import Clock, SystemClock
from areal_like.environment import MAX_ACTION_CHARS, MAX_CALLS, MAX_TURNS, Action, Step, num_action_chars
from areal_like.errors import OperationError, WireError
from areal_like.tool_call import ToolCall
from areal_like.verdict import MAX_REASON_CHARS, Verdict
from areal_like.wire.messages import (
    EnvironmentClosed,
    EnvironmentReply,
    EnvironmentRequest,
    EpisodeHistory,
    Message,
    SampleTask,
)

FAILED_IN = "environment"
"""`Verdict.failed_in` of an episode whose environment failed, for `reward.on_failure`."""

MAX_LEFT = 10_000
"""Number of finished episodes of which a service has not been notified yet; it removes older ones by itself."""


class ServiceLink(Protocol):
    """One service; implemented by `reward_client`."""

    @property
    def accepts_requests(self) -> bool: ...

    async def send(self, message: Message) -> None:
        """Raises OperationError if it cannot be sent now."""
        ...


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an episode in a checkpoint; with row and seed it suffices to replay the environment."""

    actions: list[Action]
    digests: list[str]
    rewards: list[float]
    components: dict[str, float]
    is_done: bool
    turn_ends: list[int]


class EnvironmentEpisode:
    """One sample's episode. Use it in `async with`; call `reset` first, then `step`, unless it continues from a record.

    failure: the verdict if the environment failed; no further call is made then.
    """

    def __init__(
        self, client: EnvironmentClient, task: SampleTask, seed: int, record: Any, watch: Callable[[bool], None]
    ) -> None:
        self._client, self._row, self._seed, self._watch = client, task.row, seed, watch
        self.id = client.new_id()
        self.link: ServiceLink | None = None
        """The service that runs it."""
        known = msgspec.convert(record, EpisodeRecord) if record is not None else None
        self._actions = list(known.actions) if known else []
        self._digests = list(known.digests) if known else []
        self.rewards = list(known.rewards) if known else []
        """Digests of the replies, one for reset and one per action."""
        self.components = dict(known.components) if known else {}
        """Components of the last step."""
        self.is_done = known.is_done if known else False
        self.turn_ends = list(known.turn_ends) if known else []
        """Number of sampled tokens up to the end of each action's turn; set by the workflow, for rewards by turn."""
        self.failure: Verdict | None = None
        self.over_context = False
        """An observation did not fit; set by the workflow."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.leave(self)

    @property
    def num_turns(self) -> int:
        """Number of actions with a reply."""
        return len(self.rewards)

    @property
    def record(self) -> Any:
        """A JSON-like value with which `tools.environment(record)` continues from here."""
        return msgspec.to_builtins(
            EpisodeRecord(
                actions=self._actions, digests=self._digests, rewards=self.rewards, components=self.components,
                is_done=self.is_done, turn_ends=self.turn_ends,
            )
        )  # fmt: skip

    async def reset(self) -> Step | None:
        """Begin the episode; None if the environment failed (`failure`)."""
        return await self._call(0, "")

    async def step(self, action: Action) -> Step | None:
        """Take one action; None if the environment failed (`failure`)."""
        return await self._call(len(self._actions) + 1, action)

    def verdict(self, components: Mapping[str, float] | None = None) -> Verdict:
        """The sum of the rewards so far, or the failure.

        Args:
            components: named numbers of the workflow; those of the environment take precedence.
        """
        if self.failure is not None:
            return self.failure
        parts = {**(components or {}), **self.components}
        value = sum(self.rewards)
        if not math.isfinite(value):
            return self.fail("invalid", f"the sum of the rewards of the episode is {value}, not a finite number")
        return Verdict(kind="scored", value=value, components=parts, scorer=FAILED_IN)

    def history(self, turn: int) -> EpisodeHistory:
        """History of the episode before `turn`."""
        actions = tuple(self._actions[: max(turn - 1, 0)])
        return EpisodeHistory(row=self._row, seed=self._seed, actions=actions, digests=tuple(self._digests[:turn]))

    async def _call(self, turn: int, action: Action) -> Step | None:
        assert self.failure is None, "the environment has failed"
        assert not self.is_done, "the environment has ended the episode"
        assert turn == len(self._digests), "`reset` comes first, and once"
        if (num_chars := num_action_chars(action)) > MAX_ACTION_CHARS:
            what = f"the action in turn {turn} has {num_chars} characters, but at most {MAX_ACTION_CHARS} are allowed"
            self.fail("invalid", what)
            return None
        if turn > MAX_TURNS:
            self.fail("invalid", f"the episode has more than {MAX_TURNS} turns, which is the maximum")
            return None
        action = _as_sent(action)
        self._watch(True)
        try:
            reply = await self._client.call(self, turn, action)
        finally:
            self._watch(False)
        if reply.step is None or reply.status != "answered":
            kind = reply.status if reply.status in ("timed_out", "crashed", "invalid") else "crashed"
            self.fail(kind, reply.reason, reply.attempts)
            return None
        self._digests.append(reply.step.digest)
        if turn:
            self._actions.append(action)
            self.rewards.append(reply.step.reward)
        self.components, self.is_done = reply.step.components, reply.step.is_done
        return reply.step

    def fail(self, kind: Literal["timed_out", "crashed", "invalid"], reason: str, attempts: int = 1) -> Verdict:
        """Set this verdict of the episode."""
        parts = {"turns": float(self.num_turns)}
        self.failure = Verdict(
            kind=kind, reason=reason, components=parts, scorer=FAILED_IN, failed_in=FAILED_IN, attempts=attempts
        )
        self._client.count(f"environment_{kind}")
        return self.failure


def _as_sent(action: Action) -> Action:
    """Replace lone surrogates, which cannot be encoded."""
    if isinstance(action, str):
        return _whole(action)
    return tuple(ToolCall(_whole(one.name), _whole(one.arguments), _whole(one.fault)) for one in action[:MAX_CALLS])


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


class EnvironmentClient:
    """Calls of all episodes of a worker. `links` are the reward client's.

    total_deadline_s: from the request to the reply, including replays and a restart of the service. resend_s: resend a
    request without a reply after this time.
    """

    def __init__(
        self,
        *,
        name: str,
        seed: int,
        total_deadline_s: float,
        resend_s: float = 15.0,
        tick_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._name, self._run_seed = name, seed
        self._total_deadline_s, self._resend_s, self._tick_s = total_deadline_s, resend_s, tick_s
        self._clock = clock or SystemClock()
        self._ids = itertools.count()
        self.links: list[ServiceLink] = []
        self._num_at: Counter[ServiceLink] = Counter()
        self._waiting: dict[tuple[str, int], asyncio.Future[EnvironmentReply | None]] = {}
        self._at: dict[tuple[str, int], ServiceLink] = {}
        self._left: dict[ServiceLink, list[str]] = {}
        """Finished episodes of which a service has not been notified yet."""
        self._changed = asyncio.Event()
        self.counters: dict[str, float] = {}

    def count(self, name: str) -> None:
        """Add one to a counter."""
        self.counters[name] = self.counters.get(name, 0.0) + 1.0

    def new_id(self) -> str:
        """Id of one attempt at an episode, used only once."""
        return f"{self._name}:{next(self._ids)}"

    def episode(
        self, task: SampleTask, record: Any = None, watch: Callable[[bool], None] = lambda is_calling: None
    ) -> EnvironmentEpisode:
        """The environment of one sample. `record`: state at the end of an earlier lease; `watch` is called before and
        after calls."""
        return EnvironmentEpisode(self, task, self._seed_of(task), record, watch)

    def leave(self, episode: EnvironmentEpisode) -> None:
        """End the episode; its service is notified at the next tick."""
        if episode.link is not None:
            left = self._left.setdefault(episode.link, [])
            left.append(episode.id)
            del left[:-MAX_LEFT]  # for a service that never returns
            self._num_at[episode.link] -= 1
            episode.link = None

    async def call(self, episode: EnvironmentEpisode, turn: int, action: Action) -> EnvironmentReply:
        """Make one call; returns a reply, or a failure with its reason."""
        started_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(self._total_deadline_s):
                return await self._ask(episode, turn, action)
        except TimeoutError:
            waited_s = self._clock.monotonic_s() - started_s
            reason = f"the environment did not reply within {waited_s:.0f} s (rollout.score_timeout_s)"
            return EnvironmentReply(episode_id=episode.id, turn=turn, status="crashed", reason=reason)

    async def _ask(self, episode: EnvironmentEpisode, turn: int, action: Action) -> EnvironmentReply:
        """Send the request until there is a reply; bounded by `call`."""
        needs_history = False
        while True:
            link = self._link_for(episode)
            if link is None:
                await self._pause()
                continue
            is_new = episode.link is not link
            history = episode.history(turn) if is_new or needs_history else None
            request = EnvironmentRequest(episode_id=episode.id, turn=turn, action=action, history=history)
            if is_new:
                self._move(episode, link)
            reply = await self._exchange(link, request)
            needs_history = reply is not None and reply.status == "unknown"
            if reply is None or needs_history:
                self.count("environment_resent")
            elif reply.status in ("full", "draining"):
                self.count(f"environment_{reply.status}")
                self.leave(episode)
                await self._pause()
            else:
                return reply

    async def _exchange(self, link: ServiceLink, request: EnvironmentRequest) -> EnvironmentReply | None:
        """Send one request; None: resend it, to this or another service."""
        key = (request.episode_id, request.turn)
        future: asyncio.Future[EnvironmentReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[key], self._at[key] = future, link
        try:
            await link.send(request)
            async with asyncio.timeout(self._resend_s):
                return await future
        except TimeoutError:
            return None
        except WireError as error:  # it can never be sent: an action or a history is too large for a message
            return EnvironmentReply(
                episode_id=request.episode_id, turn=request.turn, status="invalid", reason=str(error)[:MAX_REASON_CHARS]
            )
        except OperationError:
            await self._pause()
            return None
        finally:
            del self._waiting[key], self._at[key]

    def _link_for(self, episode: EnvironmentEpisode) -> ServiceLink | None:
        """The service that runs it, while that responds; else the service with the fewest episodes."""
        if episode.link is not None and episode.link.accepts_requests:
            return episode.link
        takers = [link for link in self.links if link.accepts_requests]
        return min(takers, key=lambda link: self._num_at[link], default=None)

    def _move(self, episode: EnvironmentEpisode, link: ServiceLink) -> None:
        if episode.link is not None:
            self.count("environment_moved")
            self.leave(episode)
        if episode.id in (left := self._left.get(link, [])):  # it returns before the service was notified
            left.remove(episode.id)
        episode.link = link
        self._num_at[link] += 1

    async def _pause(self) -> None:
        """Wait until a service changes, or a tick passes."""
        self._changed.clear()
        try:
            async with asyncio.timeout(self._tick_s):
                await self._changed.wait()
        except TimeoutError:
            return

    # ------------------------------------------------------------ for the reward client

    def resolve(self, reply: EnvironmentReply) -> None:
        """Deliver a reply; unexpected ones are dropped."""
        future = self._waiting.get((reply.episode_id, reply.turn))
        if future is None or future.done():
            self.count("environment_stray")
        else:
            future.set_result(reply)

    def wake(self, link: ServiceLink) -> None:
        """Resend the waiting requests of a service that restarted or stopped responding."""
        self._changed.set()
        for key, at in self._at.items():
            if at is link and not self._waiting[key].done():
                self._waiting[key].set_result(None)

    async def flush(self, link: ServiceLink) -> None:
        """Notify a service of finished episodes."""
        if ids := self._left.pop(link, None):
            try:
                await link.send(EnvironmentClosed(episode_ids=tuple(ids)))
            except OperationError:
                self._left[link] = ids + self._left.get(link, [])

    def _seed_of(self, task: SampleTask) -> int:
        """Seed of an episode: the same for a group, so that its samples begin in the same state; in an evaluation, the
        same for a row."""
        if task.purpose == "eval":
            name = msgspec.json.encode(task.row, order="deterministic")
        else:
            name = str(task.group_id).encode()
        words = f"{self._run_seed}/environment/{task.purpose}/".encode() + name
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big") >> 2
