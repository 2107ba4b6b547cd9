"""Contradictions in how the trainer is spread over ranks.

Owns: `rank_problems`. Refuses: looking at the machine (preflight.py), DeepSpeed's own options (it judges them itself).
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config import RunConfig
from controller.config_problems import Problem


def rank_problems(config: RunConfig) -> Iterator[Problem]:
    """Of trainer.backend, trainer.ranks and their sections."""
    trainer, samples = config.trainer, config.samples_per_step
    if trainer.backend == "torch" and trainer.ranks > 1:
        yield Problem(
            ("trainer.ranks", "trainer.backend"),
            f"torch trains in one process, and there are to be {trainer.ranks} ranks",
            "trainer.backend: fsdp, deepspeed or auto",
        )
    elif samples % trainer.ranks:
        fitting = [str(ranks) for ranks in range(2, trainer.ranks + 1) if samples % ranks == 0]
        yield Problem(
            ("trainer.ranks", "groups_per_step", "group_size"),
            f"{samples} samples of a step cannot be dealt evenly to {trainer.ranks} ranks",
            f"ranks: {' or '.join(['1', *fitting[-3:]])}, or another groups_per_step",
        )
    elif trainer.ranks * trainer.mini_batches > samples:
        yield Problem(
            ("trainer.ranks", "trainer.mini_batches"),
            f"{samples} samples of a step are too few for {trainer.mini_batches} mini-batches on {trainer.ranks} ranks",
            "fewer of either, or more groups_per_step",
        )
    zero = trainer.deepspeed
    if zero.offload_param and zero.stage != 3:
        yield Problem(
            ("trainer.deepspeed.offload_param", "trainer.deepspeed.stage"),
            f"ZeRO stage {zero.stage} keeps whole parameters on every rank: there are no shards to offload",
            "stage: 3, or offload_param: false",
        )
