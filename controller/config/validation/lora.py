"""Cross-checks of `trainer.lora` and `warm_start.sft.lora`, and of target modules that a model does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areal_like.config import ModelSettings
from areal_like.weights.adapter_folder import is_linear
from controller.config.backends import REGISTERED, backend_of
from controller.config.problems import Problem, nearest
from controller.config.run_config import ALL_LINEAR, AdapterSettings, RunConfig

PUBLISH_KEY = "trainer.lora.publish"
NAMED_AS_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers have LAYER_MODULES and no other linear modules."""
MANY_LAYERS = 1_000
LAYER_MODULES = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the adapters' settings. Pure."""
    for key, adapter in _adapters(config).items():
        yield from no_target_problems(key, adapter)
    lora, backend = config.trainer.lora, backend_of(config)
    if lora is None:
        return
    if not backend.trains_adapters:
        able = [name for name, known in REGISTERED.items() if known.trains_adapters]
        what = f"{config.trainer.backend} cannot train an adapter"
        yield Problem(
            ("trainer.lora", "trainer.backend"), what, f"set trainer.backend to {' or '.join(able)}, or set lora: null"
        )
    if config.emulation is not None:
        yield Problem(("trainer.lora", "emulation"), "emulated devices cannot train an adapter", "set lora: null")
    if lora.publish == "adapter" and config.trainer.weights.transfer.needs_process_group:
        yield Problem(
            (PUBLISH_KEY, "trainer.weights.kind"),
            "a process group writes weights directly into the engine, but a published adapter must first be merged "
            "into the starting model",
            "set publish: merged, or choose a different trainer.weights.kind",
        )


def no_target_problems(key: str, adapter: AdapterSettings) -> Iterator[Problem]:
    """An adapter on nothing. key: of its section."""
    if not adapter.targets:
        what = "the list contains no module, so nothing would be trained"
        yield Problem((f"{key}.targets",), what, f"set targets: [{ALL_LINEAR}]")


def target_problems(config: RunConfig, tensors: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Targets of a run with rollouts that its model does not have. tensors: as in `missing_targets`."""
    return missing_targets(_adapters(config), config.model, tensors)


def missing_targets(
    adapters: Mapping[str, AdapterSettings], model: ModelSettings, tensors: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Targets that a model does not have. adapters: by their key. tensors: shapes of the weights of `model.path` by
    name; empty: not known. A model that is made from `model.init` has none, but the modules of many types are known.
    """
    if model.path is None:
        tensors = made_weights(model.init or {})
    if not tensors:
        return
    modules = {name.removesuffix(".weight") for name, shape in tensors.items() if is_linear(name, shape)}
    for key, adapter in adapters.items():
        for target in adapter.targets:
            if target == ALL_LINEAR or any(f".{module}".endswith(f".{target}") for module in modules):
                continue
            ends = sorted({module.rpartition(".")[2] for module in modules})
            near = nearest(target, ends, count=1)
            remedy = f"did you mean {near[0]}?" if near else f"its linear modules are {', '.join(ends) or 'none'}"
            source = "model.init" if model.path is None else "model.path"
            yield Problem((f"{key}.targets", source), f"the model has no linear module {target}", remedy)


def made_weights(init: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of the linear modules of a model that is made from a config, without their shapes; none if its type
    is not known."""
    layers = init.get("num_hidden_layers")
    if init.get("model_type") not in NAMED_AS_LLAMA or not isinstance(layers, int) or layers > MANY_LAYERS:
        return {}
    return {f"model.layers.{layer}.{module}.weight": () for layer in range(layers) for module in LAYER_MODULES}


def _adapters(config: RunConfig) -> dict[str, AdapterSettings]:
    """Adapters that are trained, by their key."""
    sft = None if config.warm_start is None else config.warm_start.sft.lora
    known = {"trainer.lora": config.trainer.lora, "warm_start.sft.lora": sft}
    return {key: adapter for key, adapter in known.items() if adapter is not None}
