"""Writes tensors as one safetensors file without blocking other threads.

The bytes go from the tensors' memory to the file and into the checksum; both release Python's lock meanwhile.
safetensors' own writer copies every tensor first and holds the lock until the file is written. Folders are managed in
checkpoints/checkpoint.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from areal_like.weights.weight_store import lay_out
from trainer.weights.publish import tensor_bytes

PIECE_BYTES = 16 << 20
"""Number of bytes written and hashed at once: the piece is still in the processor's cache when it is hashed."""


class FileFacts(NamedTuple):
    """The entry of a file in the manifest."""

    num_bytes: int
    sha256: str


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> FileFacts:
    """Write contiguous CPU tensors. Raises OSError if writing fails."""
    data = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    entries, header = lay_out("disk", data)
    digest, num_bytes = hashlib.sha256(), 0
    with file.open("wb", buffering=0) as opened:
        for piece in [memoryview(header), *(data[entry.name].data for entry in entries if entry.num_bytes)]:
            left = piece.cast("B")
            while len(left):
                written = opened.write(left[:PIECE_BYTES])
                digest.update(left[:written])
                num_bytes, left = num_bytes + written, left[written:]
    return FileFacts(num_bytes, digest.hexdigest())
