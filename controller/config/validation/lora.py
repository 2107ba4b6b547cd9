"""Cross-checks of `trainer.lora` and `warm_start.sft.lora`, and of target modules that a model does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controller.config.backends import REGISTERED, backend_of
from controller.config.problems import Problem, nearest
from controller.config.run_config import ALL_LINEAR, AdapterSettings, RunConfig

PUBLISH_KEY = "trainer.lora.publish"


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
        yield Problem(("trainer.lora", "trainer.backend"), what, f"trainer.backend: {', '.join(able)}, or lora: null")
    if config.emulation is not None:
        yield Problem(("trainer.lora", "emulation"), "an adapter cannot be emulated", "lora: null")
    if lora.publish == "adapter" and config.trainer.weights.transfer.needs_process_group:
        yield Problem(
            (PUBLISH_KEY, "trainer.weights.kind"),
            "a process group loads weights into the engine unchanged, but an adapter has to be merged first",
            "publish: merged, or another trainer.weights.kind",
        )


def no_target_problems(key: str, adapter: AdapterSettings) -> Iterator[Problem]:
    """An adapter on nothing. key: of its section."""
    if not adapter.targets:
        what = "names no module, so nothing would be trained"
        yield Problem((f"{key}.targets",), what, f"targets: [{ALL_LINEAR}]")


def target_problems(config: RunConfig, tensors: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    """Targets that a model does not have. tensors: shapes of its weights by name, from its files."""
    if not tensors:
        return
    modules = {name.removesuffix(".weight") for name, shape in tensors.items() if _is_matrix(name, shape)}
    for key, adapter in _adapters(config).items():
        for target in adapter.targets:
            if target == ALL_LINEAR or any(f".{module}".endswith(f".{target}") for module in modules):
                continue
            ends = sorted({module.rpartition(".")[2] for module in modules})
            near = nearest(target, ends, count=1)
            remedy = f"did you mean {near[0]}?" if near else f"its linear modules are {', '.join(ends) or 'none'}"
            yield Problem((f"{key}.targets", "model.path"), f"the model has no linear module {target}", remedy)


def _adapters(config: RunConfig) -> dict[str, AdapterSettings]:
    """Adapters that are trained, by their key."""
    sft = None if config.warm_start is None else config.warm_start.sft.lora
    known = {"trainer.lora": config.trainer.lora, "warm_start.sft.lora": sft}
    return {key: adapter for key, adapter in known.items() if adapter is not None}


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight of a linear module, head and embedding left out."""
    return name.endswith(".weight") and len(shape) == 2 and not any(part in name for part in ("embed", "lm_head"))
