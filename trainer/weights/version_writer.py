"""Writes versions into the weight store: full ones, and deltas between them.

It decides when a full version is due, which base deltas are computed from, and how long delta files are kept. The
encoding is in areal_like/weights/delta.py, full payloads are in areal_like/weights/weight_store.py, and the model's
snapshot is made in publish.py, or in parts in version_parts.py.

A full version is written first, every `full_every` versions, when names or shapes change, and when the deltas since the
last one would together be larger than it. A worker therefore never fetches more than twice the size of a full version.
Deltas are kept back to the last but one full version, so that a worker that is applying a chain can finish it.

The newest version's tensors stay in memory until its successor is copied, so that it can be written again, in full, if
its files are damaged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from areal_like.errors import WeightError
from areal_like.weights.adapter import AdapterInfo
from areal_like.weights.catalog import delta_name
from areal_like.weights.delta import (
    DELTA_SUFFIX,
    DeltaManifest,
    DeltaTensor,
    digest,
    encode_tensor,
    same_layout,
)
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightManifest, WeightStore, describe
from trainer.config import WeightStoreSettings
from trainer.gathered import GatheredTensors
from trainer.weights.publish import tensor_bytes

Tensors = Mapping[str, TensorBytes]


class Parts(Protocol):
    """A version of which the tensors are on several ranks (version_parts.py)."""

    def gathered(self, version: int) -> AbstractContextManager[GatheredTensors]:
        """Read its tensors. Raises WeightError if it is no longer in memory."""


class Written(NamedTuple):
    """A version in the store: its manifest, and how many bytes a worker with the previous version needs."""

    path: Path
    num_bytes: int
    is_delta: bool


class VersionWriter:
    """Writes versions in sequence. Call from one thread at a time, except `release`, which may run in parallel.

    Keeps the tensors of the last one.
    """

    def __init__(self, root: Path, settings: WeightStoreSettings) -> None:
        self._store = WeightStore(root, settings.layout, settings.keep)
        self._delta = settings.delta
        self._base: tuple[WeightManifest, Tensors] | None = None
        self._last_full: WeightManifest | None = None
        self._chain_bytes = 0
        self._newest: tuple[int, str, Tensors | Parts, AdapterInfo | None] | None = None
        """Version, lineage, tensors and manifest entry of the adapter, of the last written version."""

    def write(
        self, version: int, lineage: str, tensors: Tensors | Parts, adapter: AdapterInfo | None = None
    ) -> Written:
        """Write one version. `tensors` must not change afterwards; of parts one piece is in memory at a time, unless
        deltas need all. Raises WeightError, RankLost."""
        if self._delta is not None and not isinstance(tensors, Mapping):
            with tensors.gathered(version) as found:
                tensors = {name: tensor_bytes(tensor) for name, tensor in found.items()}
        written = self._write(version, lineage, tensors, adapter)
        self._newest = (version, lineage, tensors, adapter)
        return written

    def release(self) -> None:
        """Drop the newest version's tensors, unless deltas need them, because its successor is about to be copied."""
        if self._delta is None:
            self._newest = None

    def write_again(self, version: int, lineage: str) -> Written | None:
        """Write the newest version again, in full; None if another one is the newest now. Raises WeightError."""
        newest = self._newest  # read once: `release` may run on another thread
        if newest is None or newest[:2] != (version, lineage):
            return None
        tensors, adapter = newest[2:]
        written = self._publish_full(version, lineage, tensors, adapter)
        if self._delta is not None:
            assert isinstance(tensors, Mapping)
            self._last_full, self._chain_bytes = describe(self._store.kind, version, lineage, tensors), 0
            manifest = self._store.root / delta_name(version, lineage)  # an existing delta would be used first
            manifest.unlink(missing_ok=True)
            manifest.with_name(manifest.name.removesuffix(".json")).unlink(missing_ok=True)
        return written

    def _write(self, version: int, lineage: str, tensors: Tensors | Parts, adapter: AdapterInfo | None) -> Written:
        if self._delta is None:
            return self._publish_full(version, lineage, tensors, adapter)
        assert isinstance(tensors, Mapping)
        manifest = describe(self._store.kind, version, lineage, tensors, adapter)
        written = self._write_delta(manifest, tensors) or self._write_full(manifest, tensors)
        self._base = (manifest, tensors)
        return written

    def _write_full(self, manifest: WeightManifest, tensors: Tensors) -> Written:
        written = self._publish_full(manifest.version, manifest.lineage, tensors, manifest.adapter)
        self._retire(manifest)
        self._last_full, self._chain_bytes = manifest, 0
        return written

    def _publish_full(
        self, version: int, lineage: str, tensors: Tensors | Parts, adapter: AdapterInfo | None
    ) -> Written:
        if not isinstance(tensors, Mapping):
            return self._publish_parts(version, lineage, tensors)
        path = self._store.publish(version, lineage, tensors, adapter)
        return Written(path, sum(tensor.data.nbytes for tensor in tensors.values()), is_delta=False)

    def _publish_parts(self, version: int, lineage: str, parts: Parts) -> Written:
        with parts.gathered(version) as tensors, contextlib.ExitStack() as reading:
            path = self._store.publish_chunks(
                version, lineage, tensors.layout, lambda names: reading.enter_context(tensors.chunks(names))
            )
            return Written(path, sum(one.num_bytes for one in tensors.layout.values()), is_delta=False)

    def _write_delta(self, manifest: WeightManifest, tensors: Tensors) -> Written | None:
        """Write a delta; None if a full version must be written instead."""
        assert self._delta is not None
        if self._base is None or self._last_full is None:
            return None
        base, old = self._base
        is_due = manifest.version - self._last_full.version >= self._delta.full_every
        if is_due or not base.version < manifest.version or base.lineage != manifest.lineage:
            return None
        if not same_layout(base, manifest):
            return None
        name = delta_name(manifest.version, manifest.lineage)
        payload = self._store.root / (name.removesuffix(".json"))
        temporary = payload.with_name(payload.name + ".tmp")
        room_bytes = self._last_full.num_bytes - self._chain_bytes
        try:
            with temporary.open("wb") as file:
                parts = _encode(file, manifest, old, tensors, self._delta.level, room_bytes)
                num_bytes = file.tell()
            if parts is None:
                temporary.unlink()
                return None
            os.replace(temporary, payload)
            delta = DeltaManifest(
                base_version=base.version, base_digest=digest(base), payload=payload.name, num_bytes=num_bytes,
                tensors=parts, result=manifest,
            )  # fmt: skip
            temporary = self._store.root / (name + ".tmp")
            temporary.write_bytes(msgspec.json.encode(delta))
            os.replace(temporary, self._store.root / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise WeightError(f"cannot publish a delta in {self._store.root}: {error.strerror}") from error
        self._chain_bytes += num_bytes
        return Written(self._store.root / name, num_bytes, is_delta=True)

    def _retire(self, full: WeightManifest) -> None:
        """Remove deltas up to the previous full version, which are no longer needed after a new full version."""
        before = self._last_full.version if self._last_full is not None else full.version
        for path in self._store.root.glob(f"v*{DELTA_SUFFIX}*"):
            number, _, rest = path.name[1:].partition("-")
            is_ours = rest.removesuffix(".json").removesuffix(DELTA_SUFFIX) == full.lineage
            if not is_ours or int(number) <= before:
                path.unlink(missing_ok=True)


def _encode(
    file: BinaryIO, manifest: WeightManifest, old: Tensors, new: Tensors, level: int, room_bytes: int
) -> tuple[DeltaTensor, ...] | None:
    """Write the blocks of every tensor, one after another; None as soon as they exceed `room_bytes`."""
    parts = []
    for entry in manifest.tensors:
        start = file.tell()
        if entry.num_bytes:
            before, after = old[entry.name].data.cast("B"), new[entry.name].data.cast("B")
            for block in encode_tensor(before, after, entry.dtype, level):
                file.write(block)
                if file.tell() > room_bytes:
                    return None
        parts.append(DeltaTensor(name=entry.name, offset=start, num_bytes=file.tell() - start))
    if not file.tell():
        file.write(b"\0")  # nothing changed: an empty file cannot be mapped
    return tuple(parts)
