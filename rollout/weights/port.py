"""What a rollout worker's half of a weight transfer does.

Owns: the port `Receiver`. Refuses: when a version is swapped in (versions.py), loading it
(the engine).

The contract with an engine: `receive` returns the path of a full version's manifest (areal_like.weights), whose payload
is stored alongside it, complete and verified: safetensors wherever deltas or sockets are used. Generation continues
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from areal_like.config import ProcessSpec
from areal_like.weights.process_group import GroupCall
from rollout.hub_peer import HubPeer


class JoinAs(NamedTuple):
    """How an engine takes part in a process group: so many places, on devices of this kind."""

    num_ranks: int
    device: Literal["cpu", "cuda"]


class Receiver(Protocol):
    """What the version loader needs. Used from one loop; `receive` is called for one version at a time."""

    async def receive(self, place: str, deadline_s: float) -> Path:
        """The manifest of the announced version, complete and verified on this host.

        `place`: its location, as the sender named it. Raises WeightError, and WeightsDamaged where the version has to
        be written again.
        """
        ...

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        """The call to the process group that brings the announced version; None where it comes otherwise."""
        ...

    async def run(self) -> None:
        """Serve other workers indefinitely. Stop: cancelled."""
        ...

    def forget(self) -> None:
        """What was received is not to be trusted."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


MakeWire = Callable[[str, frozenset[type]], HubPeer]
"""Makes a connection to an address that takes these messages."""


MakeReceiver = Callable[[ProcessSpec, MakeWire], Receiver]
"""What `TransferDescriptor.receiver` names. The spec has the transfer's name and options, and the run's credentials."""
