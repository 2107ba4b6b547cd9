"""Rules for SGLang's options: combinations that are not supported, or not with this device or model, each with a
reason.

It also has the rules for process groups and for shared devices. Requirements of the environment are checked in
environment.py, unknown arguments in arguments.py. Pure functions, without torch. Pure and torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from areal_like.device_names import names_cpu
from areal_like.setting_problem import SettingProblem
from rollout.config import SGLangSettings
from rollout.engine.descriptor import KIND_KEY, EngineJob

KEY = "rollout.engine.sglang"
QUANTIZED_FAMILIES = ("qwen2", "qwen3")
"""Model types whose fp8 weights SGLang 0.5.23 can replace by a new version."""
PROVEN_FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose layout inside SGLang is known (rollout/engine/sglang/layout.py)."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang fuses into one."""
LAUNCH_ONLY = (
    "port", "tp_size", "memory_fraction", "quantization", "unquantized_layers", "kv_cache_dtype", "deterministic",
    "release_idle_s", "routed_experts", "checksums", "arguments", "environment",
)  # fmt: skip
"""Options that say how a server is launched."""


def option_problems(job: EngineJob) -> Iterator[SettingProblem]:
    """Contradictions among `rollout.engine.sglang`'s options."""
    sglang = job.settings.sglang
    yield from _launched(sglang)
    yield from _device(job)
    yield from _rounded(job)
    yield from _layers(sglang)
    yield from _proof(job)
    yield from _attached(job)


