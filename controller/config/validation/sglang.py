"""Options of SGLang that cannot go together, or not with this device, model or loss, each with its reason.

Owns: those rules. Refuses: what the environment lacks (preflight.py), arguments that its version does not know
(rollout/engine/sglang/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.weight_transfer import transfer_of

KEY = "rollout.engine.sglang"
QUANTIZED_FAMILIES = ("qwen2", "qwen3")
"""Model types whose fp8 weights SGLang 0.5.23 can replace by a new version."""
PROVEN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose layout inside SGLang is known (rollout/engine/sglang/layout.py)."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang keeps as one."""
LAUNCH_ONLY = (
    "port", "tp_size", "memory_fraction", "quantization", "unquantized_layers", "kv_cache_dtype", "deterministic",
    "release_idle_s", "routed_experts", "checksums", "arguments", "environment",
)  # fmt: skip
"""Options that say how a server is launched."""


def option_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions among `rollout.engine.sglang`'s options. To be asked where SGLang is the engine."""
    yield from _attached(config)
    yield from _device(config)
    yield from _rounded(config)
    yield from _layers(config)
    yield from _proof(config)
    if config.model.init is not None:
        yield from model_problems(config, config.model.init)


def model_problems(config: RunConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """What the model's config.json (or `model.init`) has against the options."""
    sglang, family = config.rollout.engine.sglang, model.get("model_type")
    if config.rollout.engine.kind != "sglang":
        return
    if sglang.quantization != "none" and family not in QUANTIZED_FAMILIES:
        yield Problem(
            (f"{KEY}.quantization", "model"),
            f"SGLang cannot load new versions into a quantised {family}",
            f"quantization: none (or a model of type {' or '.join(QUANTIZED_FAMILIES)})",
        )
    transfer = transfer_of(config)
    if transfer is not None and transfer.needs_process_group and family not in PROVEN_FAMILIES:
        yield Problem(
            ("trainer.weights.kind", "rollout.engine.kind", "model"),
            f"the weights of a {family} in an SGLang server cannot be verified after a transfer",
            "kind: stream",
        )
    experts = model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts")
    if sglang.routed_experts and not experts:
        yield Problem((f"{KEY}.routed_experts", "model"), f"a {family} has no experts", "routed_experts: false")


def _attached(config: RunConfig) -> Iterator[Problem]:
    sglang = config.rollout.engine.sglang
    plain = type(sglang)()
    given = [name for name in LAUNCH_ONLY if getattr(sglang, name) != getattr(plain, name)]
    if sglang.attach_key_file is not None and not sglang.attach:
        yield Problem(
            (f"{KEY}.attach_key_file", f"{KEY}.attach"),
            "is the key of running servers, but none is named",
            "leave it out: a launched server gets a random key",
        )
    if sglang.attach and given:
        yield Problem(
            (f"{KEY}.{given[0]}", f"{KEY}.attach"),
            "configures the launch of a server, but these are already running",
            "remove it, and start the servers with that setting",
        )


def _device(config: RunConfig) -> Iterator[Problem]:
    engine = config.rollout.engine
    sglang = engine.sglang
    if engine.device != "cpu":
        return
    needs = {
        "quantization": (sglang.quantization != "none", "SGLang's fp8 kernels need CUDA"),
        "kv_cache_dtype": (sglang.kv_cache_dtype != "auto", "SGLang's attention over an fp8 cache needs CUDA"),
        "deterministic": (sglang.deterministic, "SGLang has no attention of that kind for CPUs"),
        "release_idle_s": (sglang.release_idle_s is not None, "there is no GPU memory to release"),
    }
    for name, (is_given, reason) in needs.items():
        if is_given:
            yield Problem(
                (f"{KEY}.{name}", "rollout.engine.device"), f"needs CUDA: {reason}", "rollout.engine.device: cuda"
            )


def _rounded(config: RunConfig) -> Iterator[Problem]:
    engine, loss = config.rollout.engine, config.trainer.loss
    sglang = engine.sglang
    dtype = engine.dtype or config.model.dtype
    if sglang.quantization != "none" and dtype != "bfloat16":
        yield Problem(
            (f"{KEY}.quantization", "rollout.engine.dtype"),
            f"SGLang quantises from bfloat16, and the engine's dtype is {dtype}",
            "rollout.engine.dtype: bfloat16",
        )
    if sglang.is_rounded and (loss.weight.mode == "off" or loss.proximal == "behaviour"):
        key = "trainer.loss.weight.mode" if loss.weight.mode == "off" else "trainer.loss.proximal"
        yield Problem(
            (key, f"{KEY}.{'quantization' if sglang.quantization != 'none' else 'kv_cache_dtype'}"),
            "does not correct the difference between the engine's rounded numbers and the trainer's",
            "trainer.loss.proximal: recompute, and trainer.loss.weight.mode: truncate",
        )
    if sglang.unquantized_layers and sglang.quantization == "none":
        yield Problem((f"{KEY}.unquantized_layers",), "names exceptions, but nothing is quantised", "quantization: fp8")


def _layers(config: RunConfig) -> Iterator[Problem]:
    """A fused layer is quantised as a whole or not at all, so its parts must be named together."""
    layers = config.rollout.engine.sglang.unquantized_layers
    for index, layer in enumerate(layers):
        key = f"{KEY}.unquantized_layers.{index}"
        if not layer or "," in layer or layer != layer.strip(" ."):
            yield Problem((key,), f"`{layer}` is not part of a module's name", "e.g. model.layers.0, or down_proj")
        head, _, last = layer.rpartition(".")
        for parts in FUSED:
            siblings = {f"{head}.{part}" if head else part for part in parts}
            if last in parts and not siblings <= set(layers):
                others = ", ".join(sorted(siblings - set(layers)))
                yield Problem((key,), f"SGLang keeps {', '.join(parts)} as one layer", f"add {others}")


def _proof(config: RunConfig) -> Iterator[Problem]:
    engine = config.rollout.engine
    sglang = engine.sglang
    if sglang.checksums and engine.device != "cpu":
        yield Problem(
            (f"{KEY}.checksums", "rollout.engine.device"),
            "SGLang's sum of a tensor on a GPU can only be computed on a GPU, but the published one is in host memory",
            "checksums: false",
        )
    if sglang.checksums and sglang.tp_size > 1:
        yield Problem(
            (f"{KEY}.checksums", f"{KEY}.tp_size"), "compares whole tensors, not shares of them", "tp_size: 1"
        )
