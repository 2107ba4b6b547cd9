"""The weight store: published policy versions, with one payload file and one manifest each.

It publishes atomically (`atomic-versions`), reads, verifies checksums and removes old versions. Tensors are bytes with
dtype names and shapes; torch is not imported. Ownership of the folder is in store_owner.py.

A version exists once its manifest does: the payload is written and named first, the manifest comes last by an atomic
rename. A writer that is killed leaves a file without a manifest, which readers ignore and the next writer removes. A
reader maps the payload; a version that is deleted stays readable in a process that has it open.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from areal_like.errors import UserError, WeightError, WeightsDamaged
from areal_like.store_owner import OWNER_FILE, SHARED_MEMORY, STORE_PREFIX, claim
from areal_like.weights.adapter import AdapterInfo
from areal_like.weights.payload_layout import (
    Chunk,
    StoreKind,
    TensorBytes,
    TensorEntry,
    TensorLayout,
    expected_bytes,
    lay_out,
)

log = logging.getLogger(__name__)

_NO_CHUNK: Chunk = ("", memoryview(b""))
_SUFFIX = {"shm": ".weights", "disk": ".safetensors"}
_MANIFEST_SUFFIX = ".manifest.json"
_TEMPORARY_SUFFIX = ".tmp"


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a version. `payload` is the name of a file in the manifest's folder, `num_bytes` its size.

    adapter: None if the whole model is trained.
    """

    version: int
    lineage: str
    kind: StoreKind
    payload: str
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    adapter: AdapterInfo | None = None

    def __post_init__(self) -> None:
        if self.payload != os.path.basename(self.payload) or self.version < 0:
            raise ValueError(
                f"invalid payload {self.payload!r} or version {self.version}: expected a file name and a version of at "
                "least 0"
            )
        for entry in self.tensors:
            if entry.offset < 0 or entry.offset + entry.num_bytes > self.num_bytes:
                raise ValueError(f"tensor {entry.name} is outside the payload")
            if entry.num_bytes != expected_bytes(entry.dtype, entry.shape):
                raise ValueError(
                    f"tensor {entry.name}: {entry.num_bytes} bytes do not match dtype {entry.dtype} and shape "
                    f"{entry.shape}"
                )


