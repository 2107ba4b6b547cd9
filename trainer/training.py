"""The trained policy and everything that changes with it, without any network: open, step, publish, save, export.

Owns: the order in which model, optimizer, checkpoint and weight store are touched, and the version they are at.
Refuses: messages and waiting (worker.py), the mathematics (step.py).

Every method but `prepare` runs on the one compute thread; `prepare` touches no model and may run beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pydantic
import torch
import transformers

from areal_like.config import ProcessSpec
from areal_like.errors import OperationError, UserError
from areal_like.messages import BatchSample
from trainer import checkpoint
from trainer.attention import AttentionChoice, choose, register
from trainer.batch import PreparedBatch
from trainer.checkpoint import CheckpointState
from trainer.config import TrainerSettings
from trainer.export import export_policy
from trainer.model import load_causal_lm, num_parameters
from trainer.optimizer import PolicyOptimizer
from trainer.publish import snapshot
from trainer.publish_delta import VersionWriter, Written
from trainer.step import TrainStep
from trainer.training_state import (
    generator_states,
    restore_generators,
    restore_training_state,
    write_training_state,
)

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 3
"""Consecutive steps with a skipped update (a gradient that is not finite) that end the run."""


class Spans(Protocol):
    """The part of areal_like.trace.Tracer used here."""

    def span(self, name: str, lane: str = "main", **args: Any) -> AbstractContextManager[Any]:
        """Time a block."""


def trainer_settings(spec: ProcessSpec) -> TrainerSettings:
    """The trainer's own section of `spec`. Raises UserError."""
    try:
        return TrainerSettings.model_validate(spec.settings)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("trainer", *first["loc"]))
        raise UserError(first["msg"], where=key, remedy="see areal-like validate") from error


