"""Claims about the emulated trainer: a step takes what the roofline says, at absolute deadlines, and learns nothing."""

from __future__ import annotations

import time

import pytest
import torch

from areal_like.emulation.settings import EmulationSettings
from trainer.backends.emulated import EmulatedBackend
from trainer.backends.port import Setup
from trainer.config import LossSettings, TrainerSettings
from trainer.model.attention import AttentionChoice
from trainer.ranks import Ranks
from trainer.step import TrainStep

EMULATION = EmulationSettings(speedup=50.0, token_scale=200, trainer_gpus=2)


@pytest.fixture
def step_of(tiny_model):
    """A training step over an emulated backend."""

    def make(emulation=EMULATION, **changes):
        settings = TrainerSettings(loss=LossSettings(), **changes)
        setup = Setup(settings, 1.0, 10, AttentionChoice("sdpa", "test"), Ranks.alone())
        backend = EmulatedBackend(tiny_model(), setup, emulation)
        return TrainStep(backend, setup, groups_per_step=4), backend

    return make


def test_step_ends_no_earlier_than_the_roofline_says(step_of, make_samples):
    step, backend = step_of(mini_batches=2)
    samples = make_samples([4, 4])
    lengths = [200 + 200 * sample.trajectory.num_sampled for sample in samples]
    costs = backend._costs
    least_s = costs.compute_s(costs.forward_flops(lengths), 4.0) / EMULATION.speedup  # proximal, forward, backward
    prepared = step.prepare(samples, 0)
    began_s = time.monotonic()
    backend.begin(began_s)
    step.run(prepared)
    assert time.monotonic() - began_s >= least_s


def test_weights_do_not_change_and_no_gradient_is_taken(step_of, make_samples):
    step, backend = step_of()
    before = [parameter.clone() for parameter in backend.model.parameters()]
    metrics = step.run(step.prepare(make_samples([4, 4]), 0))
    assert all(torch.equal(a, b) for a, b in zip(before, backend.model.parameters(), strict=True))
    assert metrics["skipped_updates"] == 0


def test_late_wake_up_does_not_delay_the_next_step(step_of, make_samples):
    step, backend = step_of()
    backend.begin(time.monotonic() - 1.0)  # its batch was there a second ago, so it is long done
    step.run(step.prepare(make_samples([4]), 0))
    assert backend.lateness.counters()["emulation_late_s"] > 0.5
    first_due_s = backend.due_s
    backend.begin(first_due_s - 5.0)
    step.run(step.prepare(make_samples([4]), 1))
    assert backend.due_s - first_due_s < 0.5


def test_ranks_wait_for_the_heaviest_share(step_of):
    _, backend = step_of()
    alone, even = backend._compute_s([1000], 1.0), backend._compute_s([1000, 1000], 1.0)
    assert alone == pytest.approx(even)
