"""What cannot go together with weights that travel by a process group. Pure, as run.py is.

Owns: the cross-checks of `trainer.weights.kind: distributed`. Refuses: the other kinds (run.py), the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config import engines
from controller.config.problems import Problem
from controller.config.run_config import RunConfig

OTHERWISE = "another trainer.weights.kind"


def group_problems(config: RunConfig) -> Iterator[Problem]:
    """Of trainer.weights where its kind is `distributed`, and of its section where it is not."""
    weights = config.trainer.weights
    kind = "trainer.weights.kind"
    if weights.kind != "distributed":
        if weights.group != type(weights.group)():  # a resolved config names every key, at its default
            yield Problem(
                ("trainer.weights.group", kind),
                f"configures weight transfer by process group, but the kind is {weights.kind}",
                "kind: distributed",
            )
        return
    if weights.delta is not None:
        yield Problem(
            ("trainer.weights.delta", kind),
            "a process group always transfers whole versions",
            "remove it, or kind: stream",
        )
    if weights.swap == "rolling":
        yield Problem(
            ("trainer.weights.swap", kind),
            "one message reaches all workers at once, so they cannot swap one after another",
            f"swap: together, or {OTHERWISE}",
        )
    if config.rollout.interruption == "drain":
        yield Problem(
            ("rollout.interruption", kind),
            "with drain each worker first finishes its answers, and all that are done would wait for it",
            f"interruption: recompute or keep_kv (not mode: one_step_off), or {OTHERWISE}",
        )
    yield from engines.group_problems(config, config.model.init)
    devices = {*config.rollout_devices, *config.trainer_devices}
    if weights.group.backend == "nccl" and "cpu" in devices:
        yield Problem(
            ("trainer.weights.group.backend", "trainer.device", "rollout.engine.device"),
            "nccl connects GPUs only, but one side is on the CPU",
            "backend: auto",
        )
