"""The built-in weight transfers, by `trainer.weights.kind`. A new one needs one line in TRANSFERS."""

from __future__ import annotations

from collections.abc import Mapping

from areal_like.import_path import find_named
from areal_like.weights.transfer import KIND_KEY, TransferDescriptor
from areal_like.weights.transfers.files import DISK, SHARED_MEMORY
from areal_like.weights.transfers.process_group import PROCESS_GROUP
from areal_like.weights.transfers.stream import STREAM

TRANSFERS: Mapping[str, TransferDescriptor] = {
    transfer.name: transfer
    for transfer in (
        SHARED_MEMORY,
        DISK,
        STREAM,
        PROCESS_GROUP,
    )
}
"""By `trainer.weights.kind`."""
BETWEEN_HOSTS = STREAM.name
"""The default if processes are on several hosts."""


def find_transfer(kind: str) -> TransferDescriptor:
    """Find the transfer of that kind, or the one at an import path. Raises UserError if there is none.

    Example:
        >>> find_transfer("stream").scheme
        'tcp://'
    """
    return find_named(kind, TRANSFERS, TransferDescriptor, noun="weight transfer", where=KIND_KEY)
