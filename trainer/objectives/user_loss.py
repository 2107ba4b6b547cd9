"""Loads and calls a loss of the user's, named by import path.

Owns: `load_loss`, `token_loss`. Refuses: trying it before a run (trainer/check_loss.py), and
weights, averaging, KL and entropy (loss.py).

Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from areal_like.errors import UserError
from areal_like.import_check import check_own_module

UserLoss = Callable[..., torch.Tensor]
"""Called as `loss(logprobs_N, tokens, **options)`; returns the loss of each token, [N], to be minimised."""
WHERE = "trainer.loss.kind"


@functools.cache
def load_loss(name: str) -> UserLoss:
    """Import `module:function`. Raises UserError if it cannot be imported or called."""
    module_name, _, function_name = name.partition(":")
    check_own_module(module_name, WHERE)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        what = f"module {module_name} cannot be imported ({type(error).__name__}: {error})"
        raise UserError(what, where=WHERE, remedy="fix the module, or the name") from error
    loss = getattr(module, function_name, None)
    if loss is None:
        raise UserError(f"module {module_name} has no function {function_name}", where=WHERE, remedy="fix the name")
    if not callable(loss):
        raise UserError(f"{name} cannot be called", where=WHERE, remedy="name a function")
    return loss


def token_loss(loss: UserLoss, name: str, logprobs_N: torch.Tensor, tokens: Any, options: dict[str, Any]) -> Any:
    """Call it. Raises UserError unless it returns one number for each token."""
    result_N = loss(logprobs_N, tokens, **options)
    if not isinstance(result_N, torch.Tensor) or result_N.shape != logprobs_N.shape:
        returned = list(result_N.shape) if isinstance(result_N, torch.Tensor) else type(result_N).__name__
        what = f"{name} returned {returned} for {len(logprobs_N)} tokens"
        raise UserError(what, where=WHERE, remedy="return a tensor [N]: the loss of each token, not their mean")
    return result_N
