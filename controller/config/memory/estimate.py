"""Estimates the memory of every process of a run on its device and in host memory, part by part, from a config and a
model's shape.

The formulas of a pass are in passes.py, the placement of state in the descriptors of backends and engines, the
comparison with devices in fit.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areal_like.decoder_shape import DecoderShape, public_shape, shape_of
from areal_like.device_names import names_gpu
from controller.config.backends import PassDemand, Share, StateDemand, backend_of, num_replicas
from controller.config.engines import ServingDemand, engine_job, engine_of
from controller.config.memory.called_models import called_model_parts, shape_in
from controller.config.memory.passes import (
    FLOAT32,
    Pass,
    activation_bytes,
    kept_layer_bytes,
    layer_backward_bytes,
    transient_bytes,
)
from controller.config.run_config import RunConfig
from controller.config.trainer_memory import adapter_parameters, outer_share, trainer_state
from controller.config.validation.objectives import has_reference

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
BUILT_IN_VOCABULARY = 259
"""Vocabulary of the tokenizer `bytes`; `characters:` tokenizers have fewer tokens."""
MERGED_VERSIONS = 3
"""Copies of the model per worker if only adapters are transferred: two files and the tensors of the version being
merged.
"""
MEGABYTE = 1e6
COPIED_STATE_BYTES = 12
"""Bytes of one parameter in a checkpoint: itself and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory on the device of one process, or of all processes of a kind. parts: bytes by name, at the peak."""

    name: str
    count: int
    parts: Mapping[str, float]
    needed_bytes: float
    """The minimum with which the process works."""
    words: str = ""
    """Explanation for users."""
    pool: Literal["trainer", "rollout", "both"] = "trainer"
    """`both`: a rank and a worker on one GPU."""

    @property
    def total_bytes(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory estimate of a whole run. host: bytes by name, all processes together."""

    trainer: tuple[ProcessMemory, ...]
    rollout: ProcessMemory
    host: Mapping[str, float]

    @property
    def host_bytes(self) -> float:
        """Sum of the host's parts."""
        return sum(self.host.values())


def shape_of_run(config: RunConfig, model: Mapping[str, Any] | None) -> DecoderShape | None:
    """The shape of a run's model: from its config.json (`model`) if it was read, else from its public name, else from
    `model.init`; None if none of them gives all sizes.
    """
    if model is not None:
        return shape_of(model)
    if config.model.path is not None:
        return public_shape(config.model.path)
    init = dict(config.model.init or {})
    if config.model.tokenizer == "bytes" or config.model.tokenizer.startswith("characters:"):
        init.setdefault("vocab_size", BUILT_IN_VOCABULARY)
    return shape_of(init)


def estimate(config: RunConfig, shape: DecoderShape, device_bytes: float | None = None) -> MemoryEstimate:
    """Estimate the memory of every process. device_bytes: memory of one GPU, if known; an engine may size its cache by
    it.
    """
    trainer = trainer_memory(config, shape)
    rollout = rollout_memory(config, shape, device_bytes)
    return MemoryEstimate(trainer, rollout, host_memory(config, shape))


# ------------------------------------------------------------ trainer


