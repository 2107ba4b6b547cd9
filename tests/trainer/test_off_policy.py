"""The distance between the current policy and the one that sampled, against a NumPy oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.off_policy import off_policy, share


def batch(behaviour: list[list[float]], lengths: list[list[int]]) -> Any:
    """Micro-batches with these recorded log-probs, and the lengths of their sequences; the last one is a dummy."""
    micro_batches = []
    for values, sizes in zip([*behaviour, [9.0]], [*lengths, [1]], strict=True):
        sequence_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        one = SimpleNamespace(
            inputs=SimpleNamespace(behaviour_N=torch.tensor(values)), is_dummy=len(micro_batches) == len(behaviour),
            packed=SimpleNamespace(lengths=sizes, sequence_N=sequence_N),
        )  # fmt: skip
        one.to = lambda device, one=one: one
        micro_batches.append(one)
    return SimpleNamespace(mini_batches=[micro_batches[:1], micro_batches[1:]])


def test_ess_of_tokens_and_answers_and_kl_are_those_of_numpy() -> None:
    behaviour, lengths = [[-1.0, -2.0, -0.5], [-3.0, -0.1]], [[1, 2], [2]]
    current = [[-1.5, -1.0, -0.5], [-2.0, -0.4]]
    made = iter(current)

    def logprobs(packed: Any, *, with_entropy: bool) -> Any:
        assert not with_entropy
        assert not torch.is_grad_enabled()
        return torch.tensor(next(made)), None

    found = off_policy(batch(behaviour, lengths), SimpleNamespace(logprobs=logprobs), torch.device("cpu"))  # type: ignore[arg-type]
    d = np.subtract(np.concatenate(current), np.concatenate(behaviour))
    token_w, answer_w = np.exp(d), np.exp([d[0], d[1] + d[2], d[3] + d[4]])
    assert found["ess"] == pytest.approx(token_w.sum() ** 2 / (5 * (token_w**2).sum()), rel=1e-5)
    assert found["answer_ess"] == pytest.approx(answer_w.sum() ** 2 / (3 * (answer_w**2).sum()), rel=1e-5)
    assert found["kl_nats"] == pytest.approx(np.mean(np.exp(d) - d - 1), rel=1e-5)


def test_a_share_neither_overflows_nor_depends_on_a_common_factor() -> None:
    assert share(torch.tensor([1000.0, 1000.0], dtype=torch.float64)) == 1.0
    assert share(torch.tensor([-5000.0, -4000.0], dtype=torch.float64)) == 0.5
