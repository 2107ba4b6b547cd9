"""Formulas of training from files against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.offline.config import DpoSettings
from trainer.offline.objectives import bradley_terry_losses, preference_losses, supervised_loss


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def test_supervised_loss_is_the_mean_negative_logprob_of_the_batch(random: np.random.Generator) -> None:
    logits, targets = random.normal(size=(9, 5)), random.integers(0, 5, size=9)
    logp_N = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(9), targets]
    tensor = torch.from_numpy(logp_N)
    halves = [supervised_loss(part, 9.0) for part in (tensor[:4], tensor[4:])]
    assert float(sum(halves)) == pytest.approx(-logp_N.mean(), abs=1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def pairs(random: np.random.Generator) -> list[np.ndarray]:
    """Log-probs of chosen and rejected answers, under the policy and under the starting model."""
    return [-random.exponential(9.0, size=6) for _ in range(4)]


def torch_losses(parts: list[np.ndarray], **settings: object) -> torch.Tensor:
    chosen, rejected, reference_chosen, reference_rejected = map(torch.from_numpy, parts)
    return preference_losses(
        chosen, rejected, reference_chosen, reference_rejected, DpoSettings.model_validate(settings)
    )


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_equation_7_with_and_without_smoothing(
    random: np.random.Generator, beta: float, smoothing: float
) -> None:
    c, r, rc, rr = parts = pairs(random)
    logit = beta * (np.log(np.exp(c - rc)) - np.log(np.exp(r - rr)))
    expected = -(1 - smoothing) * np.log(sigmoid(logit)) - smoothing * np.log(sigmoid(-logit))
    found = torch_losses(parts, beta=beta, label_smoothing=smoothing)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_ipo_is_the_squared_distance_to_its_margin(random: np.random.Generator, beta: float) -> None:
    c, r, rc, rr = parts = pairs(random)
    found = torch_losses(parts, loss="ipo", beta=beta)
    np.testing.assert_allclose(found.numpy(), ((c - r) - (rc - rr) - 0.5 / beta) ** 2, rtol=0, atol=1e-6)


def test_gradient_of_dpo_is_that_of_its_section_4(random: np.random.Generator) -> None:
    c, r, rc, rr = pairs(random)
    chosen, rejected = torch.tensor(c, requires_grad=True), torch.tensor(r, requires_grad=True)
    losses = preference_losses(chosen, rejected, torch.tensor(rc), torch.tensor(rr), DpoSettings(beta=0.5))
    losses.sum().backward()
    weight = 0.5 * sigmoid(0.5 * ((r - rr) - (c - rc)))
    assert chosen.grad is not None
    assert rejected.grad is not None
    np.testing.assert_allclose(chosen.grad.numpy(), -weight, atol=1e-6)
    np.testing.assert_allclose(rejected.grad.numpy(), weight, atol=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "smoothed", "ipo", "bradley_terry"])
def test_gradients_are_those_of_finite_differences(random: np.random.Generator, loss: str) -> None:
    settings = DpoSettings(
        loss="ipo" if loss == "ipo" else "sigmoid", beta=0.3, label_smoothing=0.2 if loss == "smoothed" else 0.0
    )
    parts = [torch.from_numpy(random.normal(size=6)) for _ in range(4)]

    def value(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        if loss == "bradley_terry":
            return bradley_terry_losses(chosen, rejected).sum()
        return preference_losses(chosen, rejected, parts[2], parts[3], settings).sum()

    chosen, rejected = (part.clone().requires_grad_() for part in parts[:2])
    found = torch.stack(torch.autograd.grad(value(chosen, rejected), (chosen, rejected)))
    step, expected = 1e-6, torch.zeros(2, 6, dtype=torch.float64)
    for side in range(2):
        for place in range(6):
            ends = []
            for shift in (step, -step):
                moved = [part.clone() for part in parts[:2]]
                moved[side][place] += shift
                ends.append(value(*moved))
            expected[side, place] = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_bradley_terry_is_the_negative_log_likelihood_of_the_preference(random: np.random.Generator) -> None:
    chosen, rejected = random.normal(size=7), random.normal(size=7)
    expected = -np.log(np.exp(chosen) / (np.exp(chosen) + np.exp(rejected)))
    found = bradley_terry_losses(torch.from_numpy(chosen), torch.from_numpy(rejected))
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)


def test_losses_of_far_apart_answers_stay_finite() -> None:
    far = torch.tensor([-1e4, 0.0], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.float64)
    assert torch.isfinite(preference_losses(far, far.flip(0), zeros, zeros, DpoSettings(beta=1.0))).all()
    assert torch.isfinite(bradley_terry_losses(far, far.flip(0))).all()
