"""Claims about one simulated worker: what its cache holds, and that its time does not depend on how often one looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from areal_like.emulation.lengths import Lengths, thinking
from areal_like.emulation.machines import GPUS, MODELS
from areal_like.emulation.replica import RESERVED_TOKENS, Replica, Sequence
from areal_like.emulation.roofline import Efficiencies, Roofline


@dataclass(frozen=True)
class Linear:
    """A decode step takes a millisecond, and a microsecond more for each token in the cache."""

    per_token_s: float = 1e-6

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return 1e-3 + context_tokens * self.per_token_s

    def prefill_s(self, tokens: float) -> float:
        return 0.0


def run_out(replica: Replica, most_context: Callable[[Replica], float] = lambda _: math.inf) -> list[tuple[int, float]]:
    """Let it work to the end; lease ids with the moment each ended. most_context: what the cache may hold then."""
    found = []
    replica.refill()
    while replica.num_active:
        replica.advance(replica.wake_s)
        found += [(sequence.lease_id, replica.now_s) for sequence in replica.take_ended()]
        replica.refill()
        assert replica.context_tokens <= most_context(replica)
    return found


def filled(lengths: list[int], **settings) -> Replica:
    replica = Replica("r", Linear(), 64, **settings)
    for lease_id, length in enumerate(lengths):
        replica.add(Sequence(lease_id, 100, (length,)))
    return replica


def test_growth_of_the_cache_is_paid_exactly_however_long_the_stretch():
    ends = [run_out(filled([5000, 9000], stride_tokens=stride)) for stride in (50.0, 512.0, 1e9)]
    both = 5000 * 1e-3 + 1e-6 * (5000 * 200 + 5000**2)  # two prompts of 100, both grow by a token a step
    last = both + 4000 * 1e-3 + 1e-6 * (4000 * 5100 + 4000**2 / 2)
    for found in ends:
        assert found == [(0, pytest.approx(both)), (1, pytest.approx(last))]


def test_a_cache_that_holds_all_changes_nothing():
    assert run_out(filled([500, 900, 20])) == run_out(filled([500, 900, 20], cache_tokens=1e6))


def test_the_cache_never_holds_more_than_fits_and_every_answer_ends():
    ended = run_out(filled([4000] * 10, cache_tokens=20_000.0), lambda _: 20_000)
    assert sorted(lease_id for lease_id, _ in ended) == list(range(10))


def test_who_has_the_fewest_tokens_waits_again_and_keeps_them():
    replica = filled([6000, 6000], cache_tokens=8000.0)
    replica.refill()
    replica.advance(1.5)
    replica.add(Sequence(2, 100, (6000,)))
    replica.refill()
    newest = next(sequence for sequence in replica.active if sequence.lease_id == 2)
    while len(replica.active) == 3:
        replica.advance(replica.wake_s)
        replica.refill()
    assert newest not in replica.active
    assert 0 < newest.ready < 4000
    assert replica.context_tokens + 2 * RESERVED_TOKENS <= 8000


def test_a_sequence_larger_than_the_cache_goes_on_alone():
    assert [lease_id for lease_id, _ in run_out(filled([5000, 10], cache_tokens=1000.0))] == [0, 1]


def test_answers_that_start_together_take_as_long_as_each_on_its_own():
    apart = filled([300, 700, 700, 1200])
    together = Replica("r", Linear(), 64)
    together.add(Sequence(0, 100, (300, 700, 1200), (1, 2, 1)))
    assert run_out(together) == [(0, pytest.approx(run_out(apart)[-1][1]))]
    assert together.tokens == pytest.approx(2900)
    assert together.steps == pytest.approx(1200)
    assert together.context_tokens == pytest.approx(0)


def test_looking_in_between_changes_nothing():
    plain, watched = (Replica("r", Linear(), 64) for _ in range(2))
    for replica in (plain, watched):
        replica.add(Sequence(0, 100, (300, 700, 1200), (1, 1, 3)))
        replica.add(Sequence(1, 100, (50, 900), (2, 1)))
    seen, moment_s = [], 0.0
    watched.refill()
    while watched.num_active:
        moment_s = min(moment_s + 0.037, watched.wake_s)
        watched.advance(moment_s)
        seen += [(sequence.lease_id, watched.now_s) for sequence in watched.take_ended()]
        watched.refill()
    assert seen == [(lease_id, pytest.approx(ended_s)) for lease_id, ended_s in run_out(plain)]
    assert watched.tokens == pytest.approx(plain.tokens)
    assert watched.busy_s == pytest.approx(plain.busy_s)


def test_cache_and_tokens_add_up_however_often_groups_are_sent_back():
    replica = Replica("r", Linear(), 64, grid_tokens=500, cache_tokens=20_000.0)
    for lease_id in range(12):
        replica.add(Sequence(lease_id, 100, (1000, 2500, 4000), (1, 1, 1)))
    ended = run_out(replica, lambda working: 20_000 + working.num_active)
    assert sorted(lease_id for lease_id, _ in ended) == list(range(12))
    assert replica.context_tokens == pytest.approx(0)
    assert replica.tokens == pytest.approx(12 * 7500, rel=0.1)  # starts are rounded to the grid


def test_slots_and_cache_of_a_roofline_agree_about_equal_sequences():
    costs = Roofline(GPUS["h800"], MODELS["7b"], 1, 8, Efficiencies(), slots=10_000)
    assert costs.max_sequences(1000.0) == math.floor(costs.cache_tokens / 1000.0)


@pytest.mark.parametrize(
    "lengths", [Lengths("x", mean=1000.0, cv=0.9), thinking(27_648), Lengths("y", groups=((3, 9),))]
)
def test_groups_drawn_at_once_are_those_drawn_one_by_one_in_distribution(lengths):
    import numpy as np

    one, many = np.random.default_rng(0), np.random.default_rng(1)
    singly = np.asarray([lengths.draw(one, 8) for _ in range(3000)], dtype=float)
    at_once = np.asarray(lengths.draw_groups(many, 8, 3000), dtype=float)
    assert at_once.shape == singly.shape
    assert at_once.mean() == pytest.approx(singly.mean(), rel=0.05)
    assert at_once.mean(axis=1).std() == pytest.approx(singly.mean(axis=1).std(), rel=0.1)
