"""Training on emulated GPUs: the same steps, batches, versions and checkpoints, with a backend that only takes time.

It determines when a step may begin; its duration is computed in backends/emulated.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal_like.config import ProcessSpec
from areal_like.wire.messages import BatchSample, RunPosition
from trainer.backends.emulated import EmulatedBackend
from trainer.backends.port import Setup
from trainer.colocation import SharedDevices
from trainer.data.batch import PreparedBatch
from trainer.model.attention import choose
from trainer.model.model import load_causal_lm, num_parameters
from trainer.ranks import Ranks
from trainer.step import TrainStep
from trainer.training import Spans, Training
from trainer.training_state import ModelFiles


class EmulatedTraining(Training):
    """A Training whose passes and updates are emulated; its single process represents all of the trainer's GPUs."""

    def __init__(self, spec: ProcessSpec, spans: Spans | None = None) -> None:
        super().__init__(spec, spans)
        assert spec.emulation is not None, "real devices are trained on by Training"
        self._emulation = spec.emulation
        self._ready_s: dict[int, float] = {}
        """Time when the batch of a step was packed; monotonic."""

    def _build(self) -> None:
        """Create the tiny model, whose weights are published, and the backend."""
        spec, emulation = self.spec, self._emulation
        model = load_causal_lm(self._source, device="cpu")
        self.ranks = Ranks.alone()
        self._files = ModelFiles.of(model)
        self.attention = choose("sdpa", self.ranks.device, "float32")
        setup = Setup(self.settings, spec.sampling.temperature, spec.num_steps, self.attention, self.ranks)
        self._backend = self.policy = EmulatedBackend(model, setup, emulation)
        self._step = TrainStep(self.policy, setup, groups_per_step=spec.groups_per_step, tracer=self._spans)
        self._devices = SharedDevices(self.policy, (), self.ranks.device, is_shared=False, tracer=self._spans)
        what = f"{emulation.trainer_gpus} {emulation.gpu} for {emulation.model}"
        self._backend_words = f"emulated ({what})"
        self._record_setup(
            {
                "backend": "emulated",
                "backend_reason": f"{what}, emulated {emulation.speedup:g} times as fast; nothing is learned",
                "ranks": 1,
                "attention": self.attention.name,
                "attention_reason": "nothing is computed",
                "device": f"emulated:{emulation.gpu}",
                "precision": self.settings.precision,
                "parameters": num_parameters(model),
            }
        )

    @property
    def setup_description(self) -> str:
        """The emulated setup, for the screen."""
        return f"trainer {self._backend_words}"

    def prepare(self, samples: Sequence[BatchSample], step: int, position: RunPosition | None = None) -> PreparedBatch:
        """See Training."""
        prepared = super().prepare(samples, step, position)
        self._ready_s[step] = time.monotonic()
        return prepared

    def run(self, prepared: PreparedBatch) -> dict[str, float]:
        """See Training; the step ends when the emulated GPUs would be done."""
        began_s = self._backend.begin(self._ready_s.pop(prepared.step))
        metrics = super().run(prepared)
        metrics["emulated_step_s"] = self._backend.due_s - began_s
        self.counters |= self._backend.lateness.counters()
        return metrics
