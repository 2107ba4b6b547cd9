"""Versions assembled on this host: from a full payload and deltas to one verified file with its manifest.

How the parts arrive is in receiver.py.

The folder is in shared memory if there is room, else among temporary files. It is emptied at the start, belongs to this
process, and is removed with it (by areal_like.store_owner if the process is killed). A version gets its final name only
when every checksum matches, and its manifest last. Two complete versions are kept: the one in use and the newest, which
is the base of the next delta.
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
from areal_like.secret_values import SEALED_LOGS
from areal_like.store_owner import SHARED_MEMORY, claim, remove_if_dead, sweep_dead
from areal_like.weights.delta import Base, DeltaManifest, apply_tensor, digest
from areal_like.weights.weight_store import WeightManifest, manifest_name, tensors_in, verify

KEEP = 2
ROOM = 4
"""Free space that a folder needs, in versions: the base, the one being assembled, its parts, and one in reserve."""


class Held(NamedTuple):
    """A complete local version: its manifest and all its bytes (mapped; they stay valid after the file is deleted)."""

    manifest: WeightManifest
    payload: memoryview


class DeltaPart(NamedTuple):
    """A local delta."""

    manifest: DeltaManifest
    payload: memoryview


def local_roots(run_id: str, worker: str) -> tuple[Path, ...]:
    """Possible folders of one worker's versions, best first: shared memory, then temporary files, which may be on a
    disk, unless the run is encrypted."""
    name = "areal_like-" + re.sub(r"[^\w.-]", "_", f"{run_id}.{worker}-{os.getuid()}")
    folders = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
    if not (folders and os.environ.get(SEALED_LOGS)):
        folders.append(Path(tempfile.gettempdir()))
    return tuple(folder / name for folder in folders)


class LocalVersions:
    """One worker's folder of versions. Methods block on files: call them from a thread, one at a time."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """`roots`: possible folders, best first; nothing is created yet."""
        self._roots = roots
        self.root = roots[-1]
        self._is_open = False
        self._held: Held | None = None

    def open(self, version_bytes: int) -> None:
        """Create an empty folder with room for versions of this size. Raises WeightError.

        Does nothing if it is open already.
        """
        if self._is_open:
            return
        try:
            for root in self._roots:  # folders left by a dead process of this name, or by another dead worker
                remove_if_dead(root)
            sweep_dead()
            roomy = (root for root in self._roots if _free_bytes(root.parent) >= ROOM * version_bytes)
            self.root = _unused(next(roomy, self._roots[-1]))
            self.root.mkdir(mode=0o700, parents=True)
            claim(self.root)
        except OSError as error:
            raise WeightError(f"cannot create {self.root}: {error.strerror}") from error
        self._is_open = True

    def close(self) -> None:
        """Remove the folder."""
        self._held = None
        if self._is_open:
            shutil.rmtree(self.root, ignore_errors=True)
            self._is_open = False

    @property
    def base(self) -> Base | None:
        """The base for a delta."""
        return None if self._held is None else Base(self._held.manifest.version, digest(self._held.manifest))

    def part(self, name: str) -> Path:
        """Path at which a payload is received."""
        return self.root / f"{name}.part"

    def forget(self) -> None:
        """Discard the base, which may be damaged: the next version must be complete."""
        self._held = None

    def build(self, full: Held | None, deltas: Sequence[DeltaPart], received: Path | None = None) -> Path:
        """Assemble a version: from `full`, else from the base, by `deltas` in order. Returns its manifest's path.

        `received`: the file of `full`, if it may be renamed. Raises WeightError if the chain does not fit or a checksum
        of the result differs; the base is then unchanged.
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
        """Remove all versions except this and the previous one, and received parts (the relay has them mapped)."""
        manifests = sorted(self.root.glob("v*.manifest.json"), key=lambda path: path.stat().st_mtime_ns)
        kept = [*[path for path in manifests if path != keep][1 - KEEP :], keep]
        stems = tuple(path.name.removesuffix("manifest.json") for path in kept)
        for path in self.root.glob("v*"):
            if not path.name.startswith(stems) or path.suffix == ".part":
                path.unlink(missing_ok=True)


def _unused(root: Path) -> Path:
    """`root`, or another name if that exists and cannot be removed by this user."""
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
                f"the delta to version {delta.manifest.result.version} starts from version "
                f"{delta.manifest.base_version}, but this worker has version {at.version}"
            )
        entries = {entry.name: entry for entry in delta.manifest.result.tensors}
        if len(payload) != delta.manifest.result.num_bytes:
            raise WeightsDamaged(
                f"the delta to version {delta.manifest.result.version} is for a different tensor layout"
            )
        for tensor in delta.manifest.tensors:
            if tensor.num_bytes:
                entry = entries[tensor.name]
                blocks = delta.payload[tensor.offset : tensor.offset + tensor.num_bytes]
                apply_tensor(blocks, payload[entry.offset : entry.offset + entry.num_bytes], entry.dtype)
        at = delta.manifest.result
