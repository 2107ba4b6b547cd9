"""The layouts that `areal-like validate` proposes for public models on GPUs of a given number and size: by the estimate
alone, no GPU is used.

A training step in bfloat16 with gradient checkpointing, 16,384 tokens per micro-batch and sequences of at most 8,192
tokens. The GPUs counted are the trainer's: one
process with torch, or FSDP2 over all of them.
"""

from __future__ import annotations

from typing import Any

from areal_like.decoder_shape import PUBLIC_SHAPES
from controller.config.memory.estimate import trainer_memory
from controller.config.memory.fit import CONTEXT_BYTES, fit_problems
from controller.config.run_config import RunConfig

MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3-70B", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip
GPUS, GIGABYTES = (1, 8, 64), (80, 141)
TRAINER = {
    "device": "cuda", "precision": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 16_384,
}  # fmt: skip


def layouts() -> list[dict[str, Any]]:
    """One row for each model, number of GPUs and size. needed_bytes: on one GPU, with CUDA's own memory. verdict:
    `fits`, or `may fit` if less than the estimate's error is missing, or the change that `validate` proposes.
    """
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            backend = {"backend": "fsdp", "ranks": gpus} if gpus > 1 else {"backend": "torch"}
            config = RunConfig.model_validate(
                {
                    "model": {"path": model, "dtype": "bfloat16"},
                    "data": {"train": {"path": "rows.jsonl"}},
                    "groups_per_step": 128, "group_size": 16,
                    "rollout": {"engine": {"kind": "sglang", "device": f"cuda:{gpus}", "max_context": 8192}},
                    "trainer": {**TRAINER, **backend},
                }
            )  # fmt: skip
            shape = PUBLIC_SHAPES[model]
            needed = max(one.needed_bytes for one in trainer_memory(config, shape)) + CONTEXT_BYTES
            for gigabytes in GIGABYTES:
                problems = [
                    problem
                    for problem in fit_problems(config, shape, gigabytes * 1e9)
                    if not problem.keys[0].startswith("rollout")
                ]
                verdict = "fits" if needed <= gigabytes * 1e9 else "may fit"
                if problems:
                    verdict = problems[0].remedy.removeprefix("set ")
                rows.append(
                    {"model": model, "gpus": gpus, "gpu_gb": gigabytes, "needed_bytes": needed, "verdict": verdict}
                )
    return rows