def model_problems(sglang: SGLangSettings, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
    """Conflicts of the model's config.json (or `model.init`) with the options."""
    family = model.get("model_type")
    if sglang.quantization != "none" and family not in QUANTIZED_FAMILIES:
        yield SettingProblem(
            (f"{KEY}.quantization", "model"),
            f"SGLang cannot load new versions into a quantised model of type {family}",
            f"set quantization: none, or use a model of type {' or '.join(QUANTIZED_FAMILIES)}",
        )
    experts = model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts")
    if sglang.routed_experts and not experts:
        yield SettingProblem(
            (f"{KEY}.routed_experts", "model"), f"model type {family} has no experts", "set routed_experts: false"
        )


def group_problems(job: EngineJob, model: Mapping[str, Any] | None) -> Iterator[SettingProblem]:
    """Problems of a process group: servers can take part if their weights can be verified afterwards, and if they can
    be replaced."""
    sglang = job.settings.sglang
    if not names_cpu(job.settings.device):
        yield SettingProblem(
            ("rollout.engine.device",), "the weights of an SGLang server on a GPU cannot be verified after a transfer"
        )
    elif sglang.tp_size > 1:
        yield SettingProblem((f"{KEY}.tp_size",), "only SGLang servers with tp_size 1 can join a process group")
    if sglang.attach:
        yield SettingProblem(
            (f"{KEY}.attach",),
            "a failed transfer through a process group blocks the server, and only a server that its worker launched "
            "can be replaced",
        )
    family = None if model is None else model.get("model_type")
    if model is not None and family not in PROVEN_FAMILIES:
        yield SettingProblem(
            (KIND_KEY, "model"),
            f"the weights of a {family} model in an SGLang server cannot be verified after a transfer",
        )


def colocation_problems(sglang: SGLangSettings) -> Iterator[SettingProblem]:
    """Conflicts with devices that servers and trainer share in turns."""
    if sglang.attach:
        yield SettingProblem(
            (f"{KEY}.attach", "placement"),
            "a server that the run does not manage may restart, and allocate memory, while the trainer runs",
            "remove this setting, so that the run launches the servers, or set placement: disaggregated",
        )
    if sglang.release_idle_s is not None:
        yield SettingProblem(
            (f"{KEY}.release_idle_s", "placement"),
            "with placement: colocated, memory is already released whenever the trainer uses the device",
            "remove this setting",
        )


def rounding_key(sglang: SGLangSettings) -> str:
    """The option that rounds weights, or keys and values; empty: none."""
    if not sglang.is_rounded:
        return ""
    return f"{KEY}.{'quantization' if sglang.quantization != 'none' else 'kv_cache_dtype'}"


def _attached(job: EngineJob) -> Iterator[SettingProblem]:
    attach, count = job.settings.sglang.attach, job.num_workers
    if attach and len(attach) != count:
        yield SettingProblem(
            (f"{KEY}.attach", "rollout.num_workers"),
            f"attach lists {len(attach)} server{'s' if len(attach) > 1 else ''} for {count} "
            f"worker{'s' if count > 1 else ''}",
            "list one server address per worker",
        )
    for index, url in enumerate(attach):
        if not re.fullmatch(r"https?://[^/\s]+(:\d+)?/?", url):
            yield SettingProblem((f"{KEY}.attach.{index}",), f"`{url}` is not a valid URL", "use http://HOST:PORT")


def _launched(sglang: SGLangSettings) -> Iterator[SettingProblem]:
    plain = type(sglang)()
    given = [name for name in LAUNCH_ONLY if getattr(sglang, name) != getattr(plain, name)]
    if sglang.attach_key_file is not None and not sglang.attach:
        yield SettingProblem(
            (f"{KEY}.attach_key_file", f"{KEY}.attach"),
            "attach_key_file contains the API key of running servers, but attach lists no servers",
            "remove this setting; each launched server gets a random API key",
        )
    if sglang.attach and given:
        yield SettingProblem(
            (f"{KEY}.{given[0]}", f"{KEY}.attach"),
            f"{given[0]} configures the launch of a server, but the servers in attach are already running",
            "remove this setting, and set the value on the command line of the servers",
        )


def _device(job: EngineJob) -> Iterator[SettingProblem]:
    sglang = job.settings.sglang
    if not names_cpu(job.settings.device):
        return
    needs = {
        "quantization": (sglang.quantization != "none", "SGLang's fp8 kernels require CUDA"),
        "kv_cache_dtype": (sglang.kv_cache_dtype != "auto", "SGLang's attention with an fp8 cache requires CUDA"),
        "deterministic": (sglang.deterministic, "SGLang has no deterministic attention for CPUs"),
        "release_idle_s": (sglang.release_idle_s is not None, "there is no GPU memory to release"),
    }
    for name, (is_given, reason) in needs.items():
        if is_given:
            yield SettingProblem(
                (f"{KEY}.{name}", "rollout.engine.device"), f"needs CUDA: {reason}", "rollout.engine.device: cuda"
            )


def _rounded(job: EngineJob) -> Iterator[SettingProblem]:
    sglang = job.settings.sglang
    if sglang.quantization != "none" and job.dtype != "bfloat16":
        yield SettingProblem(
            (f"{KEY}.quantization", "rollout.engine.dtype"),
            f"SGLang can only quantise bfloat16 weights, but the engine's dtype is {job.dtype}",
            "set rollout.engine.dtype: bfloat16",
        )
    if sglang.unquantized_layers and sglang.quantization == "none":
        what = "unquantized_layers lists exceptions, but nothing is quantised"
        yield SettingProblem((f"{KEY}.unquantized_layers",), what, "quantization: fp8")


def _layers(sglang: SGLangSettings) -> Iterator[SettingProblem]:
    """A fused layer is quantised as a whole or not at all, so its parts must be named together."""
    layers = sglang.unquantized_layers
    for index, layer in enumerate(layers):
        key = f"{KEY}.unquantized_layers.{index}"
        if not layer or "," in layer or layer != layer.strip(" ."):
            yield SettingProblem(
                (key,),
                f"`{layer}` cannot be a part of a module's name",
                "use, for example, model.layers.0 or down_proj",
            )
        head, _, last = layer.rpartition(".")
        for parts in FUSED:
            siblings = {f"{head}.{part}" if head else part for part in parts}
            if last in parts and not siblings <= set(layers):
                others = ", ".join(sorted(siblings - set(layers)))
                yield SettingProblem(
                    (key,),
                    f"SGLang fuses {', '.join(parts)} into one layer, so all of them must be listed",
                    f"add {others}",
                )


def _proof(job: EngineJob) -> Iterator[SettingProblem]:
    sglang = job.settings.sglang
    if sglang.checksums and not names_cpu(job.settings.device):
        yield SettingProblem(
            (f"{KEY}.checksums", "rollout.engine.device"),
            "SGLang's checksum for GPUs can only be computed on a GPU, but the published tensors are in host memory",
            "set checksums: false",
        )
    if sglang.checksums and sglang.tp_size > 1:
        yield SettingProblem(
            (f"{KEY}.checksums", f"{KEY}.tp_size"),
            "checksums can only be compared for whole tensors, not for shards",
            "set tp_size: 1",
        )
