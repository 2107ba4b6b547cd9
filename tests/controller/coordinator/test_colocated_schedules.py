"""Random colocated schedules: the devices never have two holders, and every run ends."""

from __future__ import annotations

import pytest
from colocated_schedules import run_colocated
from example_counts import num_examples


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_under_delays_deaths_and_resumes_the_devices_have_one_holder_and_every_run_ends(first: int) -> None:
    for seed in range(first, first + num_examples(40)):
        run_colocated(seed)


@pytest.mark.parametrize("seed", [32, 172])
def test_the_trainer_does_not_wait_for_an_evaluation_on_a_worker_that_never_loads_its_version(seed: int) -> None:
    """Both stood still when a quarantined worker kept its evaluation."""
    run_colocated(seed, "quarantine_behind_a_hung_load")
