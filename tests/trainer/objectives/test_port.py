"""Sums over the sequences of a packed micro-batch, and descriptors that need no torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from trainer.objectives.port import Sequences
from trainer.objectives.registry import ADVANTAGES, OBJECTIVES


def test_sums_means_and_maxima_go_by_sequence_and_carry_gradients() -> None:
    rng = np.random.default_rng(0)
    lengths = [3, 1, 5, 2]
    ids_N = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    values_N = torch.from_numpy(rng.normal(size=11)).requires_grad_()
    parts = np.split(values_N.detach().numpy(), np.cumsum(lengths)[:-1])
    sequences = Sequences(ids_N, 4)
    assert sequences.lengths_S.tolist() == lengths
    np.testing.assert_allclose(sequences.sum(values_N).detach(), [part.sum() for part in parts])
    np.testing.assert_allclose(sequences.max(values_N).detach(), [part.max() for part in parts])
    mean_S = sequences.mean(values_N)
    np.testing.assert_allclose(mean_S.detach(), [part.mean() for part in parts])
    sequences.spread(mean_S.square()).sum().backward()
    expected = np.concatenate([np.full(len(part), 2 * part.mean()) for part in parts])  # L * 2 m * dm/dx, dm/dx = 1/L
    np.testing.assert_allclose(values_N.grad, expected)


def test_registry_can_be_imported_without_torch() -> None:
    script = "import sys, trainer.objectives.registry, controller.config.loading; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize("table", [OBJECTIVES, ADVANTAGES])
def test_names_are_unique_and_those_of_the_table(table: dict[str, object]) -> None:
    assert all(one.name == name for name, one in table.items())  # type: ignore[attr-defined]
