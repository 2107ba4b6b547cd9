"""Selects the sender for `trainer.weights.kind`."""

from __future__ import annotations

from areal_like.config import ProcessSpec
from areal_like.import_path import import_factory
from areal_like.weights.transfer import KIND_KEY
from trainer.config import TrainerSettings
from trainer.weights.port import MakeSender, Sender


def sender_of(spec: ProcessSpec, trainer: TrainerSettings) -> Sender | None:
    """Create the sender of a trainer process; None if weights are only stored in files. Raises UserError."""
    transfer = trainer.weights.transfer
    if not transfer.sender:
        return None
    make: MakeSender = import_factory(transfer.sender, KIND_KEY)
    return make(spec, trainer)
