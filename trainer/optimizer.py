"""AdamW with gradient clipping, a learning rate that is a pure function of the step, and a check for bad gradients.

An update with a gradient that is not finite is skipped and counted; the caller decides whether to stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Return the rate of step 1, 2, ... num_steps (later ones keep the last): linear warm-up, then the schedule.

    During warm-up, step n has the rate lr * n / warmup_steps. `linear` and `cosine` decrease from lr to
    lr * min_lr_ratio at the last step.
    """
    assert step >= 1
    assert num_steps >= 1
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps))
    share = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


@dataclass(frozen=True)
class UpdateResult:
    """The result of one update. grad_norm is measured before clipping; is_applied is False if it was not finite."""

    grad_norm: float
    lr: float
    is_applied: bool


def make_adamw(
    parameters: Iterable[tuple[torch.nn.Parameter, bool]],
    settings: OptimizerSettings,
    *,
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
) -> torch.optim.AdamW:
    """Create AdamW over (parameter, is it a matrix): weight decay applies to matrices, not to biases and norms."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p, is_matrix in parameters if is_matrix], "weight_decay": settings.weight_decay},
        {"params": [p for p, is_matrix in parameters if not is_matrix], "weight_decay": 0.0},
    ]
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


class PolicyOptimizer:
    """AdamW over the parameters of one model that require a gradient, with weight decay for matrices only."""

    def __init__(self, model: torch.nn.Module, settings: OptimizerSettings, num_steps: int) -> None:
        self.settings, self.num_steps = settings, num_steps
        self.skipped_updates = 0
        """Updates skipped since this process started, because the gradient was not finite."""
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(self._named.values())
        self._adamw = make_adamw(((parameter, parameter.ndim >= 2) for parameter in self._parameters), settings)

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        """Clip the gradient by its global norm and apply it with the rate of `step` times `lr_factor`; skip the update
        if the gradient is not finite."""
        lr = lr_factor * learning_rate(self.settings, step, self.num_steps)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self.skipped_updates += 1
            self.zero_grad()
            return UpdateResult(grad_norm, lr, False)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self.settings.max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()
        return UpdateResult(grad_norm, lr, True)

    def move(self, device: torch.device) -> int:
        """Move the state to a device; returns the number of bytes moved. The caller moves the parameters."""
        num_bytes = 0
        for entry in self._adamw.state.values():
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    num_bytes += value.nbytes
                    entry[name] = value.to(device)
        return num_bytes

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return AdamW's state by parameter name, of the parameters that were updated at least once."""
        state = self._adamw.state
        return {name: dict(state[parameter]) for name, parameter in self._named.items() if parameter in state}

    def load_moments(self, read: Callable[[str], dict[str, torch.Tensor]]) -> None:
        """Continue from `moments`; `read(name)` returns the entry of a parameter (empty: it was never updated)."""
        name_of = {parameter: name for name, parameter in self._named.items()}
        order = [name_of[parameter] for group in self._adamw.param_groups for parameter in group["params"]]
        state = {number: entry for number, name in enumerate(order) if (entry := read(name))}
        self.load_state_dict({"state": state, "param_groups": self.state_dict()["param_groups"]})

    def state_dict(self) -> dict[str, Any]:
        """Return torch's AdamW state; the schedule has no state, because it is a function of the step."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of an optimizer over the same parameters in the same order."""
        self._adamw.load_state_dict(state)
        # The moments come from the checkpoint, the hyperparameters from this run's configuration.
        for group in self._adamw.param_groups:
            group["betas"], group["eps"] = (self.settings.beta1, self.settings.beta2), self.settings.eps
            group["weight_decay"] = self.settings.weight_decay if group["params"][0].ndim >= 2 else 0.0
