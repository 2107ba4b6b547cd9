"""Answers of forced lengths, through a whole run: what benchmarks compare on lengths that no model of theirs has."""

from __future__ import annotations

from collections import defaultdict

import pytest

from areal_like.emulation.lengths import NamedDraws, thinking
from controller.ledger.sample_reader import read_samples
from controller.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.e2e


def test_every_answer_has_the_length_that_its_name_gives(areal, quickstart, short):
    run = areal(
        "train", quickstart, *short, "num_steps=2", "warm_start=null", "filter_zero_signal=false",
        "sampling.forced_lengths=thinking@24", "sampling.max_new_tokens=60",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    stats = read_samples(RunFolder(run.folder).ledger, max_samples=1000)
    assert stats is not None
    found = defaultdict(list)
    for group, length in zip(stats.group.tolist(), stats.length.tolist(), strict=True):
        found[group].append(length)
    length_of = NamedDraws(thinking(60, 24), seed=1)
    expected = {group: sorted(length_of(group, index) for index in range(1, 5)) for group in found}
    assert {group: sorted(lengths) for group, lengths in found.items()} == expected
    assert len({length for lengths in expected.values() for length in lengths}) > 5