class Training:
    """One policy in training. `open` first; then `prepare` and `run` step by step."""

    def __init__(self, spec: ProcessSpec, spans: Spans | None = None) -> None:
        self.spec, self.settings = spec, trainer_settings(spec)
        self.run_dir = Path(spec.run_dir)
        self.version = -1
        self.counters: dict[str, float] = {"steps": 0.0, "tokens": 0.0, "skipped_updates": 0.0}
        self._spans = spans
        self._saved: Path | None = None
        self._bad_steps = 0

    # ------------------------------------------------------------ start

    def open(self) -> None:
        """Load the model, or the checkpoint named by `resume_from`; afterwards `version` is what it holds.

        Raises UserError for a bad model folder or kernel, WeightError for a damaged checkpoint.
        """
        transformers.utils.logging.disable_progress_bar()
        register()
        spec, settings = self.spec, self.settings
        assert spec.model.path is not None, "the controller hands a prepared folder"
        self._source = Path(spec.model.path)
        resumed = Path(spec.resume_from) if spec.resume_from else None
        state = None
        if resumed is not None:
            checkpoint.verify(resumed)
            state = checkpoint.read_state(resumed)
            self._source = resumed
        self.model = load_causal_lm(self._source, device=settings.device)
        self.attention = choose(settings.attention, self.model.device, settings.precision)
        self.optimizer = PolicyOptimizer(self.model, settings.optimizer, spec.num_steps)
        reference = None
        if settings.loss.kl_coef > 0:
            reference = load_causal_lm(Path(spec.model.path), device=settings.device)
        self._step = TrainStep(
            self.model,
            self.optimizer,
            settings,
            temperature=spec.sampling.temperature,
            groups_per_step=spec.groups_per_step,
            reference=reference,
            attention=self.attention,
            tracer=self._spans,
        )
        if resumed is not None and state is not None:
            self._restore(resumed, state)
        else:
            self.version = 0
        self._writer = VersionWriter(Path(spec.weight_dir), settings.weights)
        self._record_setup(self.attention)

    def _restore(self, folder: Path, state: CheckpointState) -> None:
        restore_training_state(folder, self.optimizer)
        restore_generators(state.generators)
        self.version = state.version
        self.counters |= state.counters
        if folder == checkpoint.checkpoint_folder(self.run_dir, state.version):
            self._saved = folder
        if state.config_digest != self._digest():
            log.warning("settings differ from those the checkpoint was made with: the run continues with the new ones")
        log.info("resumed version %d of lineage %s from %s", state.version, state.lineage, folder)

    def _record_setup(self, attention: AttentionChoice) -> None:
        setup = {
            "attention": attention.name,
            "attention_reason": attention.reason,
            "disagreement_nats": self._step.disagreement_nats,
            "device": str(self.model.device),
            "precision": self.settings.precision,
            "parameters": num_parameters(self.model),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        log.info("attention: %s (%s)", attention.name, attention.reason)
        log.info("setup: %s", setup)
        file = self.run_dir / "trainer.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(setup, indent=1) + "\n")

    # ------------------------------------------------------------ steps

    def prepare(self, samples: Sequence[BatchSample], step: int) -> PreparedBatch:
        """Pack the batch of `step`. Touches no model; any thread."""
        return self._step.prepare(samples, step - 1)

    def run(self, prepared: PreparedBatch) -> dict[str, float]:
        """One step: version n - 1 becomes n. Returns its metrics.

        Raises OperationError when updates had to be skipped in several steps in a row.
        """
        assert prepared.step == self.version + 1, f"batch of step {prepared.step} at version {self.version}"
        started_s = time.perf_counter()
        metrics = self._step.run(prepared)
        metrics["step_s"] = time.perf_counter() - started_s
        self.version += 1
        self.counters["steps"] += 1
        self.counters["tokens"] += metrics["tokens"]
        self.counters["skipped_updates"] += metrics["skipped_updates"]
        self._bad_steps = self._bad_steps + 1 if metrics["skipped_updates"] else 0
        if self._bad_steps:
            log.warning("step %d: the gradient was not finite, the update was skipped", self.version)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise OperationError(
                f"the gradient was not finite in {self._bad_steps} steps in a row (up to step {self.version}): the "
                "policy or the data are damaged; resume from an earlier checkpoint with a lower trainer.optimizer.lr"
            )
        return metrics

    # ------------------------------------------------------------ what it leaves behind

    def publish(self) -> Callable[[], Written]:
        """Copy the present version. What is returned writes the copy into the weight store; it touches no model and may
        run on another thread, one version at a time.
        """
        version, lineage = self.version, self.spec.lineage
        tensors = snapshot(self.model, dtype=self.spec.model.dtype)
        return lambda: self._writer.write(version, lineage, tensors)

    @property
    def setup_words(self) -> str:
        """What was chosen, for the screen."""
        return f"attention {self.attention.name} ({self.attention.reason})"

    @property
    def is_saved(self) -> bool:
        """True where a checkpoint of the present version is on disk."""
        return self._saved == checkpoint.checkpoint_folder(self.run_dir, self.version)

    def save(self) -> Path:
        """A checkpoint of the present version, unless there is one. Raises OperationError when the disk refuses."""
        if self._saved is None or not self.is_saved:
            state = CheckpointState(
                version=self.version,
                lineage=self.spec.lineage,
                run_id=self.spec.run_id,
                config_digest=self._digest(),
                counters=dict(self.counters),
                generators=generator_states(),
            )
            self._saved = checkpoint.save(
                self.run_dir,
                state,
                lambda folder: write_training_state(folder, self.model, self.optimizer, self._companions()),
                keep=self.settings.checkpoint.keep,
            )
        return self._saved

    def export(self) -> Path:
        """The policy as a Hugging Face folder <run>/final, in the model's dtype."""
        return export_policy(self.model, self._companions(), self.run_dir / "final", dtype=self.spec.model.dtype)

    def _companions(self) -> Path:
        """Where tokenizer and generation config lie: the prepared folder, or a checkpoint if that one is gone."""
        prepared = Path(self.spec.model.path or "")
        return prepared if prepared.is_dir() else self._saved or self._source

    def _digest(self) -> str:
        facts = self.spec.model_dump(
            mode="json",
            include={"seed", "mode", "sampling", "staleness", "groups_per_step", "group_size", "num_steps", "settings"},
        )
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
