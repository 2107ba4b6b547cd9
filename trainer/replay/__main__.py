"""`python -m trainer.replay --spec FILE`: one start of a trainer that replays recorded steps (player.py)."""

from __future__ import annotations

import os
import sys

from areal_like import quick_exit
from areal_like.metrics import encode
from areal_like.process import run_blocking
from trainer.replay.spec import ReplaySpec


def main(spec: ReplaySpec) -> None:
    """Replay. Only events go to stdout: what the user's own loss prints goes to stderr."""
    import torch

    from trainer.replay.player import play

    torch.set_num_threads(spec.num_threads)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as events:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        play(spec, sys.stdin.buffer, lambda event: _write(events.fileno(), encode(event) + b"\n"))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    quick_exit.run(lambda: run_blocking(ReplaySpec, main))
