"""The ways to transfer weights, by the name that `trainer.weights.kind` gives them."""

from __future__ import annotations

from areal_like.registry import Registry
from areal_like.weights.transfer import TransferDescriptor

TRANSFERS = Registry(
    TransferDescriptor,
    noun="weight transfer",
    where="trainer.weights.kind",
    built_in={
        "shm": "areal_like.weights.transfers.files:SHARED_MEMORY",
        "disk": "areal_like.weights.transfers.files:DISK",
        "stream": "areal_like.weights.transfers.stream:STREAM",
        "distributed": "areal_like.weights.transfers.process_group:PROCESS_GROUP",
    },
)
BETWEEN_HOSTS = "stream"
"""The default where processes are on several hosts."""
