"""Admits rollout workers that the run did not start: answers requests of candidates, and recognises their workers.

A candidate is the command `areal-like worker --join` (runs/join.py). It registers with the token of the run's
invitation (run_folder/invitation.py), and receives an offer: name, spec and credentials of one worker. The worker
registers itself later, or never: an offer costs the run nothing but the name. What follows from its messages is as for
other workers; that it is not restarted and may leave at any time is in supervisor.py and
coordinator/worker_lifecycle.py.

A name is used again only after its worker said Goodbye: one that was only silent may return with its token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_like.config import ProcessSpec
from areal_like.transport.channel import Hub
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.runtime.supervisor import Supervisor
from controller.telemetry.journal import Journal

MAX_OFFERS = 4096
"""Largest number of names that are offered or in use, as many as a hub has peers."""


class MakeOffer(Protocol):
    """Makes the offer of one more worker (composition.ProcessStarter)."""

    @property
    def reserved(self) -> set[str]:
        """Names that no other worker gets."""

    def offer(self) -> tuple[ProcessSpec, m.JoinOffer]:
        """The spec of a worker, which is also in the message."""


@dataclass(frozen=True)
class Offer:
    """An offer that was made: to which candidate, on which machine."""

    spec: ProcessSpec
    candidate: str
    host: str


class Admission:
    """Call `take` for messages of candidates, `arrived` for each Hello of a rollout worker, `left` for its Goodbye.

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

    def take(self, candidate: str, message: m.JoinRequest | m.JoinedWorkerEnded, now_s: float) -> None:
        """Answer a request, or handle the report that a worker has ended."""
        if isinstance(message, m.JoinRequest):
            self._hub.send(candidate, self._answer(candidate, message.host))
            return
        offer = self._offers.get(message.name)
        if offer is not None and offer.candidate == candidate:  # nobody else knows
            self._supervisor.external_ended(message.name, message.reason, now_s)

    def arrived(self, name: str, now_s: float) -> None:
        """Have the supervisor monitor an offered worker that registers, for the first time or after silence."""
        offer = self._offers.get(name)
        if offer is None or self._supervisor.watches(name):
            return
        self._supervisor.add_external(offer.spec, offer.host, now_s)
        self._journal.measure("process", name=name, event="joined", reason="", host=offer.host)
        self._say(f"{name} has joined the run from {offer.host}")

    def left(self, name: str) -> None:
        """Handle the worker's Goodbye: its name is free."""
        if self._offers.pop(name, None) is not None:
            self._maker.reserved.discard(name)

    def _answer(self, candidate: str, host: str) -> m.JoinOffer:
        if reason := self._refusal():
            return m.JoinOffer(reason=reason)
        spec, answer = self._maker.offer()
        self._maker.reserved.add(spec.name)
        self._offers[spec.name] = Offer(spec, candidate, host or "another machine")
        return answer

    def _refusal(self) -> str:
        if self._obstacle:
            return self._obstacle
        if self._coordinator.is_over:
            return "the run is ending"
        if len(self._offers) >= MAX_OFFERS:
            return f"{MAX_OFFERS} workers have asked to join this session of the run already"
        return ""
