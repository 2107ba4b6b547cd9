"""The interface of the receiver of a weight transfer in a rollout worker.

versions.py decides when a version is swapped in.

`receive` returns the path of a full version's manifest (areal_like.weights); its payload is in the same folder,
complete and verified. It is in safetensors format if deltas or sockets are used. Generation continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from areal_like.config import ProcessSpec
from areal_like.weights.process_group import GroupCall
from rollout.hub_peer import HubPeer


class JoinAs(NamedTuple):
    """How an engine takes part in a process group: number of ranks, and kind of device."""

    num_ranks: int
    device: Literal["cpu", "cuda"]


class Receiver(Protocol):
    """Receives versions for the version loader. Used from one loop; `receive` is called for one version at a time."""

    async def receive(self, place: str, deadline_s: float) -> Path:
        """The manifest of the announced version, complete and verified on this host.

        `place`: its location, as announced by the sender. Raises WeightError, and WeightsDamaged if the version has to
        be written again.
        """
        ...

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        """The call to the process group for the announced version; None if it is transferred in another way."""
        ...

    async def run(self) -> None:
        """Serve other workers until cancelled."""
        ...

    def forget(self) -> None:
        """Discard received versions, which may be damaged."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic."""
        ...

    async def close(self) -> None:
        """Free all resources."""
        ...


MakeWire = Callable[[str, frozenset[type]], HubPeer]
"""Function that creates a connection to an address, which accepts these messages."""


MakeReceiver = Callable[[ProcessSpec, MakeWire], Receiver]
"""Type of the factory that `TransferDescriptor.receiver` names. The spec has the transfer's name and options, and the
run's credentials."""
