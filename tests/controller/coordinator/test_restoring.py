"""What a new life of the run takes over from the ledger."""

from __future__ import annotations

import pytest
from desk import batch_of, state_of

from controller.coordinator.restoring import remember
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings


@pytest.mark.parametrize("num_batches", [0, 1, 2])
def test_a_run_that_has_made_a_batch_has_kept_a_group(num_batches: int) -> None:
    """Rejected prompts at its beginning then do not end it."""
    state = RunState(CoordinatorSettings(groups_per_step=2, group_size=1, num_steps=9))
    remember(
        state, state_of(batches=tuple(batch_of(step, 2 * step, 2 * step + 1) for step in range(1, num_batches + 1)))
    )
    assert state.groups.has_kept == (num_batches > 0)
    assert (state.groups.num_consumed, state.trainer.shipped) == (2 * num_batches, num_batches)
