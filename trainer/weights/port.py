"""What the trainer's half of a weight transfer does.

Owns: the port `Sender`. Refuses: writing versions into the weight store (version_writer.py), deciding when one is due
(trainer/worker.py).

All methods run on the trainer's event loop: what blocks belongs in a thread.
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
        """Monotonic; they go into the trainer's heartbeat."""
        ...

    async def start(self) -> None:
        """Open what it serves with. Raises UserError."""
        ...

    async def run(self) -> None:
        """Serve indefinitely. Stop: cancelled by the trainer."""
        ...

    async def publish(self, manifest_path: Path, version: int, lineage: str) -> str:
        """Make a version available that was just written; returns its location, which is announced.

        The location begins with the descriptor's scheme. The files of the newest `trainer.weights.keep` versions stay.
        Called again with the same version after `rewritten`. Raises WeightError.
        """
        ...

    def rewritten(self, version: int, lineage: str) -> None:
        """Its files were found damaged and written again: nothing made of the old ones may be sent any more."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


MakeSender = Callable[[ProcessSpec, TrainerSettings], Sender]
"""What `TransferDescriptor.sender` names."""
