"""Rules for vLLM's options: combinations that are not supported, or not with this device or model, each with a reason.

Requirements of the environment are checked in environment.py, unknown arguments in arguments.py. Pure and torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areal_like.device_names import names_cpu
from areal_like.setting_problem import SettingProblem
from rollout.engine.descriptor import KIND_KEY, EngineJob

KEY = "rollout.engine.vllm"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head that vLLM's attention on CPUs supports."""
EXPERT_FAMILIES = ("qwen2_moe", "qwen3_moe")
"""Mixtures of experts whose tensors have names that vLLM's loader is known to read."""


def option_problems(job: EngineJob) -> Iterator[SettingProblem]:
    """Contradictions among `rollout.engine.vllm`'s options."""
    vllm = job.settings.vllm
    is_cpu = names_cpu(job.settings.device)
    if vllm.memory_fraction is not None and is_cpu:
        yield SettingProblem(
            (f"{KEY}.memory_fraction", "rollout.engine.device"),
            "memory_fraction is a fraction of a GPU's memory, but on a CPU the size of the cache follows from "
            "num_slots and max_context",
            "remove this setting",
        )
    if vllm.tp_size > 1 and is_cpu:
        yield SettingProblem(
            (f"{KEY}.tp_size", "rollout.engine.device"),
            "tp_size divides the model among GPUs, but the device is a CPU",
            "set tp_size: 1, and use more workers instead (rollout.num_workers)",
        )
    if vllm.probe and not is_cpu:
        yield SettingProblem(
            (f"{KEY}.probe", "rollout.engine.device"),
            "probe cannot be used on a GPU, because no tolerance of log-probs is known for vLLM's GPU kernels",
            "set probe: false",
        )
    if vllm.probe and job.dtype != "float32":
        yield SettingProblem(
            (f"{KEY}.probe", "rollout.engine.dtype"),
            f"probe compares log-probs with a tolerance of 0.001 nats, which is too small for {job.dtype}",
            "set probe: false",
        )


def model_problems(job: EngineJob, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
    """Conflicts of the model's config.json (or `model.init`) with the engine."""
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    size = model.get("head_dim") or (hidden // heads if heads and hidden else None)
    yield from _head_problems(job.settings.vllm.tp_size, heads, model.get("num_key_value_heads") or heads)
    if names_cpu(job.settings.device) and size is not None and size not in CPU_HEAD_SIZES:
        yield SettingProblem(
            (KIND_KEY, "model"),
            f"the model has head size {size}, but on a CPU vLLM supports only {', '.join(map(str, CPU_HEAD_SIZES))}",
            "rollout.engine.kind: embedded",
        )
    family = model.get("model_type")
    if model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts"):
        if family not in EXPERT_FAMILIES:
            yield SettingProblem(
                (KIND_KEY, "model"),
                f"weight updates of mixture-of-experts models of type {family} are not supported with vLLM",
                f"set rollout.engine.kind: embedded, or use a model of type {' or '.join(EXPERT_FAMILIES)}",
            )
        elif job.settings.vllm.probe:
            yield SettingProblem((f"{KEY}.probe", "model"), "probe can only compare dense models", "set probe: false")


def _head_problems(tp_size: int, heads: Any, key_heads: Any) -> Iterator[SettingProblem]:
    """Heads that cannot be divided among the GPUs: vLLM gives each the same number of heads, and copies heads of keys
    only if there are fewer of them than GPUs."""
    if tp_size == 1 or not isinstance(heads, int) or not isinstance(key_heads, int):
        return
    is_divided = key_heads % tp_size == 0 if key_heads >= tp_size else tp_size % key_heads == 0
    if heads % tp_size or not is_divided:
        what = f"{heads} attention heads and {key_heads} key-value heads cannot be divided among {tp_size} GPUs"
        sizes = [size for size in range(1, heads + 1) if heads % size == 0 and not key_heads % size]
        yield SettingProblem((f"{KEY}.tp_size", "model"), what, f"set tp_size to one of: {', '.join(map(str, sizes))}")
