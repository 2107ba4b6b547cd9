"""Minimum memory of the trainer's state: weights, gradients and AdamW's moments. Pure.

The placement of state is in the backend's descriptor. Activations and logits are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.decoder_shape import DecoderShape, public_shape, shape_of
from areal_like.device_names import names_cpu, names_gpu
from controller.config.backends import StateDemand, backend_of, num_replicas
from controller.config.problems import Problem
from controller.config.run_config import ALL_LINEAR, RunConfig
from controller.run_folder.units import size_text

WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Bytes of one parameter in float32: itself, its gradient, AdamW's two moments."""
LARGEST_GPU_BYTES = 300e9
"""Largest memory of any GPU on sale (288 GB in 2026)."""


@dataclass(frozen=True)
class TrainerState:
    """Bytes of the state of one rank, on its device and in host memory."""

    device_bytes: float
    host_bytes: float
    words: str
    """Description of the placement, for users."""


def parameters_of(config: RunConfig, model: Mapping[str, Any] | None) -> float | None:
    """Number of parameters of a run's model; None if not known. model: the config of model.path, if read."""
    if model is None and config.model.path is not None:  # on the hub, not downloaded yet
        shape = public_shape(config.model.path)
        return None if shape is None else float(shape.parameters)
    return num_parameters(model or config.model.init or {})


def num_parameters(model: Mapping[str, Any]) -> float | None:
    """Number of parameters of a decoder with this transformers config; None if it does not give the sizes.

    Of a multimodal model only the text part counts. Of a mixture of experts all experts count: all of them are trained.
    """
    shape = shape_of(model)
    return None if shape is None else float(shape.parameters)


def adapter_parameters(config: RunConfig, shape: DecoderShape | None) -> float:
    """Number of parameters of the adapter that `trainer.lora` trains: rank (in + out) for each target module,
    identified by the last part of its name, in every layer; 0 if there is no adapter, or the shape is not known.
    Experts of a mixture have no adapter.
    """
    lora = config.trainer.lora
    if lora is None or shape is None:
        return 0.0
    query, key, hidden = shape.query_width, shape.key_width, shape.hidden
    widths = {"q_proj": hidden + query, "k_proj": hidden + key, "v_proj": hidden + key, "o_proj": query + hidden}
    if shape.experts == 1:
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + shape.inner)
    ends = {target.rpartition(".")[2] for target in lora.targets}
    is_all = ALL_LINEAR in ends
    return float(lora.rank * shape.layers * sum(width for name, width in widths.items() if is_all or name in ends))


def outer_share(config: RunConfig, shape: DecoderShape | None) -> float:
    """The part of the parameters that `trainer.tensor_parallel` does not split: all but the matrices of the layers."""
    if shape is None or config.trainer.tensor_parallel == 1:
        return 0.0
    return 1 - shape.layers * shape.layer_matrix_parameters / shape.parameters


def trainer_state(config: RunConfig, parameters: float, adapter: float = 0.0, outer: float = 0.0) -> TrainerState:
    """The state of one rank, by its backend's layout.

    parameters: number of the policy's parameters; a critic has the same number. adapter: number of the parameters of
    `trainer.lora`; with an adapter the policy's own parameters have neither gradients nor moments. outer: see
    outer_share.
    """
    has_critic, has_lora = config.trainer.critic is not None, config.trainer.lora is not None
    trained = adapter + parameters * has_critic if has_lora else parameters * (1 + has_critic)
    held = trained + parameters * has_lora
    ranks, whole = config.trainer.ranks, WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES
    num_bytes = trained * whole + (held - trained) * WEIGHT_BYTES
    layout = backend_of(config).state(config.trainer, StateDemand(num_bytes, LARGEST_GPU_BYTES, outer))
    terms = (
        (held * WEIGHT_BYTES, layout.weights),
        (trained * GRADIENT_BYTES, layout.gradients),
        (trained * MOMENT_BYTES, layout.moments),
    )
    on_device = sum(num_bytes * share.part for num_bytes, share in terms if not share.on_host)
    on_host = sum(num_bytes * share.part for num_bytes, share in terms if share.on_host)
    words = f"{trained / 1e9:.3g}G {'parameters of policy and critic' if has_critic else 'parameters'}"
    if has_lora:
        words = f"{parameters / 1e9:.3g}G frozen parameters x {WEIGHT_BYTES} bytes and {trained / 1e9:.3g}G trained"
    if layout.words:
        words += f", {layout.words}"
    else:
        words += f" x {whole} bytes" + (f" / {ranks} ranks" if ranks > 1 else "")
        words += ", in host memory" if not on_device else ""
    return TrainerState(on_device, on_host, words)


def memory_problem(config: RunConfig, state: TrainerState, device_bytes: float | None) -> Problem | None:
    """Problem if the trainer's state does not fit. device_bytes: memory of one rank's device; None: not known."""
    if not names_gpu(config.trainer.device) or config.emulation is not None:
        return None
    if backend_of(config).adapts_to_memory and device_bytes is not None:
        return None
    most = LARGEST_GPU_BYTES if device_bytes is None else device_bytes
    if state.device_bytes <= most:
        return None
    room = f"no known GPU has more than {size_text(most)}" if device_bytes is None else f"its GPU has {size_text(most)}"
    return Problem(
        ("trainer.backend", "trainer.ranks", "model.path"),
        f"weights, gradients and AdamW's state of one rank take {size_text(state.device_bytes)} ({state.words}),"
        f" but {room}",
        _remedy(config, state.device_bytes, most),
    )


def host_problem(config: RunConfig, state: TrainerState, host_bytes: float) -> Problem | None:
    """Problem if the state of all ranks that is kept in host memory does not fit this machine."""
    is_on_cpu = names_cpu(config.trainer.device)
    need = (state.device_bytes if is_on_cpu else state.host_bytes) * config.trainer.ranks
    if need <= host_bytes or config.emulation is not None:
        return None
    return Problem(
        ("trainer.ranks", "trainer.device", "model.path"),
        f"weights, gradients and AdamW's state of the trainer take {size_text(need)} of host memory ({state.words}),"
        f" but this machine has {size_text(host_bytes)}",
        "use a smaller model, or a machine with more memory",
    )


def _remedy(config: RunConfig, need: float, most: float) -> str:
    replicas = num_replicas(config.trainer)
    ranks = -(-int(need * config.trainer.ranks) // int(most))
    ranks = -(-ranks // replicas) * replicas
    return f"set trainer.backend: fsdp and trainer.ranks: {ranks} or more, or use a smaller model"
