"""The losses of training from files, as functions of log-probs and scores.

Shapes: N predicted tokens of a micro-batch, B pairs of a chosen and a rejected answer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from trainer.offline.config import DpoSettings


def supervised_loss(logprobs_N: torch.Tensor, num_targets: float) -> torch.Tensor:
    """Part of the mean negative log-prob over the `num_targets` trained tokens of a whole batch; scalar, nats."""
    return -logprobs_N.sum() / num_targets


def preference_losses(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    reference_chosen_B: torch.Tensor,
    reference_rejected_B: torch.Tensor,
    settings: DpoSettings,
) -> torch.Tensor:
    """Direct preference optimisation: the loss of each pair [B], nats; the reference gets no gradient.

    With d = (c - rc) - (r - rr) of log-probs of complete answers:

    - `sigmoid`: -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s = label_smoothing. arXiv 2305.18290,
      equation 7; s > 0 is conservative DPO (E. Mitchell, 2023).
    - `ipo`: (d - 1 / (2 beta))^2, of log-probs per token, as in TRL. arXiv 2310.12036, equation 17.

    Args:
        chosen_B: log-probs of the chosen answers under the policy: sums over their tokens, for `ipo` means.
        rejected_B: log-probs of the rejected answers.
        reference_chosen_B: as `chosen_B`, under the starting model.
        reference_rejected_B: as `rejected_B`, under the starting model.
        settings: the kind of loss, and beta.
    """
    difference_B = (chosen_B - reference_chosen_B) - (rejected_B - reference_rejected_B)
    if settings.loss == "ipo":
        return (difference_B - 1.0 / (2.0 * settings.beta)).square()
    logit_B, smoothing = settings.beta * difference_B, settings.label_smoothing
    return -(1.0 - smoothing) * logsigmoid(logit_B) - smoothing * logsigmoid(-logit_B)


def bradley_terry_losses(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(c - r) of each pair's scores [B], nats: the negative log-likelihood of the preferences under the
    model of R. A. Bradley and M. E. Terry (1952); arXiv 2203.02155, equation 1.
    """
    return -logsigmoid(chosen_B - rejected_B)
