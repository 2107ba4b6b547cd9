"""Writes tensors as one safetensors file without blocking other threads.

The bytes go from the tensors' memory to the file and into the checksum; both release Python's lock meanwhile.
safetensors' own writer copies every tensor first and holds the lock until the file is written. Folders are managed in
checkpoints/checkpoint.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from areal_like.encryption.files import Writer, open_to_write
from areal_like.weights.payload_layout import Chunk, TensorBytes, TensorLayout, lay_out
from trainer.gathered import GatheredTensors
from trainer.weights.publish import tensor_bytes

PIECE_BYTES = 16 << 20
"""Number of bytes written and hashed at once: the piece is still in the processor's cache when it is hashed."""


class FileFacts(NamedTuple):
    """The entry of a file in the manifest."""

    num_bytes: int
    sha256: str


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor] | None = None
) -> FileFacts:
    """Write contiguous CPU tensors, and `more` of them. Of gathered tensors one piece is in memory at a time. The file
    is encrypted if its folder is; size and checksum are of the stored bytes.

    Raises OSError if writing fails.
    """
    gathered = tensors if isinstance(tensors, GatheredTensors) else None
    near = {name: tensor_bytes(tensor) for name, tensor in ({} if gathered is not None else tensors).items()}
    near |= {name: tensor_bytes(tensor) for name, tensor in (more or {}).items()}
    layout: dict[str, TensorBytes | TensorLayout] = {**(gathered.layout if gathered is not None else {}), **near}
    entries, header = lay_out("disk", layout)
    far = [entry.name for entry in entries if entry.name not in near]
    nothing: contextlib.AbstractContextManager[Iterator[Chunk]] = contextlib.nullcontext(iter(()))
    with open_to_write(file) as opened:
        _put(opened, memoryview(header))
        with nothing if gathered is None else gathered.chunks(far) as chunks:
            pending = next(chunks, None)
            for entry in entries:
                if entry.name in near and entry.num_bytes:
                    _put(opened, near[entry.name].data)
                while pending is not None and pending[0] == entry.name:
                    _put(opened, pending[1])
                    pending = next(chunks, None)
    return FileFacts(opened.num_bytes, opened.sha256)


def _put(file: Writer, data: memoryview) -> None:
    """Write and hash in pieces."""
    left = data.cast("B")
    for start in range(0, len(left), PIECE_BYTES):
        file.write(left[start : start + PIECE_BYTES])
