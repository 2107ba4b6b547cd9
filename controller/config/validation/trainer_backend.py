"""Contradictions in how the trainer is spread over ranks.

Owns: `rank_problems`. Refuses: looking at the machine (preflight.py), DeepSpeed's own options (it judges them itself).
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.problems import Problem
from controller.config.run_config import RunConfig


def rank_problems(config: RunConfig) -> Iterator[Problem]:
    """Of trainer.backend, trainer.ranks and their sections."""
    trainer = config.trainer
    if trainer.backend == "torch" and trainer.ranks > 1:
        yield Problem(
            ("trainer.ranks", "trainer.backend"),
            f"backend torch trains in one process, but the config asks for {trainer.ranks} ranks",
            "trainer.backend: fsdp, deepspeed or auto",
        )
    zero = trainer.deepspeed
    if zero.offload_param and zero.stage != 3:
        yield Problem(
            ("trainer.deepspeed.offload_param", "trainer.deepspeed.stage"),
            f"ZeRO stage {zero.stage} keeps whole parameters on every rank: there are no shards to offload",
            "stage: 3, or offload_param: false",
        )
