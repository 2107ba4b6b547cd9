"""Earlier versions of this rank's weights in host memory: the newest whole, each older one as what differs from its
successor.

Owns: `PastVersions`: encoding (on a thread of its own), bounds, and the way back from the newest to older ones.
Refuses: the format of a difference (areal_like/weights/delta.py), where weights come from and go to
(version_recall.py).

A difference leads from a version to the one before it, so that the oldest can be let go without touching any other.
Encoding runs while training goes on; asking for versions waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from areal_like.weights.delta import apply_tensor, encode_tensor

LEVEL = 1
"""zstd level: it must keep up with training."""
Weights = Mapping[str, torch.Tensor]
"""Contiguous tensors on the host, by name."""


class _Step(NamedTuple):
    """From the version after it to `version`: blocks of each tensor that differs."""

    version: int
    blocks: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks.values()))


class PastVersions:
    """`add` versions in their order; `walk` back. Call from one thread."""

    def __init__(self, keep: int, max_bytes: int) -> None:
        """keep: versions, the newest included. max_bytes: of the older ones together."""
        assert keep >= 1
        self._keep, self._max_bytes = keep, max_bytes
        self._newest: tuple[int, Weights] | None = None
        self._steps: deque[_Step] = deque()
        """From the newest backwards."""
        self._encoder = ThreadPoolExecutor(1, "version-deltas")
        self._encoding: Future[_Step] | None = None

    def add(self, version: int, weights: Weights) -> None:
        """The newest version now. `weights` must not change afterwards and have the names and shapes of those before.

        A version that is not newer than the newest one begins a new history.
        """
        self._settle()
        before, self._newest = self._newest, (version, weights)
        if before is None:
            return
        if before[0] >= version:
            self._steps.clear()
        else:
            self._encoding = self._encoder.submit(_encode, before[0], before[1], weights)

    @property
    def held(self) -> tuple[int, ...]:
        """Versions, newest first."""
        self._settle()
        return () if self._newest is None else (self._newest[0], *(step.version for step in self._steps))

    @property
    def num_bytes(self) -> int:
        """Of the older versions."""
        self._settle()
        return sum(step.num_bytes for step in self._steps)

    def newest(self) -> Weights:
        """The weights of the newest version."""
        assert self._newest is not None
        return self._newest[1]

    def walk(self, wanted: Collection[int]) -> Iterator[tuple[int, Weights]]:
        """Give the versions of `wanted`, newest first; all must be held. Weights are valid until the next one."""
        assert set(wanted) <= set(self.held)
        assert self._newest is not None
        version, weights = self._newest
        left = sorted(wanted)
        if left and left[-1] == version:
            yield version, weights
            left.pop()
        if not left:
            return
        buffer = {name: tensor.clone() for name, tensor in weights.items()}
        for step in self._steps:
            for name, blocks in step.blocks.items():
                apply_tensor(memoryview(blocks), _bytes(buffer[name]), _dtype(buffer[name]))
            if step.version == left[-1]:
                yield step.version, buffer
                left.pop()
                if not left:
                    return

    def _settle(self) -> None:
        """Wait for the difference under way, then keep to the bounds."""
        if self._encoding is not None:
            self._steps.appendleft(self._encoding.result())
            self._encoding = None
        total = sum(step.num_bytes for step in self._steps)
        while self._steps and (len(self._steps) > self._keep - 1 or total > self._max_bytes):
            total -= self._steps.pop().num_bytes


def _encode(version: int, old: Weights, new: Weights) -> _Step:
    blocks = {
        name: b"".join(encode_tensor(_bytes(new[name]), _bytes(tensor), _dtype(tensor), LEVEL))
        for name, tensor in old.items()
    }
    return _Step(version, {name: encoded for name, encoded in blocks.items() if encoded})


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