class WeightStore:
    """Writer of a weight store; one process publishes at a time. Methods block on file I/O: call them from a thread."""

    def __init__(self, root: Path, kind: StoreKind, keep: int) -> None:
        """`keep`: number of newest versions that are kept. The constructor changes no version, so a reader may create
        an object while a writer exists."""
        if keep < 1:
            raise ValueError(f"a weight store must keep at least one version, not {keep}")
        self.root, self.kind, self.keep = root, kind, keep
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the weight store: {error.strerror}", where=str(root)) from error
        if not (root / OWNER_FILE).exists():
            claim(root)

    def publish(
        self, version: int, lineage: str, tensors: Mapping[str, TensorBytes], adapter: AdapterInfo | None = None
    ) -> Path:
        """Write one version. Versions >= `version` of other lineages become invalid.

        Incomplete files of a killed writer are removed.

        Args:
            version: number of the version, at least 0.
            lineage: name of the sequence of versions that it belongs to.
            tensors: bytes, dtype and shape of each tensor, by name.
            adapter: metadata of an adapter for the manifest.

        Returns:
            Path of the version's manifest, which appears last.

        Raises:
            WeightError: there is not enough space.
            ValueError: a tensor's bytes do not fit its shape.

        Example:
            >>> import tempfile
            >>> store = WeightStore(Path(tempfile.mkdtemp()) / "weights", "disk", keep=2)
            >>> path = store.publish(0, "l0", {"w": TensorBytes("float32", (2,), memoryview(bytes(8)))})
            >>> manifest, tensors = open_payload(path)
            >>> verify(manifest, tensors)
            >>> manifest.version, len(tensors["w"])
            (0, 8)
            >>> store.close(remove=True)
        """

        def chunks(names: Sequence[str]) -> Iterator[Chunk]:
            return ((name, _raw(tensors[name])) for name in names)

        return self.publish_chunks(version, lineage, tensors, chunks, adapter)

    def publish_chunks(
        self,
        version: int,
        lineage: str,
        tensors: Mapping[str, TensorBytes | TensorLayout],
        chunks: Callable[[Sequence[str]], Iterator[Chunk]],
        adapter: AdapterInfo | None = None,
    ) -> Path:
        """Write one version as `publish` does, without having all of its bytes at once.

        Args:
            version: as for `publish`.
            lineage: as for `publish`.
            tensors: dtype and shape of each tensor, by name.
            chunks: called once, with names in the order of the payload; yields the bytes of these tensors in order, in
                one or more chunks each, with the name. An exception that it raises leaves no version behind.
            adapter: as for `publish`.

        Returns:
            Path of the version's manifest.

        Raises:
            WeightError: there is not enough space.
            ValueError: a tensor's bytes do not fit its shape.
        """
        if version < 0 or not tensors or not re.fullmatch(r"[\w.-]{1,64}", lineage):
            raise ValueError(
                f"cannot publish version {version} of lineage {lineage!r} with {len(tensors)} tensors: a version of at "
                "least 0, a lineage name of 1 to 64 letters, digits or `_.-`, and at least one tensor are required"
            )
        stem = _stem(version, lineage)
        payload, manifest_path = self.root / (stem + _SUFFIX[self.kind]), self.root / (stem + _MANIFEST_SUFFIX)
        manifest_path.unlink(missing_ok=True)
        self._remove_leftovers()
        temporary = payload.with_name(payload.name + _TEMPORARY_SUFFIX)
        entries, header = lay_out(self.kind, tensors)
        try:
            with temporary.open("wb", buffering=0) as file:
                entries = _write_payload(file, header, entries, chunks([entry.name for entry in entries]))
                num_bytes = file.truncate()  # after an empty last tensor the position is past the written data
            os.replace(temporary, payload)
            manifest = WeightManifest(
                version=version, lineage=lineage, kind=self.kind,
                payload=payload.name, num_bytes=num_bytes, tensors=tuple(entries), adapter=adapter,
            )  # fmt: skip
            temporary = manifest_path.with_name(manifest_path.name + _TEMPORARY_SUFFIX)
            temporary.write_bytes(msgspec.json.encode(manifest))
            os.replace(temporary, manifest_path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._remove_leftovers()
            need = sum(entry.num_bytes for entry in entries)
            advice = "; use trainer.weights.kind: disk" if self.kind == "shm" and error.errno == errno.ENOSPC else ""
            raise WeightError(
                f"cannot write {need} bytes of weights to {self.root}: {error.strerror}{advice}"
            ) from error
        self._retire(version, lineage)
        return manifest_path

    def newest(self) -> Path | None:
        """Manifest of the newest complete version, or None."""
        return max(self.root.glob(f"v*{_MANIFEST_SUFFIX}"), key=_version_of, default=None)

    def close(self, *, remove: bool = False) -> None:
        """Close the store. With `remove`, delete it (at the end of a run)."""
        if remove:
            shutil.rmtree(self.root, ignore_errors=True)

    def _retire(self, version: int, lineage: str) -> None:
        manifests = sorted(self.root.glob(f"v*{_MANIFEST_SUFFIX}"), key=_version_of)
        void = [path for path in manifests if _version_of(path) >= version and _lineage_of(path) != lineage]
        kept = [path for path in manifests if path not in void]
        for path in [*void, *kept[: -self.keep]]:
            path.unlink(
                missing_ok=True
            )  # the manifest first: a payload without a manifest is ignored, the reverse is an error
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for path in self.root.glob("v*"):
            stem = path.name.removesuffix(path.suffix)
            is_payload = path.suffix in _SUFFIX.values()
            is_orphan = is_payload and not (self.root / (stem + _MANIFEST_SUFFIX)).exists()
            if is_orphan or path.suffix == _TEMPORARY_SUFFIX:
                path.unlink(missing_ok=True)


def describe(
    kind: StoreKind,
    version: int,
    lineage: str,
    tensors: Mapping[str, TensorBytes],
    adapter: AdapterInfo | None = None,
) -> WeightManifest:
    """The manifest that publishing these tensors would create, including checksums; writes nothing.

    Args:
        kind: format of the payload, `shm` or `disk`.
        version: number of the version.
        lineage: name of its sequence of versions.
        tensors: bytes, dtype and shape of each tensor, by name.
        adapter: metadata of an adapter for the manifest.

    Returns:
        The manifest.
    """
    entries, _ = lay_out(kind, tensors)
    checked = tuple(msgspec.structs.replace(entry, crc32=zlib.crc32(_raw(tensors[entry.name]))) for entry in entries)
    return WeightManifest(
        version=version, lineage=lineage, kind=kind, payload=_stem(version, lineage) + _SUFFIX[kind],
        num_bytes=entries[-1].offset + entries[-1].num_bytes, tensors=checked, adapter=adapter,
    )  # fmt: skip


def manifest_name(version: int, lineage: str) -> str:
    """File name of a full version's manifest."""
    return _stem(version, lineage) + _MANIFEST_SUFFIX


def open_payload(manifest_path: Path) -> tuple[WeightManifest, Mapping[str, memoryview]]:
    """Map a version's payload. Does not compute checksums; `verify` does.

    Args:
        manifest_path: the path that `publish` returned.

    Returns:
        The manifest, and each tensor's bytes, read-only, by name.

    Raises:
        WeightError: a file is missing or damaged.
    """
    try:
        manifest = msgspec.json.decode(manifest_path.read_bytes(), type=WeightManifest)
    except OSError as error:
        raise WeightsDamaged(f"no manifest {manifest_path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise WeightsDamaged(f"damaged manifest {manifest_path}: {error}") from error
    return manifest, tensors_in(manifest, map_payload(manifest_path.parent / manifest.payload, manifest.num_bytes))


def map_payload(payload: Path, num_bytes: int) -> memoryview:
    """Map a file read-only.

    Args:
        payload: its path.
        num_bytes: the size that it must have.

    Returns:
        Its bytes, which stay readable when the file is deleted.

    Raises:
        WeightError: it does not exist or has another size.
    """
    try:
        with payload.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise WeightsDamaged(f"payload {payload} has {size} bytes where {num_bytes} were written")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise WeightsDamaged(f"cannot read payload {payload}: {error}") from error


def tensors_in(manifest: WeightManifest, payload: memoryview) -> Mapping[str, memoryview]:
    """Each tensor's bytes within a whole payload."""
    return {e.name: payload[e.offset : e.offset + e.num_bytes] for e in manifest.tensors}


def verify(manifest: WeightManifest, payload: Mapping[str, memoryview]) -> None:
    """Compare every tensor with its checksum.

    Args:
        manifest: the version's manifest.
        payload: each tensor's bytes, by name.

    Raises:
        WeightError: a checksum differs; the message names the first such tensor.
    """
    for entry in manifest.tensors:
        if zlib.crc32(payload[entry.name]) != entry.crc32:
            raise WeightsDamaged(
                f"tensor {entry.name} of version {manifest.version} ({manifest.payload}) is corrupt: checksum differs"
            )


def default_root(run_id: str, kind: StoreKind, run_dir: Path, need_bytes: int = 256 << 20) -> Path:
    """Folder of a run's weight store, claimed for the calling process (the controller), which outlives the trainer.

    `shm`: /dev/shm/areal_like-<run_id>-<uid> if shared memory has room for `need_bytes` (all kept versions together);
    otherwise, and for `disk`, <run_dir>/weights. A fallback is logged.
    """
    root = run_dir / "weights"
    if kind == "shm":
        shared = SHARED_MEMORY / f"{STORE_PREFIX}{run_id}-{os.getuid()}"
        obstacle = _obstacle(shared, need_bytes)
        if obstacle:
            log.warning("weights are transferred through %s instead of shared memory: %s", root, obstacle)
        else:
            root = shared
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    claim(root)
    return root


def _obstacle(shared: Path, need_bytes: int) -> str:
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if free_bytes < need_bytes:
        return f"{SHARED_MEMORY} has {free_bytes >> 20} MiB left, {need_bytes >> 20} MiB are needed"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            return f"{shared} does not belong to this user"
        shared.chmod(0o700)  # it may be an existing folder
    except OSError as error:
        return f"{shared}: {error.strerror}"
    return ""


def _write_payload(
    file: BinaryIO, header: bytes, entries: list[TensorEntry], chunks: Iterator[Chunk]
) -> list[TensorEntry]:
    """Write header and tensors, and return the entries with their checksums."""
    _write_all(file, memoryview(header))
    written, name, data = [], *next(chunks, _NO_CHUNK)
    for entry in entries:
        file.seek(entry.offset)
        crc32 = num_bytes = 0
        while name == entry.name:
            _write_all(file, data)
            crc32, num_bytes = zlib.crc32(data, crc32), num_bytes + len(data)
            name, data = next(chunks, _NO_CHUNK)
        if num_bytes != entry.num_bytes:
            raise ValueError(f"tensor {entry.name}: got {num_bytes} bytes, expected {entry.num_bytes}")
        written.append(msgspec.structs.replace(entry, crc32=crc32))
    return written


def _raw(tensor: TensorBytes) -> memoryview:
    return tensor.data.cast("B") if tensor.data.nbytes else memoryview(b"")


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _stem(version: int, lineage: str) -> str:
    return f"v{version:08d}-{lineage}"


def _version_of(path: Path) -> int:
    return int(path.name[1:].partition("-")[0])


def _lineage_of(path: Path) -> str:
    return path.name.removesuffix(_MANIFEST_SUFFIX).partition("-")[2]
