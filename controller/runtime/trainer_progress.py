"""How far the trainer is: the step it ends with, and the newest checkpoint it saved.

Owns: both facts. Refuses: what it has trained (the coordinator's).
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.coordinator.coordinator import Coordinator


@dataclass
class TrainerProgress:
    """Written where batches are ended, checkpoints are reported and the trainer is restarted."""

    coordinator: Coordinator
    last_step: int | None = None
    """Passed to the trainer with NoMoreBatches."""
    saved_version: int = -1
    """Version of the newest checkpoint that was reported; -1: none yet."""

    def is_done(self) -> bool:
        """It has trained the last step, and saved it: the end of its process is no loss."""
        return self.last_step is not None and min(self.coordinator.trained, self.saved_version) >= self.last_step
