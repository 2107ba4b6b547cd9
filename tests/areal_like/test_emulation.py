"""Claims about emulated devices: lengths as measured, costs that add up, a batch that loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from areal_like.emulation.device import EmulatedClock, Lateness, roofline_of
from areal_like.emulation.lengths import BETWEEN, THINKING_QUANTILES, Lengths, NamedDraws, thinking
from areal_like.emulation.replica import Replica, Sequence
from areal_like.emulation.settings import EmulationSettings
from areal_like.errors import UserError


def drawn(lengths, groups=1500, size=10):
    rng = np.random.default_rng(0)
    return np.asarray([lengths.draw(rng, size) for _ in range(groups)])


def test_shipped_lengths_have_the_measured_mean_spread_and_tail():
    found = drawn(thinking())
    assert found.mean() == pytest.approx(7345, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(0.87, rel=0.07)
    assert np.percentile(found, 99) == pytest.approx(28_973, rel=0.07)
    assert found.max() <= THINKING_QUANTILES[-1]


def test_most_of_the_variance_of_shipped_lengths_lies_between_prompts():
    logs = np.log(drawn(thinking()))
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(0.75, abs=0.08)


def test_lengths_can_be_scaled_to_a_mean_and_are_cut():
    assert drawn(thinking(mean=2000)).mean() == pytest.approx(2000, rel=0.05)
    assert drawn(thinking(cap=500)).max() == 500


def test_decoding_costs_nearly_the_same_for_one_answer_as_for_thirty_on_a_gpu():
    costs = roofline_of(EmulationSettings(model="7b"))
    assert costs.decode_s(30, 30 * 1000) < 1.2 * costs.decode_s(1, 1000)
    assert costs.decode_s(256, 256 * 9000) > 3 * costs.decode_s(1, 1000)


def test_training_time_falls_with_gpus_and_grows_with_recomputation():
    one, four = (roofline_of(EmulationSettings(trainer_gpus=gpus)) for gpus in (1, 4))
    flops = one.forward_flops([1000, 2000])
    assert one.compute_s(flops, 3) == pytest.approx(4 * four.compute_s(flops, 3))
    assert roofline_of(EmulationSettings(), is_recomputing_activations=True).gradient_passes == one.gradient_passes + 1


def test_unknown_gpu_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"emulation\.gpu.*h100"):
        roofline_of(EmulationSettings(gpu="h1000"))


def test_removed_sequence_leaves_cache_and_batch_as_if_it_had_never_come():
    costs = roofline_of(EmulationSettings(decode_floor_s=0.0))
    alone, shared = Replica("a", costs, 8), Replica("b", costs, 8)
    for replica in (alone, shared):
        replica.add(Sequence(1, 10, (100,)))
        replica.refill()
    other = Sequence(2, 10, (100,))
    shared.add(other)
    shared.refill()
    shared.remove(other)
    shared.refill()
    assert shared.num_active == 1
    assert shared.context_tokens == pytest.approx(alone.context_tokens)


def test_emulated_clock_reads_back_what_it_says():
    clock = EmulatedClock(100.0, 20.0)
    assert clock.emulated_s(clock.monotonic_s(7.0)) == pytest.approx(7.0)
    assert clock.emulated_s(101.0) == 20.0


def test_being_early_is_no_lateness():
    lateness = Lateness()
    lateness.add(-1.0)
    lateness.add(0.5)
    assert lateness.counters() == {
        "emulation_late_s": 0.5, "emulation_late_max_s": 0.5, "emulation_wakes": 2.0,
    }  # fmt: skip


def test_a_length_belongs_to_its_name_whatever_was_asked_before():
    names = [(group, sample) for group in range(50) for sample in range(1, 7)]
    first, second = NamedDraws(thinking(mean=100), 3), NamedDraws(thinking(mean=100), 3)
    found = {name: first(*name) for name in names}
    assert found == {name: second(*name) for name in reversed(names)}
    assert found != {name: NamedDraws(thinking(mean=100), 4)(*name) for name in names}
    log = np.log([[found[group, sample] for sample in range(1, 7)] for group in range(50)])
    assert log.mean(axis=1).var() > log.var(axis=1).mean()  # answers to one prompt resemble each other


def test_lengths_by_name_are_of_the_same_distribution_indefinitelyy_sample_of_a_group():
    length_of = NamedDraws(Lengths("log-normal", mean=1000.0, cv=0.9), 5)
    log = np.log([[length_of(group, sample) for sample in (1, 2, 3)] for group in range(4000)])
    assert np.exp(log).mean(axis=0) == pytest.approx([1000] * 3, rel=0.06)
    assert log.std(axis=0) == pytest.approx([log.std()] * 3, rel=0.05)
    assert np.corrcoef(log.T)[np.triu_indices(3, 1)] == pytest.approx([BETWEEN] * 3, abs=0.05)
