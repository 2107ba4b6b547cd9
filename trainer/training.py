"""The trained policy and its state, without the controller: open, step, publish, save, export.

It defines the order in which model, optimizer, checkpoint and weight store are used, and their version. Messages are in
worker.py, the mathematics in step.py, and the distribution of a model over ranks in backends/.

Every method except `prepare` runs on the compute thread; `prepare` uses no model and may run in parallel.
With several ranks each has a Training, and all do the same: rank 0 first sends an order to the others, whose
follower.py then calls the same method. Only rank 0 writes files, except that each rank may write its own part of a
checkpoint (rank_parts.py).

`publish` and `save` make a copy and return at once. They return a function that does the rest and may run on another
thread, in parallel with the next step: one version at a time, one checkpoint at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import torch
import transformers
from transformers import PreTrainedModel

from areal_like.config import ProcessSpec
from areal_like.device_names import names_gpu
from areal_like.errors import PolicyDiverged, UserError
from areal_like.plain_folder import plain_until_exit
from areal_like.process import freeze_heap
from areal_like.weights.adapter import AdapterInfo
from areal_like.weights.payload_layout import TensorBytes
from areal_like.wire.messages import BatchSample, RunPosition
from trainer.adapter import PolicyAdapter, check_kind, kept
from trainer.adapter_check import AdapterCheck
from trainer.backends.choice import choose_backend, share_sequences
from trainer.backends.descriptor import BackendDescriptor
from trainer.backends.port import Setup
from trainer.backends.replicas import num_replicas
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.colocation import SharedDevices
from trainer.config import DEFAULT_BACKEND, TrainerSettings
from trainer.critic import Critic
from trainer.critic_start import make_critic
from trainer.critic_state import critic_parts, restore_critic_moments
from trainer.data.batch import PreparedBatch
from trainer.export import TORCH_DTYPES, export_policy, first_named, named_tensors
from trainer.gathered import gathered
from trainer.host_copy import Copied, HostCopy, Part
from trainer.model.attention import choose, register
from trainer.model.model import num_parameters
from trainer.objectives.registry import needs_reference
from trainer.peer_errors import peer_errors_as_rank_lost
from trainer.policy_start import load_fixed, load_policy, ready_backend
from trainer.rank_parts import RankParts, check_shared
from trainer.ranks import Order, Ranks, own_device
from trainer.step import Spans, TrainStep
from trainer.training_state import (
    ModelFiles,
    PolicyFiles,
    check_architecture,
    export_gathered,
    generator_states,
    is_plain,
    restore_generators,
    restore_training_state,
    saved_parts,
    torch_generators,
    write_model_facts,
    write_training_state,
)
from trainer.weights.publish import first_not_finite, snapshot
from trainer.weights.version_parts import VersionParts
from trainer.weights.version_writer import VersionWriter, Written

log = logging.getLogger(__name__)

MAX_ADAPTERS = 4
"""Number of adapters of past versions that are kept for comparison with engines."""
MAX_BAD_STEPS = 3
"""Consecutive steps with a skipped update (a gradient that is not finite) that end the run."""


class Saved(NamedTuple):
    """A checkpoint on disk. write_s: from the copy to its completion."""

    folder: Path
    num_bytes: int
    write_s: float


def trainer_settings(spec: ProcessSpec) -> TrainerSettings:
    """Return the trainer's section of `spec`. Raises UserError."""
    try:
        return TrainerSettings.model_validate(spec.settings)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("trainer", *first["loc"]))
        raise UserError(first["msg"], where=key, remedy="see areal-like validate") from error


def hardware_of(device: str) -> str:
    """Return the kind of hardware that determines the bits of a result: the GPU's name, or the CPU's vector units."""
    if names_gpu(device):
        return torch.cuda.get_device_name(torch.device(device))
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


