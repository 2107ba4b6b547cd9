"""Creates DeepSpeed's configuration from the trainer's. The allowed raw keys are in trainer/config.py.

DeepSpeed is not imported.
"""

from __future__ import annotations

from typing import Any

from areal_like.device_names import names_cpu
from trainer.config import TrainerSettings


def zero_config(settings: TrainerSettings) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`; `trainer.deepspeed.raw` is merged over the typed options.

    Batch sizes are 1 for DeepSpeed: the number of micro-batches of an update changes from step to step, and the backend
    marks its end. DeepSpeed's optimizers are not used: they are compiled at first use, and torch's AdamW runs on every
    device.
    """
    zero = settings.deepspeed
    options: dict[str, Any] = {
        "stage": zero.stage,
        "contiguous_gradients": zero.contiguous_gradients,
        "overlap_comm": zero.overlap_comm,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
        "stage3_param_persistence_threshold": zero.param_persistence_threshold,
        "stage3_max_live_parameters": zero.max_live_parameters,
        "stage3_max_reuse_distance": zero.max_reuse_distance,
    }
    options = {key: value for key, value in options.items() if value is not None}
    if zero.offload_optimizer:
        options["offload_optimizer"] = {"device": "cpu", "pin_memory": not names_cpu(settings.device)}
    if zero.offload_param:
        options["offload_param"] = {"device": "cpu", "pin_memory": not names_cpu(settings.device)}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": options,
    }
    return _merged(made, zero.raw)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        is_section = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if is_section else value
    return merged
