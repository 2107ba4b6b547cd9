"""Admits rollout workers that the run did not start: answers requests of candidates, and recognises their workers.

A candidate is the command `areal-like worker --join` (runs/join.py). It registers with the token of the run's
invitation (run_folder/invitation.py), and receives an offer: name, spec and credentials of one worker. The worker
registers itself later, or never: an offer costs the run nothing but the name. What follows from its messages is as for
other workers; that it is not restarted and may leave at any time is in supervisor.py and
coordinator/worker_lifecycle.py.

A name that was offered is never used again in this session, because a token belongs to a name. An offer is open until
its worker says Goodbye, its candidate reports the end of the worker, or its candidate says Goodbye while no worker of
it is monitored: a candidate outlives its worker. A worker without an open offer is sent away.

Anyone who has the invitation can be a candidate, so what it sends is bounded: one offer for each candidate, MAX_OFFERS
open ones, and short texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError, UserError
from areal_like.transport.channel import Hub
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.sample_outcome import MAX_REASON_CHARS
from controller.run_folder.formatting import printable
from controller.runtime.supervisor import Supervisor
from controller.telemetry.journal import Journal

MAX_OFFERS = 4096
"""Largest number of open offers, as many as a hub has peers."""
MAX_HOST_CHARS = 255
"""Longest name of a machine that is kept, the limit of DNS."""


class MakeOffer(Protocol):
    """Makes the offer of one more worker (composition.ProcessStarter)."""

    def offer(self) -> tuple[ProcessSpec, m.JoinOffer]:
        """The spec of a worker with a name that nothing else gets in this session; it is also in the message.

        Raises OSError, UserError or OperationError if its files cannot be read or its keys cannot be made.
        """


@dataclass(frozen=True)
class Offer:
    """An offer that was made: to which candidate, on which machine."""

    spec: ProcessSpec
    candidate: str
    host: str


class Admission:
    """Call `take` for messages of candidates, `arrived` for each Hello of a rollout worker, `left` for the Goodbye of
    either.

    obstacle: why this run admits nobody, as a sentence; empty: it does.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        supervisor: Supervisor,
        hub: Hub,
        maker: MakeOffer,
        *,
        obstacle: str,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self._coordinator, self._supervisor, self._hub, self._maker = coordinator, supervisor, hub, maker
        self._obstacle, self._journal, self._say = obstacle, journal, say
        self._offers: dict[str, Offer] = {}
        """Open offers by the name of the worker."""
        self._offered: set[str] = set()
        """Names of all offers of this session."""

    def take(self, candidate: str, message: m.JoinRequest | m.JoinedWorkerEnded, now_s: float) -> None:
        """Answer a request, or handle the report that a worker has ended."""
        if isinstance(message, m.JoinRequest):
            self._hub.send(candidate, self._answer(candidate, message.host))
            return
        offer = self._offers.get(message.name)
        if offer is not None and offer.candidate == candidate:  # nobody else knows
            del self._offers[message.name]
            self._supervisor.external_ended(message.name, _short(message.reason, MAX_REASON_CHARS), now_s)

    def arrived(self, name: str, now_s: float) -> None:
        """Have the supervisor monitor an offered worker that registers, for the first time or after silence."""
        offer = self._offers.get(name)
        if offer is None and name in self._offered:
            reason = "the run no longer expects this worker: its command has ended, or the worker has left"
            self._hub.send(name, m.Shutdown(reason=reason, deadline_s=0.0))
        if offer is None or self._supervisor.watches(name):
            return
        self._supervisor.add_external(offer.spec, offer.host, now_s)
        self._journal.measure("process", name=name, event="joined", reason="", host=offer.host)
        self._say(f"{name} has joined the run from {offer.host}")

    def left(self, peer: str) -> None:
        """Handle the Goodbye of a worker or a candidate: its offer is no longer open."""
        ended = [
            name for name, offer in self._offers.items()
            if name == peer or (offer.candidate == peer and not self._supervisor.watches(name))
        ]  # fmt: skip
        for name in ended:
            del self._offers[name]

    def _answer(self, candidate: str, host: str) -> m.JoinOffer:
        if reason := self._refusal(candidate):
            return m.JoinOffer(reason=reason)
        try:
            spec, answer = self._maker.offer()
        except (OSError, UserError, OperationError) as error:  # a request must not end the run
            self._say(f"a worker of {_short(host, MAX_HOST_CHARS)} could not be admitted: {error}")
            return m.JoinOffer(reason=f"the run could not prepare a worker ({error})")
        self._offered.add(spec.name)
        self._offers[spec.name] = Offer(spec, candidate, _short(host, MAX_HOST_CHARS) or "another machine")
        return answer

    def _refusal(self, candidate: str) -> str:
        if self._obstacle:
            return self._obstacle
        if self._coordinator.is_over:
            return "the run is ending"
        if any(offer.candidate == candidate for offer in self._offers.values()):
            return "this candidate has an offer already; each worker needs a command of its own"
        if len(self._offers) >= MAX_OFFERS:
            self._forget_lost_ones()
        if len(self._offers) >= MAX_OFFERS:
            return f"{MAX_OFFERS} workers have joined this run or were offered to, as many as it admits"
        return ""

    def _forget_lost_ones(self) -> None:
        """Forget offers whose candidate is no longer connected and whose worker is not monitored."""
        for name, offer in list(self._offers.items()):
            if offer.candidate not in self._hub.peers and not self._supervisor.watches(name):
                del self._offers[name]


def _short(text: str, max_chars: int) -> str:
    return printable(text[:max_chars])
