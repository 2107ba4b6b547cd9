"""Transfer of versions through a process group of torch to all workers at once, while generation is paused. A worker
that misses it fetches the stream. The messages are in areal_like/weights/process_group.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from areal_like.weights.transfer import Limit, TransferDescriptor, TransferUse


def _problems(use: TransferUse) -> Iterator[SettingProblem]:
    if use.settings.group.backend == "nccl" and "cpu" in use.devices:
        yield SettingProblem(
            ("trainer.weights.group.backend", "trainer.device", "rollout.engine.device"),
            "`nccl` requires GPUs, but the trainer or the engine runs on a CPU",
            "set backend: auto",
        )


PROCESS_GROUP = TransferDescriptor(
    name="distributed",
    sender="trainer.weights.sender:group_sender",
    scheme="group+tcp://",
    needs_process_group=True,
    own_keys=("group",),
    cannot_send_deltas=Limit("a process group always transfers whole versions", "remove it, or set kind: stream"),
    cannot_swap_rolling=Limit(
        "one message reaches all workers at once, so they cannot swap one after another",
        "set swap: together, or another trainer.weights.kind",
    ),
    cannot_drain=Limit(
        "with drain each worker first finishes its answers, and the others would wait for it",
        "set interruption: recompute or keep_kv (not mode: one_step_off), or another trainer.weights.kind",
    ),
    cannot_share_devices=Limit(
        "engines have no memory to receive weights while the trainer runs, and then all load the weights at once",
        "set trainer.weights.kind: shm, or stream between hosts",
    ),
    problems=_problems,
)
