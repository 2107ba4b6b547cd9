"""`python -m trainer.check_loss IN OUT`: whether the user's loss can be imported and used.

Owns: trying it on a few tokens, in a short-lived process, so that a mistake is found before a run starts
(areal_like/user_check.py says what IN and OUT hold). Refuses: loading it (trainer/objectives/user_loss.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from areal_like.errors import UserError
from areal_like.user_check import answer
from trainer.objectives.loss import TokenInputs
from trainer.objectives.user_loss import WHERE, load_loss, token_loss


def check_loss(name: str, options: dict[str, Any]) -> None:
    """Call it on four tokens. Raises UserError unless shape, loss and gradient are usable."""
    loss = load_loss(name)
    behaviour_N = torch.tensor([-0.1, -0.7, -2.0, -0.4])
    tokens = TokenInputs(
        behaviour_N=behaviour_N,
        advantage_N=torch.tensor([1.0, 1.0, -1.0, -0.5]),
        staleness_N=torch.tensor([0.0, 1.0, 2.0, 0.0]),
        coefficient_N=torch.full((4,), 0.25),
        proximal_N=behaviour_N + 0.01,
    )
    logprobs_N = (behaviour_N - 0.02).requires_grad_()
    try:
        result_N = token_loss(loss, name, logprobs_N, tokens, options)
        if not result_N.requires_grad:
            raise UserError(f"{name} has no gradient", where=WHERE, remedy="compute the loss from logprobs_N")
        (gradient_N,) = torch.autograd.grad(result_N.sum(), logprobs_N, allow_unused=True)
    except UserError:
        raise
    except Exception as error:  # as above: the user's own code
        what = f"{name} failed on four tokens ({type(error).__name__}: {error})"
        raise UserError(what, where=WHERE, remedy="it is called as loss(logprobs_N, tokens, **options)") from error
    if gradient_N is None:
        raise UserError(f"{name} has no gradient", where=WHERE, remedy="compute the loss from logprobs_N")
    if not (result_N.isfinite().all() and gradient_N.isfinite().all()):
        raise UserError(f"{name} has a loss or gradient that is not finite", where=WHERE, remedy="bound the ratio")


if __name__ == "__main__":
    answer(Path(sys.argv[1]), Path(sys.argv[2]), check_loss)
