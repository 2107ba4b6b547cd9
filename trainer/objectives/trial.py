"""Calls a user's loss once on a few tokens, before anything is trained with it.

It is imported in own_code.py; its options and combinations are checked in registry.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from areal_like.errors import UserError
from trainer.config import LossSettings
from trainer.objectives.loss import checked, policy_loss
from trainer.objectives.own_code import CORRECTION_KEY, LOSS_KEY
from trainer.objectives.port import Needs, Recalled, Sequences, TokenInputs, TokenLoss
from trainer.objectives.registry import ChosenLoss, loss_of
from trainer.objectives.step_statistics import step_statistics
from trainer.objectives.versions import with_version_logprobs


def try_loss(settings: LossSettings) -> None:
    """Call the loss on four tokens of two sequences. Raises UserError unless shape, loss and gradient are usable."""
    name, chosen = settings.kind, loss_of(settings)
    behaviour_N = torch.tensor([-0.1, -0.7, -2.0, -0.4])
    current_N = (behaviour_N - 0.02).requires_grad_()
    tokens = _four_tokens(behaviour_N, chosen)
    try:
        tokens = replace(tokens, step=step_statistics(chosen, [tokens], list))
        whole = with_version_logprobs(tokens, behaviour_N)
        own = checked(chosen.objective.loss(current_N, whole, chosen.options), current_N, name)
        result_N = own.policy_N if own.unweighted_N is None else own.policy_N + own.unweighted_N
        if not result_N.requires_grad:
            raise UserError(
                f"the result of {name} has no gradient", where=LOSS_KEY, remedy="compute the loss from logprobs_N"
            )
        (gradient_N,) = torch.autograd.grad(result_N.sum(), current_N, allow_unused=True)
    except UserError:
        raise
    except Exception as error:  # the user's code
        what = f"{name} failed on four tokens ({type(error).__name__}: {error})"
        raise UserError(
            what,
            where=LOSS_KEY,
            remedy="check the code of the function, which is called as loss(logprobs_N, tokens, **options)",
        ) from error
    if gradient_N is None:
        raise UserError(
            f"the result of {name} has no gradient", where=LOSS_KEY, remedy="compute the loss from logprobs_N"
        )
    if not (result_N.isfinite().all() and gradient_N.isfinite().all()):
        raise UserError(
            f"{name} returned a loss or gradient that is not finite",
            where=LOSS_KEY,
            remedy="limit the importance ratio, for example with torch.clamp",
        )
    _check_whole(own, settings, tokens, chosen)


def _four_tokens(behaviour_N: torch.Tensor, chosen: ChosenLoss) -> TokenInputs:
    needs = chosen.needs
    return TokenInputs(
        behaviour_N=behaviour_N,
        advantage_N=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        staleness_N=torch.tensor([0.0, 1.0, 2.0, 2.0]),
        coefficient_N=torch.full((4,), 0.25),
        proximal_N=behaviour_N + (0.0 if needs.proximal == "behaviour" else 0.01),
        reference_N=behaviour_N - 0.03 if needs.reference else None,
        values_N=torch.tensor([0.5, 0.4, -0.1, 0.0]) if needs.values else None,
        target_N=torch.tensor([1.0, 1.0, -1.0, -1.0]) if needs.values else None,
        entropy_N=torch.tensor([1.0, 1.2, 0.3, 0.5], requires_grad=True) if needs.entropy else None,
        sequences=Sequences(torch.tensor([0, 0, 1, 1]), 2) if needs.sequences else None,
        is_cut_N=torch.tensor([False, False, True, True]),
        recalled=_recalled(behaviour_N, needs) if needs.versions else None,
    )


def _recalled(behaviour_N: torch.Tensor, needs: Needs) -> Recalled:
    """Inputs in which the second token's version is recalled and the last two tokens' version is not kept."""
    is_recalled_N = torch.tensor([False, True, False, False])
    mixture_N = behaviour_N - 1.4 if needs.mixture else None
    return Recalled(behaviour_N + 0.005, is_recalled_N, torch.tensor([False, False, True, True]), mixture_N, 0.75)


def _check_whole(own: TokenLoss, settings: LossSettings, tokens: TokenInputs, chosen: ChosenLoss) -> None:
    """Check the corrections, and that no metric has the name of a built-in one, which it would replace."""
    reported = {*own.token_metrics, *own.sequence_metrics}
    with torch.no_grad():
        try:
            total, sums = policy_loss(tokens.behaviour_N, torch.zeros(4), tokens, settings, chosen)
        except UserError:
            raise
        except Exception as error:  # a user's correction
            what = f"a correction failed on four tokens ({type(error).__name__}: {error})"
            remedy = "check the code of the function, which is called as correction(tokens, **options)"
            raise UserError(what, where=CORRECTION_KEY, remedy=remedy) from error
    if not total.isfinite():
        raise UserError(
            "a correction returned a value that is not finite",
            where=CORRECTION_KEY,
            remedy="limit the weights that the correction returns, for example with torch.clamp",
        )
    ours = set(sums.without_own().metrics(1))
    for metric in sorted(reported & ours):
        what = f"{settings.kind} returned the metric {metric}, whose name is reserved"
        raise UserError(what, where=LOSS_KEY, remedy="rename the metric")
