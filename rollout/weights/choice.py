"""Creates the receiver for the run's weight transfer."""

from __future__ import annotations

from pathlib import Path

from areal_like.config import ProcessSpec
from areal_like.import_path import import_factory
from areal_like.weights.process_group import GroupCall
from areal_like.weights.registry import find_transfer
from areal_like.weights.transfer import KIND_KEY
from rollout.weights.local_versions import local_roots
from rollout.weights.port import JoinAs, MakeReceiver, MakeWire, Receiver


def receiver_of(spec: ProcessSpec, make_wire: MakeWire) -> Receiver:
    """The receiver for `trainer.weights.kind`; it opens nothing before the first version. Raises UserError."""
    transfer = find_transfer(spec.weight_transfer)
    make: MakeReceiver = import_factory(transfer.receiver, KIND_KEY)
    receiver = make(spec, make_wire)
    if transfer.scheme:
        receiver = _BySchemeReceiver(receiver, transfer.scheme)
    if not spec.merges_adapters:
        return receiver
    from rollout.weights.merging import MergingReceiver  # imports torch

    return MergingReceiver(receiver, Path(str(spec.model.path)), local_roots(spec.run_id, f"{spec.name}.merged"))


class _BySchemeReceiver:
    """Passes locations of a scheme to a receiver; any other location is the path of a full manifest."""

    def __init__(self, receiver: Receiver, scheme: str) -> None:
        self._receiver, self._scheme = receiver, scheme
        self.run, self.forget = receiver.run, receiver.forget
        self.counters, self.close = receiver.counters, receiver.close

    async def receive(self, place: str, deadline_s: float) -> Path:
        """See Receiver."""
        return await self._receiver.receive(place, deadline_s) if self._is_ours(place) else Path(place)

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> GroupCall | None:
        """See Receiver."""
        return await self._receiver.meet(place, deadline_s, who) if self._is_ours(place) else None

    def _is_ours(self, place: str) -> bool:
        return place.startswith(self._scheme)
