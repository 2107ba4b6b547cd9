"""Memory of declared models with their own weights on a rollout worker's device.

Models on other devices are not counted here; the policy's engine is counted by its descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_like.decoder_shape import DecoderShape, public_shape, shape_of
from areal_like.errors import UserError
from controller.config.model_folder import read_model_config
from controller.config.run_config import CalledModelSettings, RunConfig


def called_model_parts(config: RunConfig, shape: DecoderShape) -> Iterator[tuple[str, float]]:
    """Name and bytes of each part: weights (a copy of the policy twice: one set is loaded while the other is in use)
    and a cache for every slot. shape: shape of the policy. Models of unknown size are left out.
    """
    for model in config.rollout.models:
        own = shape if model.path is None else shape_in(model.path)
        if model.has_weights and own is not None and _is_on_workers_device(config, model):
            yield f"model {model.name}", _bytes(config, model, own)


def _is_on_workers_device(config: RunConfig, model: CalledModelSettings) -> bool:
    return model.device is None or model.device == config.rollout.engine.device


def _bytes(config: RunConfig, model: CalledModelSettings, shape: DecoderShape) -> float:
    engine = config.rollout.engine
    width = 2 if (model.dtype or engine.dtype or config.model.dtype) == "bfloat16" else 4
    sets = 1 if model.refresh_every is None else 2
    places = (model.num_slots or engine.num_slots) * (model.max_context or engine.max_context)
    return float(width * (sets * shape.parameters + 2 * shape.layers * shape.key_width * places))


def shape_in(path: str) -> DecoderShape | None:
    """Shape of the model in a folder or with a public name; None if it is not known."""
    try:
        return shape_of(read_model_config(Path(path).expanduser()))
    except UserError:
        return public_shape(path)
