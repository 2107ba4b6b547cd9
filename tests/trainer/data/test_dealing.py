"""Claims about who trains on what: all of it, once, evenly, in as few micro-batches as the tokens allow."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.packing import pack
from trainer.config import TrainerSettings
from trainer.data.batch import prepare_batch
from trainer.data.dealing import deal, deal_apart, micro_batches, pack_closely

DATA = Path(os.environ.get("AREAL_LIKE_TEST_DATA") or Path(__file__).parents[3].parent / "shared" / "data")
LENGTHS_FILE = DATA / "response_lengths.json"
SEQUENCES_PER_RANK = 256
DEALT = ("micro_batches", "packing_efficiency", "forward_only_share")
"""Metrics of how a batch was dealt, which depends on the number of ranks."""
lengths_of = st.lists(st.integers(1, 120), min_size=1, max_size=60)


@settings(max_examples=num_examples(150), deadline=None)
@given(lengths=lengths_of, num_ranks=st.integers(1, 8), capacity=st.integers(40, 200))
def test_every_sequence_is_dealt_once_and_ranks_have_equally_many_micro_batches(
    lengths: list[int], num_ranks: int, capacity: int
) -> None:
    dealt = deal(lengths, num_ranks, capacity)
    assert len(dealt) == num_ranks
    assert len({len(own) for own in dealt}) == 1
    assert sorted(i for own in dealt for members in own for i in members) == list(range(len(lengths)))
    for own in dealt:
        for members in own:
            assert sum(lengths[i] for i in members) <= capacity or len(members) == 1


@settings(max_examples=num_examples(150), deadline=None)
@given(lengths=lengths_of, capacity=st.integers(120, 400))
def test_closer_packing_never_overfills_and_never_needs_more_than_algorithm_1_did(
    lengths: list[int], capacity: int
) -> None:
    for bins in (pack_closely(lengths, capacity), micro_batches(lengths, capacity)):
        assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in members) <= capacity for members in bins)
    assert len(micro_batches(lengths, capacity)) <= len(pack(lengths, capacity))


@settings(max_examples=num_examples(200), deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 120), st.booleans()), min_size=1, max_size=60),
    num_ranks=st.integers(1, 8),
    capacity=st.integers(40, 200),
)
def test_silent_sequences_come_first_on_every_rank_and_only_where_that_saves_passes(
    sequences: list[tuple[int, bool]], num_ranks: int, capacity: int
) -> None:
    lengths, is_silent = ([one[place] for one in sequences] for place in (0, 1))
    dealt, num_silent = deal_apart(lengths, is_silent, num_ranks, capacity)
    assert len({len(own) for own in dealt}) == 1
    assert sorted(i for own in dealt for members in own for i in members) == list(range(len(lengths)))
    together = len(deal(lengths, num_ranks, capacity)[0])
    if num_silent:
        assert all(
            is_silent[i] == (place < num_silent) for own in dealt for place, members in enumerate(own) for i in members
        )
        assert num_silent + 3 * (len(dealt[0]) - num_silent) < 3 * together
        assert len(dealt[0]) > num_silent  # an update has a gradient
    else:
        assert len(dealt[0]) == together


@pytest.mark.parametrize(("num_silent_sequences", "num_apart"), [(6, 2), (7, 0)])
def test_silent_sequences_are_apart_where_their_passes_cost_less_than_the_backward_pass_they_save(
    num_silent_sequences: int, num_apart: int
) -> None:
    """Four loud ones leave room for four silent ones: together there are five micro-batches, apart four loud ones. Two
    forward passes are less than a forward and a backward pass, which cost as much as three."""
    lengths = [7] * 4 + [3] * num_silent_sequences
    is_silent = [length == 3 for length in lengths]
    assert len(deal(lengths, 1, 10)[0]) == 5
    dealt, num_silent = deal_apart(lengths, is_silent, 1, 10)
    assert num_silent == num_apart
    assert len(dealt[0]) == (6 if num_apart else 5)


def test_closer_packing_finds_what_taking_the_longest_first_misses() -> None:
    lengths = [44, 36, 20, 22, 26, 52, 52, 25, 23]  # 44 + 36 + 20, 52 + 26 + 22, 52 + 25 + 23
    assert len(pack(lengths, 100)) == 4
    assert len(pack_closely(lengths, 100)) == len(micro_batches(lengths, 100)) == 3


@pytest.mark.skipif(not LENGTHS_FILE.is_file(), reason=f"no {LENGTHS_FILE}")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_thinking_lengths_fill_97_percent_of_the_budget_and_ranks_differ_by_less_than_3_percent(
    num_ranks: int,
) -> None:
    sets = json.loads(LENGTHS_FILE.read_text())["measured_datasets"]
    thinking = [one for one in sets if "thinking" in one["kind"]]
    assert thinking
    capacity = max(length for one in thinking for group in one["groups"] for length in group)  # the longest must fit
    for one in thinking:
        known = [length for group in one["groups"] for length in group]
        for seed in range(3):
            lengths = random.Random(seed).choices(known, k=SEQUENCES_PER_RANK * num_ranks)
            dealt = deal(lengths, num_ranks, capacity)
            assert sum(lengths) / (num_ranks * len(dealt[0]) * capacity) >= 0.97, (one["id"], seed)
            tokens = [sum(lengths[i] for members in own for i in members) for own in dealt]
            assert max(tokens) / min(tokens) - 1 < 0.03, (one["id"], seed)


@pytest.mark.skipif(not LENGTHS_FILE.is_file(), reason=f"no {LENGTHS_FILE}")
def test_short_lengths_need_no_more_micro_batches_than_their_tokens_do() -> None:
    """With few micro-batches a rank, rounding up to whole ones is what remains of the budget's waste."""
    sets = json.loads(LENGTHS_FILE.read_text())["measured_datasets"]
    for one in [found for found in sets if "groups" in found and "thinking" not in found["kind"]]:
        known = [max(1, length) for group in one["groups"] for length in group]
        lengths = random.Random(0).choices(known, k=2 * SEQUENCES_PER_RANK)
        capacity = max(known)
        (num,) = {len(own) for own in deal(lengths, 2, capacity)}
        assert num <= -(-sum(lengths) // (2 * capacity)) + 1


# ---------------------------------------------------------------- batches


def _settings(**changes: Any) -> TrainerSettings:
    return TrainerSettings(**{"micro_batch_tokens": 40, "mini_batches": 2, **changes})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean", "constant"])
def test_ranks_share_out_the_batch_of_one_process(aggregation: str, made_samples: Any) -> None:
    samples = made_samples((4, 2, 3, 4, 1))
    chosen = _settings(loss={"aggregation": aggregation, "constant_divisor": 30.0})
    whole = prepare_batch(samples, 3, chosen)
    parts = [prepare_batch(samples, 3, chosen, rank=rank, num_ranks=3) for rank in range(3)]
    for number, mini_batch in enumerate(whole.mini_batches):
        expected = sorted(
            (float(c), float(a))
            for one in mini_batch
            for c, a in zip(one.inputs.coefficient_N, one.inputs.advantage_N, strict=True)
        )
        own = [one for part in parts for one in part.mini_batches[number] if not one.is_dummy]
        found = sorted(
            (float(c), float(a))
            for one in own
            for c, a in zip(one.inputs.coefficient_N, one.inputs.advantage_N, strict=True)
        )
        assert found == expected
        assert len({len(part.mini_batches[number]) for part in parts}) == 1
    common = {key: value for key, value in whole.metrics.items() if key not in DEALT}
    assert all(part.metrics == parts[0].metrics for part in parts)
    assert all(parts[0].metrics[key] == value for key, value in common.items() if key != "rank_imbalance")
    assert whole.metrics["rank_imbalance"] == pytest.approx(0.0)


def test_a_rank_without_sequences_keeps_the_others_company_with_weight_zero(made_samples: Any) -> None:
    samples = made_samples((2,))
    parts = [prepare_batch(samples, 3, _settings(mini_batches=1), rank=rank, num_ranks=3) for rank in range(3)]
    fillers = [one for part in parts for one in part.mini_batches[0] if one.is_dummy]
    assert len(fillers) == 1
    assert not np.any(fillers[0].inputs.coefficient_N.numpy())
