"""The trainer's own step in this process, with weights that can be set and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from areal_like.wire.messages import BatchSample
from benchmarks.objectives.sampler import Weights
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import TrainerSettings
from trainer.model.attention import choose
from trainer.model.model import load_causal_lm
from trainer.objectives.registry import needs_reference
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

CPU = torch.device("cpu")


class Watched(TorchBackend):
    """Keeps the gradient of each update instead of applying it."""

    gradient: torch.Tensor | None = None
    """float64, of all parameters in the order of their names; before clipping."""

    def update(self, step: int, *, lr_factor: float = 1.0) -> UpdateResult:
        own = self.own_gradients()
        shapes = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        found = [own.get(name, torch.zeros_like(shapes[name])).detach().double().flatten() for name in sorted(shapes)]
        self.gradient = torch.cat(found)
        self.zero_grad()
        return UpdateResult(float(self.gradient.norm()), 0.0, True)


class Training:
    """A model and its step. is_watched: gradients are kept and never applied. A reference model is the starting one."""

    def __init__(
        self, model: Path, settings: TrainerSettings, *, num_steps: int, groups: int, is_watched: bool = False
    ) -> None:
        transformers.utils.logging.disable_progress_bar()
        setup = Setup(
            settings, temperature=1.0, num_steps=num_steps, attention=choose("auto", CPU, settings.precision),
            ranks=Ranks.alone(CPU),
        )  # fmt: skip
        self._model = load_causal_lm(model)
        ready_model(self._model, setup)
        self._backend = (Watched if is_watched else TorchBackend)(self._model, setup)
        reference = load_causal_lm(model) if needs_reference(settings.loss, settings.advantage) else None
        self._step = TrainStep(self._backend, setup, groups_per_step=groups, reference=reference)

    def weights(self) -> Weights:
        """A copy."""
        return {name: tensor.detach().clone() for name, tensor in self._backend.full_weights().items()}

    def set_weights(self, weights: Weights) -> None:
        """Continue from these."""
        with torch.no_grad():
            for name, tensor in self._backend.full_weights().items():
                tensor.copy_(weights[name])

    def remember(self, version: int) -> None:
        """The weights are those of `version`: losses may ask for its log-probs later."""
        self._step.remember(version)

    def step(self, samples: Sequence[BatchSample], version: int) -> dict[str, float]:
        """One step from policy `version`; its metrics."""
        return self._step.run(self._step.prepare(samples, version))

    def gradient(self, samples: Sequence[BatchSample], version: int) -> torch.Tensor:
        """The gradient of the whole batch at policy `version`, flat. Only where `is_watched`."""
        assert isinstance(self._backend, Watched)
        self.step(samples, version)
        assert self._backend.gradient is not None
        return self._backend.gradient
