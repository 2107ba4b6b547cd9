"""The ways of packing that the benchmark compares: nothing is lost, nothing exceeds the budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks import packing


def drawn(num: int, lengths: Sequence[int]) -> list[int]:
    return random.Random(0).choices(lengths, k=num)


@pytest.mark.parametrize("form", packing.FORMS)
def test_every_sequence_is_in_one_micro_batch_within_the_budget(form):
    lengths = drawn(200, range(1, 501))
    bins = packing.FORMS[form](lengths, 2048)
    assert sorted(index for members in bins for index in members) == list(range(200))
    assert max(sum(lengths[i] for i in members) for members in bins) <= 2048


def test_algorithm_1_needs_no_more_micro_batches_than_a_fixed_count():
    lengths = drawn(300, [10, 20, 500])
    needed = {form: len(make(lengths, 1024)) for form, make in packing.FORMS.items()}
    assert needed["algorithm_1"] <= needed["first_fit"] <= needed["fixed_count"]


@pytest.mark.parametrize("form", packing.PADDED)
def test_padded_batches_hold_every_sequence_once_within_the_budget(form):
    lengths = drawn(300, [10, 40, 500])
    batches = packing.PADDED[form](lengths, 2048)
    assert sorted(index for members in batches for index in members) == list(range(300))
    assert max(max(lengths[i] for i in members) * len(members) for members in batches) <= 2048


def test_sorting_leaves_less_to_pad():
    lengths = drawn(300, range(1, 501))
    computed = {
        form: sum(max(lengths[i] for i in members) * len(members) for members in make(lengths, 2048))
        for form, make in packing.PADDED.items()
    }
    assert sum(lengths) < computed["sorted"] < 1.2 * sum(lengths) < computed["padded"]
