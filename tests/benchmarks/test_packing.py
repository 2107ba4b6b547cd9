"""The ways of packing that the benchmark compares: nothing is lost, nothing exceeds the budget."""

from __future__ import annotations

import random

import pytest

from benchmarks import packing


@pytest.mark.parametrize("form", packing.FORMS)
def test_every_sequence_is_in_one_micro_batch_within_the_budget(form):
    lengths = [random.Random(0).randint(1, 500) for _ in range(200)]
    bins = packing.FORMS[form](lengths, 2048)
    assert sorted(index for members in bins for index in members) == list(range(200))
    assert max(sum(lengths[i] for i in members) for members in bins) <= 2048


def test_algorithm_1_needs_no_more_micro_batches_than_a_fixed_count():
    lengths = [random.Random(1).choice([10, 20, 500]) for _ in range(300)]
    needed = {form: len(make(lengths, 1024)) for form, make in packing.FORMS.items()}
    assert needed["algorithm_1"] <= needed["first_fit"] <= needed["fixed_count"]
