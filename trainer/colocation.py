"""Sharing devices between the trainer and the engines (`placement: colocated`).

It moves the policy between its device and host memory. The controller decides when: a batch arrives only after the
engines have released their memory (controller/coordinator/colocation.py), and a version is announced only after
`leave`.

Between two steps everything is in host memory, so checkpoints and exports are written from there while the engines
generate. A trainer that restarts may do so while the engines use the device, so it loads into host memory. On a CPU
nothing needs to be moved: gradients are released after each update anyway, and freed pages are returned.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from areal_like.process import trim_heap
from trainer.backends.port import Backend
from trainer.ranks import Ranks
from trainer.step import Spans

log = logging.getLogger(__name__)


class SharedDevices:
    """Moves the state: `take` before a step, `leave` after its version was copied. Without sharing both do nothing."""

    def __init__(
        self,
        policy: Backend,
        fixed: Sequence[PreTrainedModel],
        device: torch.device,
        *,
        is_shared: bool,
        critic: Backend | None = None,
        ranks: Ranks | None = None,
        tracer: Spans | None = None,
    ) -> None:
        """`device`: this rank's. `fixed`: models that are not trained and are moved with the policy; `critic` as well.
        `ranks`: None for one rank."""
        self._policy, self._fixed, self._device = policy, fixed, device
        self._critic = critic
        self._is_shared, self._ranks, self._tracer = is_shared, ranks, tracer

    def take(self) -> None:
        """Move everything to the device."""
        self._move(self._device, "take_memory")

    def leave(self) -> None:
        """Move everything to host memory and release the device's memory; returns when every rank has done so.

        Rank 0 announces the version next, and engines allocate memory on the devices of all ranks.
        """
        self._move(torch.device("cpu"), "release_memory")
        if self._is_shared:
            _release_memory(self._device)
            if self._ranks is not None:
                self._ranks.wait_for_all("releasing the memory of shared devices")

    def _move(self, device: torch.device, name: str) -> None:
        if not self._is_shared:
            return
        with contextlib.nullcontext() if self._tracer is None else self._tracer.span(name):
            num_bytes = self._policy.move(device)
            if self._critic is not None:
                num_bytes += self._critic.move(device)
            for model in self._fixed:
                model.to(device)  # type: ignore[arg-type]
        if num_bytes:
            log.info("moved %d bytes of models and optimizer state to %s", num_bytes, device)


def _release_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        trim_heap()
