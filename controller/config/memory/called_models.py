"""Memory of declared models with their own weights on a rollout worker's device.

Models on other devices are not counted here; the policy's engine is counted by its descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_like.decoder_shape import DecoderShape, public_shape, shape_of
from areal_like.errors import UserError
from areal_like.weights.adapter_folder import AdapterFolder, read_adapter
from controller.config.engines import fused_parameters, product_widths
from controller.config.model_folder import read_model_config
from controller.config.run_config import CalledModelSettings, RunConfig, by_engine


def called_model_parts(config: RunConfig, shape: DecoderShape) -> Iterator[tuple[str, float]]:
    """Name and bytes of each part: of an engine its weights (of a copy of the policy two sets: one is loaded while the
    other is in use) and a cache for every slot, and of each adapter A and B. shape: shape of the policy. Models of
    unknown size, and adapters that cannot be read, are left out.
    """
    for models in by_engine(config.rollout.models, config.rollout.engine, config.model.dtype):
        one = models[0]
        own = shape if one.path is None else shape_in(one.path)
        if own is None or not _is_on_workers_device(config, one):
            continue
        names = ", ".join(model.name for model in models)
        yield f"model{'s' * (len(models) > 1)} {names}", _bytes(config, one, own)
        adapters = [folder for model in models if (folder := _adapter_of(model)) is not None]
        if adapters:
            widths = product_widths(own.hidden, own.query_width, own.key_width, own.inner)
            yield f"adapters of {names}", float(_width(config, one) * fused_parameters(adapters, widths))


def _is_on_workers_device(config: RunConfig, model: CalledModelSettings) -> bool:
    return model.device is None or model.device == config.rollout.engine.device


def _bytes(config: RunConfig, model: CalledModelSettings, shape: DecoderShape) -> float:
    engine = config.rollout.engine
    sets = 1 if model.refresh_every is None else 2
    places = (model.num_slots or engine.num_slots) * (model.max_context or engine.max_context)
    return float(_width(config, model) * (sets * shape.parameters + 2 * shape.layers * shape.key_width * places))


def _width(config: RunConfig, model: CalledModelSettings) -> int:
    """Bytes of a number."""
    return 2 if (model.dtype or config.rollout.engine.dtype or config.model.dtype) == "bfloat16" else 4


def _adapter_of(model: CalledModelSettings) -> AdapterFolder | None:
    try:
        return read_adapter(Path(model.adapter).expanduser()) if model.adapter else None
    except UserError:
        return None


def shape_in(path: str) -> DecoderShape | None:
    """Shape of the model in a folder or with a public name; None if it is not known."""
    try:
        return shape_of(read_model_config(Path(path).expanduser()))
    except UserError:
        return public_shape(path)
