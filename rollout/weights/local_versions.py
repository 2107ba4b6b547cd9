"""Versions put together on this host: from a full payload and deltas to one verified file with its manifest.

Owns: this worker's own folder of versions, the base that deltas are applied to, checksums of the result. Refuses: how
the parts came here (receiver.py), loading them into an engine.

The folder is stored in shared memory where there is room, else among temporary files; it is emptied at the start,
belongs to this process (areal_like.store_owner removes it should the process be killed) and goes with it. A version
appears under its final name only when every checksum agrees, its manifest last. Two complete versions stay: the one in
use and the newest, which is the base of the next delta.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_like.errors import WeightError, WeightsDamaged
from areal_like.store_owner import SHARED_MEMORY, claim, remove_if_dead, sweep_dead
from areal_like.weights.delta import Base, DeltaManifest, apply_tensor, digest
from areal_like.weights.weight_store import (
    WeightManifest,
    manifest_name,
    tensors_in,
    verify,
)

KEEP = 2
ROOM = 4
"""Free space a folder needs, in versions: the base, the one being made, what it is made from, and one to spare."""


class Held(NamedTuple):
    """A complete version at hand: its manifest and all its bytes (mapped; they outlive the file's name)."""

    manifest: WeightManifest
    payload: memoryview


class DeltaPart(NamedTuple):
    """A delta at hand."""

    manifest: DeltaManifest
    payload: memoryview


def local_roots(run_id: str, worker: str) -> tuple[Path, ...]:
    """Where one worker's versions may lie, best first: shared memory, then temporary files."""
    name = "areal_like-" + re.sub(r"[^\w.-]", "_", f"{run_id}.{worker}-{os.getuid()}")
    folders = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
    return tuple(folder / name for folder in (*folders, Path(tempfile.gettempdir())))


class LocalVersions:
    """One worker's folder of versions. Methods block on files: call them from a thread, one at a time."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """`roots`: where they may lie, best first; nothing is made yet."""
        self._roots = roots
        self.root = roots[-1]
        self._is_open = False
        self._held: Held | None = None

    def open(self, version_bytes: int) -> None:
        """Make the folder, empty and ours, where there is room for versions of this size. Raises WeightError.

        Open already: nothing happens.
        """
        if self._is_open:
            return
        try:
            for root in self._roots:  # what a dead process of our name left, or one of a dead worker alongside us
                remove_if_dead(root)
            sweep_dead()
            roomy = (root for root in self._roots if _free_bytes(root.parent) >= ROOM * version_bytes)
            self.root = _unused(next(roomy, self._roots[-1]))
            self.root.mkdir(mode=0o700, parents=True)
            claim(self.root)
        except OSError as error:
            raise WeightError(f"cannot make {self.root}: {error.strerror}") from error
        self._is_open = True

    def close(self) -> None:
        """Remove it all."""
        self._held = None
        if self._is_open:
            shutil.rmtree(self.root, ignore_errors=True)
            self._is_open = False

    @property
    def base(self) -> Base | None:
        """What a delta may start from."""
        return None if self._held is None else Base(self._held.manifest.version, digest(self._held.manifest))

    def part(self, name: str) -> Path:
        """Where a payload is received."""
        return self.root / f"{name}.part"

    def forget(self) -> None:
        """The base is not to be trusted: the next version comes whole."""
        self._held = None

    def build(self, full: Held | None, deltas: Sequence[DeltaPart], received: Path | None = None) -> Path:
        """Put a version together: from `full`, else from the base, by `deltas` in order. Returns its manifest's path.

        `received`: the file `full` is stored in, when it is ours to rename. Raises WeightError when the chain does not
        fit or a checksum of the result differs; the base then stays what it was.
        """
        start = full or self._held
        if start is None:
            raise WeightsDamaged("received a delta without its base version")
        manifest = deltas[-1].manifest.result if deltas else start.manifest
        temporary, target = self.root / (manifest.payload + ".tmp"), self.root / manifest.payload
        try:
            if received is not None and not deltas:
                payload = start.payload
                os.replace(received, temporary)
            else:
                writable = _copy(start.payload, temporary)
                _apply(start.manifest, deltas, writable)
                payload = writable.toreadonly()
            verify(manifest, tensors_in(manifest, payload))
            os.replace(temporary, target)
            return self._complete(Held(manifest, payload))
        except OSError as error:
            raise WeightError(f"cannot assemble version {manifest.version}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _complete(self, held: Held) -> Path:
        manifest = held.manifest
        path = self.root / manifest_name(manifest.version, manifest.lineage)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(msgspec.json.encode(manifest))
        os.replace(temporary, path)
        self._held = held
        self._retire(keep=path)
        return path

    def _retire(self, keep: Path) -> None:
        """Older versions go, all but the one before; so do received parts (the relay has them mapped)."""
        manifests = sorted(self.root.glob("v*.manifest.json"), key=lambda path: path.stat().st_mtime_ns)
        kept = [*[path for path in manifests if path != keep][1 - KEEP :], keep]
        stems = tuple(path.name.removesuffix("manifest.json") for path in kept)
        for path in self.root.glob("v*"):
            if not path.name.startswith(stems) or path.suffix == ".part":
                path.unlink(missing_ok=True)


def _unused(root: Path) -> Path:
    """`root`, or a name alongside it where something is that does not belong to this user to remove."""
    return root.with_name(f"{root.name}-{secrets.token_hex(4)}") if root.exists() else root


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _copy(payload: memoryview, path: Path) -> memoryview:
    """A writable mapped copy of `payload` in a new file."""
    with path.open("wb+", buffering=0) as file:
        rest = payload
        while len(rest):
            rest = rest[file.write(rest) :]
        return memoryview(mmap.mmap(file.fileno(), len(payload)))


def _apply(start: WeightManifest, deltas: Sequence[DeltaPart], payload: memoryview) -> None:
    at = start
    for delta in deltas:
        if (delta.manifest.base_version, delta.manifest.base_digest) != (at.version, digest(at)):
            raise WeightsDamaged(
                f"the delta to version {delta.manifest.result.version} starts from {delta.manifest.base_version},"
                f" but this worker has version {at.version}"
            )
        entries = {entry.name: entry for entry in delta.manifest.result.tensors}
        if len(payload) != delta.manifest.result.num_bytes:
            raise WeightsDamaged(f"the delta to version {delta.manifest.result.version} is for another layout")
        for tensor in delta.manifest.tensors:
            if tensor.num_bytes:
                entry = entries[tensor.name]
                blocks = delta.payload[tensor.offset : tensor.offset + tensor.num_bytes]
                apply_tensor(blocks, payload[entry.offset : entry.offset + entry.num_bytes], entry.dtype)
        at = delta.manifest.result
