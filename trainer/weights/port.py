"""The interface of the trainer's side of a weight transfer.

Versions are written into the weight store in version_writer.py; trainer/worker.py decides when.

All methods run on the trainer's event loop: blocking work belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from areal_like.config import ProcessSpec
from trainer.config import TrainerSettings


class Sender(Protocol):
    """Makes published versions available to the workers.

    `start`, then `run` indefinitely; `close` when the run is over.
    """

    @property
    def counters(self) -> Mapping[str, float]:
        """Monotonic counters, which are part of the trainer's heartbeat."""
        ...

    async def start(self) -> None:
        """Open the sockets or other resources for serving. Raises UserError."""
        ...

    async def run(self) -> None:
        """Serve until cancelled by the trainer."""
        ...

    async def publish(self, manifest_path: Path, version: int, lineage: str) -> str:
        """Make a version available that was just written; returns its location, which is announced.

        The location begins with the descriptor's scheme. The files of the newest `trainer.weights.keep` versions are
        kept. Called again with the same version after `rewritten`. Raises WeightError.
        """
        ...

    def rewritten(self, version: int, lineage: str) -> None:
        """Discard everything made from old files of a version, which were damaged and have been written again."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


MakeSender = Callable[[ProcessSpec, TrainerSettings], Sender]
"""Type of the function named by `TransferDescriptor.sender`."""
