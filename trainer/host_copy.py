"""One rank's part of the training state, copied into host memory of its own, so that training may go on at once.

Owns: the buffer and its layout, the copy's place in time, whole tensors from several ranks' parts. Refuses: files
(training_state.py), sockets (ranks.py), knowing what a part is of (backends/).

Memory on a CPU is copied before `take` returns: 12 bytes a parameter, a few thousandths of a step of thousands of
tokens. Memory of a GPU is copied by a stream of its own into pinned memory, while the next step computes; only the next
update, which changes it, waits for the copy (`fence`). There is one buffer: a copy is read before the next is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

ALIGNMENT = 64


class Part(NamedTuple):
    """Some of the items of one tensor.

    key: `weight/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>` or `step/<name>`. shape: of the whole tensor.
    start: index of the first item in the whole tensor laid flat. items: contiguous, any shape, any device.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    items: torch.Tensor


def whole_part(key: str, tensor: torch.Tensor) -> Part:
    """A part that is all of it."""
    return Part(key, tuple(tensor.shape), 0, tensor.detach())


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part is stored in the buffer; `dtype` as torch names it, without the `torch.`."""

    key: str
    shape: tuple[int, ...]
    start: int
    num_items: int
    dtype: str
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type itself."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def items(self, buffer_U: torch.Tensor) -> torch.Tensor:
        """The part, flat, sharing the buffer's memory."""
        num_bytes = self.num_items * self.torch_dtype.itemsize
        return buffer_U[self.offset : self.offset + num_bytes].view(self.torch_dtype)


@dataclass(frozen=True)
class Copied:
    """The copy of one moment. buffer_U: bytes [U]."""

    places: tuple[Place, ...]
    buffer_U: torch.Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until it is complete; then it may be read."""
        if self.done is not None:
            self.done.synchronize()


class HostCopy:
    """Takes copies. Every method but `Copied.wait` belongs to the compute thread."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()
        self._buffer_U = torch.empty(0, dtype=torch.uint8)
        self._targets: list[torch.Tensor] = []
        """The places as tensors."""
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def take(self, parts: Sequence[Part]) -> Copied:
        """Copy `parts`; the copy before this one is gone."""
        parts = [part for part in parts if part.items.numel() or not math.prod(part.shape)]
        is_on_gpu = any(part.items.is_cuda for part in parts)
        places, num_bytes = _lay_out(parts)
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
        """What is being copied must not change before the copy is complete: call this before an update."""
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


def assemble(copies: Iterable[tuple[Sequence[Place], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors by key, from every rank's places and buffer. What one rank has whole is not copied again."""
    tensors: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for places, buffer_U in copies:
        for place in places:
            num_items = math.prod(place.shape)
            items = place.items(buffer_U)
            if place.num_items == num_items:
                tensors[place.key], missing[place.key] = items.view(place.shape), 0
                continue
            if place.key not in tensors:
                tensors[place.key] = torch.empty(place.shape, dtype=place.torch_dtype)
                missing[place.key] = num_items
            tensors[place.key].view(-1)[place.start : place.start + place.num_items] = items
            missing[place.key] -= place.num_items
    incomplete = [key for key, number in missing.items() if number]
    assert not incomplete, f"parts of {incomplete[:3]} are on no rank, or on several"
    return tensors


def _lay_out(parts: Sequence[Part]) -> tuple[tuple[Place, ...], int]:
    places, offset = [], 0
    for part in parts:
        offset += -offset % ALIGNMENT
        places.append(
            Place(
                key=part.key,
                shape=part.shape,
                start=part.start,
                num_items=part.items.numel(),
                dtype=str(part.items.dtype).removeprefix("torch."),
                offset=offset,
            )
        )
        offset += part.items.numel() * part.items.element_size()
    return tuple(places), offset
