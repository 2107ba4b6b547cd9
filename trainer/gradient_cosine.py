"""Cosine between the gradients of consecutive updates (GAC, arXiv 2603.01501).

It is only measured here; controller/report/learning.py interprets it.

Without staleness consecutive gradients are nearly orthogonal. Stale samples make them point in the same direction:
updates that were computed against the same old policy repeat one another. In a measured step, the gradient of the first
update is compared with that of the last update of the previous step, which is kept in host memory. Gradients are those
before clipping, of all ranks.
"""

from __future__ import annotations

import math

import torch

from trainer.backends.port import Backend
from trainer.ranks import Ranks
from trainer.staleness_config import GradientCosineSettings


class GradientCosine:
    """Measures the cosine: `begin` a step; `look` before each update; then `metrics`. Collective, on the compute
    thread."""

    def __init__(self, settings: GradientCosineSettings, policy: Backend, ranks: Ranks) -> None:
        self._every, self._policy, self._ranks = settings.every_steps, policy, ranks
        self._kept: tuple[int, dict[str, torch.Tensor]] | None = None
        """Step of the kept gradient, and its copy."""
        self._found: float | None = None

    def begin(self, step: int) -> None:
        """Start a step."""
        self._step, self._is_first, self._found = step, True, None

    def look(self, *, is_last: bool) -> None:
        """Measure or keep the gradient of an update, which is complete. is_last: the last update of the step."""
        if self._is_first and self._kept is not None:
            step, before = self._kept
            if step == self._step - 1 and self._step % self._every == 0:
                self._found = self._cosine(before)
            self._kept = None
        self._is_first = False
        if is_last and (self._step + 1) % self._every == 0:
            own = self._policy.own_gradients()
            self._kept = (self._step, {name: one.to("cpu", copy=True) for name, one in own.items()})

    def metrics(self) -> dict[str, float]:
        """Return the metric; empty if the step is not measured, or a gradient is 0 or not finite."""
        return {} if self._found is None else {"gradient_cosine": self._found}

    def _cosine(self, before: dict[str, torch.Tensor]) -> float | None:
        sums = torch.zeros(3, dtype=torch.float64)
        for name, one in self._policy.own_gradients().items():
            now = one.detach().cpu().double().flatten()
            sums[1] += now.square().sum()
            if name in before:
                sums[0] += now @ before[name].double().flatten()
        sums[2] = sum((one.double().square().sum() for one in before.values()), sums.new_zeros(()))
        product, now_square, before_square = self._ranks.sum(sums.to(self._ranks.device)).tolist()
        norms = math.sqrt(now_square * before_square) if now_square * before_square >= 0 else math.nan
        return product / norms if norms > 0 and math.isfinite(product / norms) else None
