"""Earlier versions of this rank's weights in host memory: the newest in full, each older one as its difference from its
successor.

The format of a difference is in areal_like/weights/delta.py; version_recall.py adds and reads versions.

A difference leads from a version to the previous one, so that the oldest can be dropped without changing any other.
Differences are encoded on a separate thread while training continues; methods that read versions wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from areal_like.weights.delta import apply_tensor, encode_tensor

LEVEL = 1
"""zstd level, chosen to keep up with training."""
Weights = Mapping[str, torch.Tensor]
"""Contiguous tensors on the host, by name."""


class _Step(NamedTuple):
    """The change from the next version to `version`: blocks of each tensor that differs."""

    version: int
    blocks: dict[str, bytes]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks.values()))


class PastVersions:
    """Keeps versions: `add` them in order, and `walk` back. Call from one thread."""

    def __init__(self, keep: int, max_bytes: int) -> None:
        """keep: number of versions, including the newest. max_bytes: of all older ones together."""
        assert keep >= 1
        self._keep, self._max_bytes = keep, max_bytes
        self._newest: tuple[int, Weights] | None = None
        self._steps: deque[_Step] = deque()
        """Newest first."""
        self._encoder = ThreadPoolExecutor(1, "version-deltas")
        self._encoding: Future[_Step] | None = None

    def add(self, version: int, weights: Weights) -> None:
        """Set the newest version. `weights` must not change afterwards, and have the same names and shapes as before.

        A version that is not newer than the newest one starts a new history.
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
        """Kept versions, newest first."""
        self._settle()
        return () if self._newest is None else (self._newest[0], *(step.version for step in self._steps))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the older versions."""
        self._settle()
        return sum(step.num_bytes for step in self._steps)

    def newest(self) -> Weights:
        """Return the weights of the newest version."""
        assert self._newest is not None
        return self._newest[1]

    def walk(self, wanted: Collection[int]) -> Iterator[tuple[int, Weights]]:
        """Yield the versions of `wanted`, newest first; all must be kept. Weights are valid until the next one."""
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
        """Wait for the difference that is being encoded, then drop old versions until the bounds are met."""
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