def pass_of(config: RunConfig) -> Pass:
    """A rank's part of the largest micro-batch (`micro_batch_tokens`, or the longest sequence alone), and how it is
    computed.
    """
    trainer, longest = config.trainer, config.rollout.engine.max_context
    is_16_bit, is_cuda = trainer.precision == "bfloat16", names_gpu(trainer.device)
    shared = trainer.sequence_parallel * trainer.tensor_parallel
    num_shares = max(1, trainer.ranks // shared)
    all_tokens = -(-config.trained_groups_per_step * config.group_size // (trainer.mini_batches * num_shares)) * longest
    row = min(max(trainer.micro_batch_tokens, longest), max(all_tokens, longest))
    return Pass(
        tokens=-(-row // shared),
        gathered_tokens=0 if trainer.tensor_parallel == 1 else row - -(-row // shared),
        compute_bytes=2 if is_16_bit else FLOAT32,
        hidden_bytes=2 if is_16_bit and backend_of(config).gathers_in_compute_type else FLOAT32,
        chunk_tokens=trainer.logprob_chunk_tokens,
        is_checkpointed=trainer.gradient_checkpointing,
        has_varlen_kernel=is_cuda and is_16_bit and trainer.attention != "sdpa",
        has_entropy=trainer.loss.entropy_coef > 0,
    )


def pass_demand(config: RunConfig, shape: DecoderShape) -> PassDemand:
    """Input of a backend's memory estimate."""
    return PassDemand(
        parameters=float(shape.parameters),
        matrices=float(shape.layers * shape.layer_matrix_parameters),
        layer=float(shape.layer_parameters),
        outer=float(shape.outer_parameters),
        head=float(shape.vocabulary * shape.hidden),
        compute_bytes=2 if config.trainer.precision == "bfloat16" else FLOAT32,
    )


def trainer_memory(config: RunConfig, shape: DecoderShape) -> tuple[ProcessMemory, ...]:
    """Memory of rank 0, and of the other ranks if rank 0 needs more: it collects the full weights to publish them with
    an adapter merged in."""
    backend, trainer = backend_of(config), config.trainer
    lora = trainer.lora
    outer = outer_share(config, shape)
    state = trainer_state(config, float(shape.parameters), adapter_parameters(config, shape), outer)
    one, is_cuda = pass_of(config), names_gpu(trainer.device)
    share = _fixed_share(config, outer)
    on_device = 0.0 if share.on_host and is_cuda else share.part
    reference = on_device * FLOAT32 * shape.parameters if has_reference(config) and lora is None else 0.0
    teacher = on_device * teacher_bytes(config)
    state_bytes = state.device_bytes if is_cuda else state.device_bytes + state.host_bytes
    fixed = {"weights, gradients, AdamW": state_bytes, "reference model": reference, "teacher": teacher}
    step = fixed | _pass_parts(config, shape, one)
    sent = float(shape.parameters) if lora is None or lora.publish == "merged" else adapter_parameters(config, shape)
    collected = 0.0 if lora is None else backend.publishing_bytes(trainer, sent)
    # between two steps there are no gradients, which are a quarter of the state, or less: an adapter has hardly any
    publishing = {
        "weights, AdamW": state_bytes * (0.75 if lora is None else 1.0),
        "reference model": reference,
        "teacher": teacher,
        "full weights": collected,
    }
    words = f"{one.tokens:,} tokens per micro-batch" + (", activations recomputed" if one.is_checkpointed else "")
    names = f"trainer rank{'s 0 to ' + str(trainer.ranks - 1) if trainer.ranks > 1 else ''}"
    if sum(publishing.values()) <= sum(step.values()) or not collected:
        return (_process(names, trainer.ranks, step, words),)
    leader = _process("trainer rank 0", 1, publishing, "collects the full weights to publish them")
    if trainer.ranks == 1:
        return (leader,)
    others = f"trainer rank{'s' * (trainer.ranks > 2)} 1{f' to {trainer.ranks - 1}' if trainer.ranks > 2 else ''}"
    return (leader, _process(others, trainer.ranks - 1, step, words))


def _pass_parts(config: RunConfig, shape: DecoderShape, one: Pass) -> dict[str, float]:
    """Memory that a pass adds: when the backward pass begins, or when gradients of its second layer are complete and
    the activations of two layers are released, whichever is more.
    """
    backend, trainer, demand = backend_of(config), config.trainer, pass_demand(config, shape)
    kept = activation_bytes(shape, one)
    begin = {
        "gathered or cast": backend.working_bytes(trainer, demand),
        "activations": kept,
        "logits, backward": transient_bytes(shape, one, is_cuda=names_gpu(trainer.device)),
    }
    summing = {
        "gathered or cast": begin["gathered or cast"],
        "gradients being summed": backend.reducing_bytes(trainer, demand),
        "activations": max(0.0, kept - 2 * kept_layer_bytes(shape, one)),
        "logits, backward": layer_backward_bytes(shape, one),
    }
    return max(begin, summing, key=lambda parts: sum(parts.values()))


def teacher_bytes(config: RunConfig) -> float:
    """Bytes of `trainer.teacher.path`, a full float32 model; 0 if there is none or its size is not known."""
    teacher = config.trainer.teacher
    shape = None if teacher is None or teacher.path is None else shape_in(teacher.path)
    return 0.0 if shape is None else float(FLOAT32 * shape.parameters)


def _process(name: str, count: int, parts: Mapping[str, float], words: str) -> ProcessMemory:
    found = {part: num_bytes for part, num_bytes in parts.items() if num_bytes}
    return ProcessMemory(name, count, found, sum(found.values()), words)


# ------------------------------------------------------------ rollout


def cache_token_bytes(config: RunConfig, shape: DecoderShape) -> float:
    """Keys and values of one token: 2 layers K bytes of the engine's type."""
    return 2.0 * shape.layers * shape.key_width * DTYPE_BYTES[engine_job(config).dtype]


def rollout_memory(config: RunConfig, shape: DecoderShape, device_bytes: float | None = None) -> ProcessMemory:
    """Memory of one device of a worker, by its engine's layout, with the models that the worker hosts."""
    job = engine_job(config)
    weights = float(shape.parameters * DTYPE_BYTES[job.dtype])
    demand = ServingDemand(weights, cache_token_bytes(config, shape), device_bytes)
    found = engine_of(config).memory(job, demand)
    devices, count = engine_of(config).devices_per_worker(job.settings), config.rollout.num_workers
    name = f"rollout worker{'s' * (count > 1)}" + (f", each of {devices} GPUs" if devices > 1 else "")
    models = dict(called_model_parts(config, shape))
    needed_bytes = found.needed_bytes + sum(models.values())
    return ProcessMemory(name, count, {**found.parts, **models}, needed_bytes, found.words, "rollout")


# ------------------------------------------------------------ host


def host_memory(config: RunConfig, shape: DecoderShape) -> Mapping[str, float]:
    """Host memory of all processes together, at its largest.

    Loading: every rank reads the whole float32 model first (4 bytes per parameter and rank), unless its backend reads
    parts; later parts may reuse this memory. Publishing: the copy that is transferred, and the versions kept in shared
    memory. SGLang: the folder of a staged version, per worker. Adapters transferred alone: whole versions, merged by
    each worker. Checkpoints: a copy of every rank's part (12 bytes per trained parameter).
    """
    trainer, parameters = config.trainer, float(shape.parameters)
    adapter, lora = adapter_parameters(config, shape), trainer.lora
    outer = outer_share(config, shape)
    state, is_cuda = trainer_state(config, parameters, adapter, outer), names_gpu(trainer.device)
    whole = parameters * DTYPE_BYTES[config.model.dtype]
    is_lone = lora is not None and lora.publish == "adapter"
    version = FLOAT32 * adapter if is_lone else whole
    models = 1 if trainer.critic is None else 2
    trained = parameters * models if lora is None else adapter + parameters * (models - 1)
    num_whole = models - (lora is None and backend_of(config).reads_parts(trainer))
    loading = FLOAT32 * parameters * num_whole * trainer.ranks if is_cuda else 0.0
    has_checkpoints = bool(trainer.checkpoint.every_steps or trainer.checkpoint.every_s)
    kept = trainer.weights.keep if trainer.weights.place == "shm" else 0
    staged = config.rollout.num_workers if engine_of(config).environment is not None and kept else 0
    running = {
        "trainer state": state.host_bytes * trainer.ranks,
        "copy to publish": version,
        "versions kept": kept * version,
        "staged for engines": staged * whole,
        "merged by workers": MERGED_VERSIONS * config.rollout.num_workers * whole if is_lone else 0.0,
        "checkpoint": COPIED_STATE_BYTES * trained if has_checkpoints else 0.0,
        "fixed models": _fixed_bytes(config, parameters, outer) if is_cuda else 0.0,
        "earlier versions": _earlier_versions(config, FLOAT32 * adapter if lora is not None else whole),
        "earlier gradient": FLOAT32 * (adapter if lora is not None else parameters) if trainer.gradient_cosine else 0.0,
    }
    running["loading"] = max(0.0, loading - sum(running.values()))
    return {name: num_bytes for name, num_bytes in running.items() if num_bytes}


def _fixed_share(config: RunConfig, outer: float) -> Share:
    """A rank's share of a model that is not trained. Where matrices are split, it is laid out as the trained one."""
    backend, trainer = backend_of(config), config.trainer
    if trainer.tensor_parallel == 1:
        return backend.fixed(trainer)
    return backend.state(trainer, StateDemand(0.0, 0.0, outer)).weights


def _fixed_bytes(config: RunConfig, parameters: float, outer: float) -> float:
    """Bytes of the reference model and the teacher that all ranks together keep in host memory."""
    share = _fixed_share(config, outer)
    if not share.on_host:
        return 0.0
    reference = FLOAT32 * parameters if has_reference(config) and config.trainer.lora is None else 0.0
    return share.part * config.trainer.ranks * (reference + teacher_bytes(config))


def _earlier_versions(config: RunConfig, version_bytes: float) -> float:
    """Bytes for `trainer.version_logprobs`, all ranks together: the newest version, the buffer in which an older one is
    restored, and the older ones, each at most a version, within the limit `memory_mb` of each rank. Each replica of
    FSDP2 keeps its own.
    """
    settings = config.trainer.version_logprobs
    if settings is None:
        return 0.0
    version_bytes *= num_replicas(config.trainer)
    older = min((settings.keep - 1) * version_bytes, settings.memory_mb * MEGABYTE * config.trainer.ranks)
    return 2 * version_bytes + older
