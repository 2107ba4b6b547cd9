"""A copy of one rank's part of the training state in host memory, so that training can continue at once.

It holds the buffer and its layout. Parts are created in backends/; those of several ranks are read together in
gathered.py, and written to files in training_state.py and weights/.

CPU memory is copied before `take` returns: 12 bytes per parameter, which takes a few thousandths of a step of thousands
of tokens. GPU memory is copied on a separate stream into pinned memory while the next step computes; only the next
update, which changes it, waits for the copy (`fence`). There is one buffer: a copy must be read before the next `take`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

ALIGNMENT = 64


class Items(NamedTuple):
    """Some items of a flattened tensor: consecutive ones, or of several consecutive rows the same columns.

    first: index of the first item. num: how many. width: columns of each row, if the items are not consecutive; a row
    is what the first dimension counts. 0: they are consecutive.
    """

    first: int
    num: int
    width: int = 0


class Part(NamedTuple):
    """A contiguous range of the items of one tensor, or the same columns of consecutive rows.

    key: `weight/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>` or `step/<name>`. shape: of the full tensor.
    start: index of the first item in the flattened full tensor. items: contiguous, any shape, any device. width: see
    Items.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    items: torch.Tensor
    width: int = 0


def whole_part(key: str, tensor: torch.Tensor) -> Part:
    """Return a part that covers the full tensor."""
    return Part(key, tuple(tensor.shape), 0, tensor.detach())


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a part in the buffer; `dtype` is the name of torch's dtype without `torch.`, `width` that of
    Items."""

    key: str
    shape: tuple[int, ...]
    start: int
    num_items: int
    dtype: str
    offset: int
    width: int = 0

    @property
    def row_items(self) -> int:
        """Number of items of a row of the full tensor."""
        return math.prod(self.shape[1:])

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Size of the part."""
        return self.num_items * self.torch_dtype.itemsize

    def items(self, buffer_U: torch.Tensor) -> torch.Tensor:
        """Return the part, flat, sharing the buffer's memory."""
        return buffer_U[self.offset : self.offset + self.num_bytes].view(self.torch_dtype)


@dataclass(frozen=True)
class Copied:
    """A copy of the state at one point in time. buffer_U: bytes [U]."""

    places: tuple[Place, ...]
    buffer_U: torch.Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the copy is complete and may be read."""
        if self.done is not None:
            self.done.synchronize()


class HostCopy:
    """Takes copies. Every method except `Copied.wait` must be called on the compute thread."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()
        self._buffer_U = torch.empty(0, dtype=torch.uint8)
        self._targets: list[torch.Tensor] = []
        """Views of the buffer, one for each place."""
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def take(self, parts: Sequence[Part], dtype: torch.dtype | None = None) -> Copied:
        """Copy `parts`, overwriting the previous copy. dtype: of the copy of floating-point items; None: unchanged."""
        parts = [part for part in parts if part.items.numel() or not math.prod(part.shape)]
        is_on_gpu = any(part.items.is_cuda for part in parts)
        places, num_bytes = _lay_out(parts, dtype)
        if places != self._places or num_bytes > len(self._buffer_U):
            self._places = places
            self._buffer_U = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_on_gpu)
            self._targets = [place.items(self._buffer_U) for place in places]
        pairs = [(target, part.items.reshape(-1)) for target, part in zip(self._targets, parts, strict=True)]
        with torch.no_grad():
            self._done = self._start_gpu_copies([pair for pair in pairs if pair[1].is_cuda])
            near = [pair for pair in pairs if not pair[1].is_cuda]
            if near:
                torch._foreach_copy_([target for target, _ in near], [items for _, items in near])
        return Copied(places, self._buffer_U, self._done)

    def fence(self) -> None:
        """Make the GPU wait for the copy. Call this before an update, which changes what is being copied."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None

    def _start_gpu_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        if not pairs:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, items in pairs:
                target.copy_(items, non_blocking=True)
                items.record_stream(self._stream)
        return self._stream.record_event()


def _lay_out(parts: Sequence[Part], dtype: torch.dtype | None) -> tuple[tuple[Place, ...], int]:
    places, offset = [], 0
    for part in parts:
        offset += -offset % ALIGNMENT
        kept = part.items.dtype if dtype is None or not part.items.is_floating_point() else dtype
        places.append(
            Place(
                key=part.key,
                shape=part.shape,
                start=part.start,
                num_items=part.items.numel(),
                dtype=str(kept).removeprefix("torch."),
                offset=offset,
                width=part.width,
            )
        )
        offset += part.items.numel() * kept.itemsize
    return tuple(places), offset
