"""Progress of the trainer: its last step, and the newest checkpoint it saved."""

from __future__ import annotations

from dataclasses import dataclass

from controller.coordinator.coordinator import Coordinator


@dataclass
class TrainerProgress:
    """Updated when the last step is announced, checkpoints are reported and the trainer is restarted."""

    coordinator: Coordinator
    last_step: int | None = None
    """Last step, sent to the trainer with NoMoreBatches."""
    saved_version: int = -1
    """Version of the newest checkpoint that was reported; -1: none yet."""

    def is_done(self) -> bool:
        """Return whether it has trained and saved the last step, so that the exit of its process is not a loss."""
        return self.last_step is not None and min(self.coordinator.trained, self.saved_version) >= self.last_step