class Training:
    """One policy in training. Call `open` first; then `prepare` and `run` for each step."""

    def __init__(self, spec: ProcessSpec, spans: Spans | None = None) -> None:
        self.spec, self.settings = spec, trainer_settings(spec)
        self.run_dir = Path(spec.run_dir)
        self.version = -1
        self.ranks = Ranks.alone()
        self.counters: dict[str, float] = {"steps": 0.0, "tokens": 0.0, "skipped_updates": 0.0}
        self.staleness: Counter[int] = Counter()
        """Groups trained on, by their staleness, along the lineage of the current version."""
        self._positions: dict[int, RunPosition] = {}
        """Positions by step, of the batches that are prepared and not yet trained on."""
        self._position = RunPosition()
        self._spans = spans
        self._adapter: PolicyAdapter | None = None
        self._adapter_check: AdapterCheck | None = None
        self._critic: Critic | None = None
        self._critic_folder: Path | None = None
        """The checkpoint with the critic, if training continues from one."""
        self._copy = HostCopy()
        self._parts: VersionParts | None = None
        """This rank's part of the newest version, if versions are written from parts."""
        self._rank_parts: RankParts | None = None
        """Set if each rank writes its own part of a checkpoint."""
        self._saved: Path | None = None
        self._bad_steps = 0
        self._is_settled = False

    # ------------------------------------------------------------ start

    def open(self) -> None:
        """Load the model, or the checkpoint named by `resume_from`; afterwards `version` is the loaded version.

        Raises UserError for a bad model folder or kernel, WeightError for a damaged checkpoint.
        """
        transformers.utils.logging.disable_progress_bar()
        register()
        spec = self.spec
        assert spec.model.path is not None, "the controller passes a prepared folder"
        self._source = Path(spec.model.path)
        resumed = Path(spec.resume_from) if spec.resume_from else None
        state = None
        if resumed is not None:
            checkpoint.verify(resumed, share=spec.rank, num_shares=spec.num_ranks)
            state = checkpoint.read_state(resumed)
            plain = plain_until_exit(resumed)
            self.spec = spec.model_copy(update={"resume_from": str(plain)})
            check_kind(plain, self.settings.lora)
            if self.settings.lora is None:
                check_architecture(plain, self._source)
                self._source = plain
            self._critic_folder = plain if state.version > 0 else None
        self._build()
        if state is not None:
            assert resumed is not None
            self._restore(plain, state, resumed)
        else:
            self.version = 0
        if self._adapter_check is not None:
            self._adapter_check.remember(self.version)
        self._step.remember(self.version)
        if self.ranks.is_leader:
            self._writer = VersionWriter(Path(spec.weight_dir), self.settings.weights)

    def _build(self) -> None:
        """Create model, backend and step; the choices and their reasons are written to trainer.json."""
        spec = self.spec
        device = own_device(self.settings.device, spec)
        is_taken = spec.is_colocated and spec.is_device_taken  # moved there when it is the trainer's turn
        model_device = "cpu" if is_taken or spec.num_ranks > 1 else str(device)
        lora = self.settings.lora
        model, parts = load_policy(self._source, self.settings, device=model_device, is_whole=lora is not None)
        num_whole = num_parameters(model)
        if lora is not None:
            self._adapter = PolicyAdapter.add(model, lora, spec)
        num_models = 1 if self.settings.critic is None else 2
        num_trained, num_frozen = num_parameters(model, is_trained=True), num_parameters(model, is_trained=False)
        num_critic = (num_models - 1) * num_whole
        choice = choose_backend(self.settings, num_trained + num_critic, device, num_frozen=num_frozen)
        self.settings = choice.settings
        self.ranks = self._meet(choice.descriptor)
        share_sequences(self.ranks, choice, model)
        self.attention = choose(self.settings.attention, device, self.settings.precision)
        setup = Setup(
            self.settings, spec.sampling.temperature, spec.num_steps, self.attention, self.ranks, spec.max_context,
            source=parts,
        )  # fmt: skip
        adapter = self._adapter
        self._files: PolicyFiles = ModelFiles.of(model) if adapter is None else adapter.files(model)
        self.policy, disagreement_nats = ready_backend(choice.descriptor, model, setup)
        setup = replace(setup, source=None)
        self._critic = make_critic(choice.descriptor, setup, self._source, self._critic_folder, device=model_device)
        fixed_device = "cpu" if is_taken else str(device)
        reference = teacher = None
        if needs_reference(self.settings.loss, self.settings.advantage) and adapter is None:
            reference = load_fixed(Path(spec.model.path or ""), choice.descriptor, setup, device=fixed_device)
        if self.settings.teacher is not None and self.settings.teacher.path is not None:
            teacher = load_fixed(Path(self.settings.teacher.path), choice.descriptor, setup, device=fixed_device)
        self._step = TrainStep(
            self.policy, setup, groups_per_step=spec.groups_per_step, reference=reference, teacher=teacher,
            critic=self._critic, tracer=self._spans, before_update=self._fence, version_dtype=spec.model.dtype,
        )  # fmt: skip
        if self.ranks.has_group and adapter is None:
            self._parts = VersionParts(
                self.ranks, TORCH_DTYPES[spec.model.dtype], bucket_bytes=self.settings.bucket_bytes,
                timeout_s=self.settings.rank_timeout_s,
            )  # fmt: skip
        if self.ranks.size > 1 and self.settings.checkpoint.parts == "every_rank" and is_plain(self._files):
            with peer_errors_as_rank_lost("checking the folder of checkpoints"):
                check_shared(self.ranks, checkpoint.checkpoint_folder(self.run_dir, 0).parent)
            self._rank_parts = RankParts.of(self.ranks)
        self._devices = SharedDevices(
            self.policy, [one for one in (reference, teacher) if isinstance(one, PreTrainedModel)], device,
            is_shared=spec.is_colocated, ranks=self.ranks, tracer=self._spans,
            critic=None if self._critic is None else self._critic.backend,
        )  # fmt: skip
        if adapter is not None:
            most = spec.staleness.max_staleness
            num_versions = MAX_ADAPTERS if most == "unbounded" else min(int(most) + 2, MAX_ADAPTERS)
            self._adapter_check = AdapterCheck(
                self.policy, self.ranks, num_versions=num_versions, dtype=spec.model.dtype, fence=self._copy.fence
            )
        self._backend_words = f"{choice.name} ({choice.reason})"
        self._record_setup(
            {
                "backend": choice.name,
                "backend_reason": choice.reason,
                "ranks": self.ranks.size,
                "sequence_parallel": self.settings.sequence_parallel,
                "tensor_parallel": self.settings.tensor_parallel,
                "replicas": num_replicas(self.settings),
                "attention": self.attention.name,
                "attention_reason": self.attention.reason,
                "disagreement_nats": disagreement_nats,
                "device": str(device),
                "precision": self.settings.precision,
                "parameters": num_trained + num_frozen,
                "parameters_trained": num_trained,
                "models_trained": num_models,
            }
        )

    def _meet(self, backend: BackendDescriptor) -> Ranks:
        """Join the other ranks, if the backend has any."""
        settings = self.settings
        if not backend.needs_process_group:
            return Ranks.alone(settings.device)
        return Ranks.join(
            self.spec,
            settings.device,
            timeout_s=settings.rank_timeout_s,
            order_timeout_s=settings.max_batch_wait_s + settings.rank_timeout_s,
        )

    def _fence(self) -> None:
        """Make the next update wait for the copies that are being made."""
        self._copy.fence()
        if self._parts is not None:
            self._parts.fence()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; with several ranks its parameters may be sharded."""
        return self.policy.model

    def _restore(self, plain: Path, state: CheckpointState, folder: Path) -> None:
        """Restore a checkpoint. plain: its folder, or a decrypted copy of it."""
        restore_training_state(plain, self.policy)
        if self._critic is not None and self._critic_folder is not None:
            restore_critic_moments(self._critic_folder, self._critic.backend)
        restore_generators(state.generators)
        self.version = state.version
        self.counters |= state.counters
        self.staleness, self._position = Counter(state.staleness), state.position
        if folder == checkpoint.checkpoint_folder(self.run_dir, state.version):
            self._saved = folder
        if state.config_digest != self._digest():
            log.warning("the settings differ from those of the checkpoint; the run continues with the new settings")
        log.info("resumed version %d of lineage %s from %s", state.version, state.lineage, folder)

    def _record_setup(self, chosen: dict[str, Any]) -> None:
        setup = {
            **chosen,
            "hardware": hardware_of(str(chosen["device"])),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for what in ("backend", "attention"):
            log.info("%s: %s (%s)", what, setup[what], setup[f"{what}_reason"])
        log.info("setup: %s", setup)
        if self.ranks.is_leader:
            file = self.run_dir / "trainer.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(setup, indent=1) + "\n")

    # ------------------------------------------------------------ steps

    def prepare(self, samples: Sequence[BatchSample], step: int, position: RunPosition | None = None) -> PreparedBatch:
        """Pack this rank's part of the batch of `step`; rank 0 sends it to the others. Uses no model; any thread."""
        if position is not None:
            self._positions[step] = position
        self.ranks.send_batch(samples, step, self.spec.lineage)
        return self._step.prepare(samples, step - 1)

    def run(self, prepared: PreparedBatch) -> dict[str, float]:
        """Run one step: version n - 1 becomes n. Returns its metrics.

        Raises PolicyDiverged if updates had to be skipped in several consecutive steps.
        """
        assert prepared.step == self.version + 1, f"batch of step {prepared.step} at version {self.version}"
        started_s = time.perf_counter()
        self.ranks.tell(Order.STEP)
        self._devices.take()
        with peer_errors_as_rank_lost("training together"):
            checked = {} if self._adapter_check is None else self._adapter_check.look(prepared)
            metrics = {**self._step.run(prepared), **checked}
        metrics["step_s"] = time.perf_counter() - started_s
        self.version += 1
        if self._adapter_check is not None:
            self._adapter_check.remember(self.version)
        self._step.remember(self.version)
        self.counters["steps"] += 1
        if not self._is_settled:  # torch imports modules in the first step
            freeze_heap()
            self._is_settled = True
        self.counters["tokens"] += metrics["tokens"]
        num_skipped = metrics["skipped_updates"] + metrics.get("critic_skipped_updates", 0.0)
        self.counters["skipped_updates"] += num_skipped
        self._position = self._positions.pop(self.version, self._position)
        self.staleness.update(self._position.staleness)
        self._bad_steps = self._bad_steps + 1 if num_skipped else 0
        if self._bad_steps:
            log.warning("step %d: the gradient was not finite; the update was skipped", self.version)
        if self._bad_steps >= MAX_BAD_STEPS:
            what = f"the gradient was not finite in {self._bad_steps} steps in a row, up to step {self.version}"
            raise PolicyDiverged(self.version - self._bad_steps, what)
        return metrics

    def watch_gradients(self, watcher: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
        """Call `watcher` before each update with this rank's part of its gradient, before clipping: the policy's by
        name, the critic's with `critic/` before the name. Only with backends that give gradients; after `open`."""

        def look() -> None:
            critic = {} if self._critic is None else self._critic.backend.own_gradients()
            watcher({**self.policy.own_gradients(), **{f"critic/{name}": one for name, one in critic.items()}})

        self._step.watcher = look

    # ------------------------------------------------------------ versions, checkpoints and exports

    def publish(self) -> Callable[[], Written]:
        """Copy the current version. The returned function writes the copy into the weight store; it uses no model and
        may run on another thread, one version at a time. Only rank 0 has a copy to write.
        Raises PolicyDiverged instead of publishing values that are not finite.
        """
        version, lineage = self.version, self.spec.lineage
        if self._parts is not None:
            bad = self._take_parts(self._parts)
            self._devices.leave()
            if bad is not None:
                raise PolicyDiverged(version, f"{bad} contains a value that is not finite")
            parts = self._parts
            return lambda: self._writer.write(version, lineage, parts)
        if self.ranks.is_leader:
            self._writer.release()
        self.ranks.tell(Order.PUBLISH)
        with peer_errors_as_rank_lost("gathering the weights"):
            adapter = self._adapter
            policy = self._weights_in_parts(None if adapter is None else adapter.is_published) or self.model
        tensors: dict[str, TensorBytes] = {}
        note: AdapterInfo | None = None
        if self.ranks.is_leader and adapter is not None:
            tensors, note = adapter.version_of(named_tensors(policy))
        elif self.ranks.is_leader:
            tensors = snapshot(policy, dtype=self.spec.model.dtype)
        self._devices.leave()
        if (name := first_not_finite(tensors)) is not None:
            raise PolicyDiverged(version, f"{name} contains a value that is not finite")
        return lambda: self._writer.write(version, lineage, tensors, note)

    def _take_parts(self, parts: VersionParts) -> str | None:
        """Copy this rank's part of the current version; returns the name of a tensor that is not finite."""
        with parts.turn():
            if self.ranks.is_leader:
                self._writer.release()
            self.ranks.tell(Order.PUBLISH)
            return self._copy_part(parts)

    def _copy_part(self, parts: VersionParts) -> str | None:
        with peer_errors_as_rank_lost("copying the weights"):
            bad = parts.take(self.version, self.policy.parts(), list(first_named(self.model)))
        if self.spec.is_colocated:  # the device's memory is released next
            parts.wait()
        return bad

    def publish_again(self, version: int) -> Written | None:
        """Write this version again, in full, from the copy in memory; returns None if it is no longer the newest.

        Uses no model; may run on another thread, but not in parallel with the function returned by `publish`. Raises
        WeightError.
        """
        if self._parts is not None and self._parts.version != version:
            return None
        return self._writer.write_again(version, self.spec.lineage)

    @property
    def setup_description(self) -> str:
        """The choices of attention and backend, for the screen."""
        words = f"attention {self.attention.name} ({self.attention.reason})"
        return words if self.settings.backend == DEFAULT_BACKEND else f"{words}; backend {self._backend_words}"

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint of this lineage on disk."""
        return self._saved

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint of the current version is on disk."""
        return self._saved == checkpoint.checkpoint_folder(self.run_dir, self.version)

    def save(self) -> Callable[[], Saved]:
        """Copy the state of the current version. The returned function writes a checkpoint of it; it uses no model.

        That function raises OperationError if writing fails; `is_saved` is true once it has returned. On ranks other
        than 0 it writes this rank's part, or sends it to rank 0.
        """
        self.ranks.tell(Order.SAVE)
        started_s = time.perf_counter()
        critic = [] if self._critic is None else critic_parts(self._critic.backend)
        policy = self._saved_parts()
        copied = self._copy.take([*policy, *critic])
        if not self.ranks.is_leader:
            folder = checkpoint.checkpoint_folder(self.run_dir, self.version)
            return lambda: self._give_part(copied, folder)
        state = CheckpointState(
            version=self.version,
            lineage=self.spec.lineage,
            run_id=self.spec.run_id,
            config_digest=self._digest(),
            counters=dict(self.counters),
            generators=generator_states(),
            position=self._position,
            staleness=dict(sorted(self.staleness.items())),
        )
        generators, source = torch_generators(), self._companions()
        return lambda: self._write(state, copied, generators, source, started_s)

    def _write(
        self,
        state: CheckpointState,
        copied: Copied,
        generators: dict[str, torch.Tensor],
        source: Path,
        started_s: float,
    ) -> Saved:
        settings, files = self.settings.checkpoint, self._files
        retention = Retention(keep=settings.keep, every_s=settings.keep_every_s)
        if self._rank_parts is not None:
            assert isinstance(files, ModelFiles)
            folder, num_bytes = self._rank_parts.lead(
                self.run_dir, state, copied, generators, lambda partial: write_model_facts(partial, files, source),
                retention,
            )  # fmt: skip
        else:
            with gathered(copied, self.ranks.saves, self.settings.bucket_bytes) as tensors:
                folder, num_bytes = checkpoint.save(
                    self.run_dir,
                    state,
                    lambda partial: write_training_state(partial, tensors, generators, files, source),
                    retention,
                )
        self._saved = folder
        return Saved(folder, num_bytes, time.perf_counter() - started_s)

    def _saved_parts(self) -> list[Part]:
        """Return this rank's part of what a checkpoint has of the policy."""
        parts = self.policy.parts()
        if self._adapter is not None:
            return kept(parts)
        return parts if self._rank_parts is None else saved_parts(self._files, parts)

    def _give_part(self, copied: Copied, folder: Path) -> Saved:
        """Write this rank's part, or send it to rank 0."""
        started_s = time.perf_counter()
        if self._rank_parts is not None:
            self._rank_parts.follow(copied)
        else:
            assert self.ranks.saves is not None
            self.ranks.saves.serve(copied)
        return Saved(folder, len(copied.buffer_U), time.perf_counter() - started_s)

    def export(self) -> Path:
        """Export the policy as a Hugging Face folder <run>/final, in the model's dtype."""
        target = self.run_dir / "final"
        if self._parts is not None and isinstance(self._files, ModelFiles):
            self._export_parts(self._parts, self._files, target)
            return target
        self.ranks.tell(Order.EXPORT)
        with peer_errors_as_rank_lost("gathering the weights"):
            weights: Mapping[str, torch.Tensor] | None = self._weights_in_parts()
        if self.ranks.is_leader:
            if self._adapter is not None:
                weights = self._adapter.merged(weights or named_tensors(self.model))
            export_policy(
                self.model, self._companions(), target, dtype=self.spec.model.dtype, weights=weights,
                checkpoint=self._saved,
            )  # fmt: skip
        return target

    def _export_parts(self, parts: VersionParts, files: ModelFiles, target: Path) -> None:
        """Export from the copy of the current version, which was published in the same dtype."""
        with parts.turn():
            self.ranks.tell(Order.EXPORT)
            if parts.version != self.version:
                self._copy_part(parts)
            if self.ranks.is_leader:
                with parts.gathered(self.version) as weights:
                    export_gathered(
                        files, weights, self._companions(), target, dtype=self.spec.model.dtype, checkpoint=self._saved
                    )

    def close(self) -> None:
        """End training on all ranks; afterwards nothing may be called."""
        self.ranks.end_batches()
        self.ranks.tell(Order.END)
        if self._parts is not None:
            self._parts.close()
        self.ranks.close()

    def _weights_in_parts(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor] | None:
        """Return the full tensors if the model has only parts of them; is_wanted: filter by name."""
        if not self.ranks.has_group:
            return None
        return self.policy.full_weights() if is_wanted is None else self.policy.full_weights(is_wanted)

    def _companions(self) -> Path:
        """The folder of tokenizer and generation config: the prepared folder, or a checkpoint if that one is gone."""
        prepared = Path(self.spec.model.path or "")
        return prepared if prepared.is_dir() else self._saved or self._source

    def _digest(self) -> str:
        facts = self.spec.model_dump(
            mode="json",
            include={"seed", "mode", "sampling", "staleness", "groups_per_step", "group_size", "num_steps", "settings"},
        )
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
