"""Versions put together on a worker's host: what is checked, which files stay, and where they lie."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.errors import WeightError, WeightsDamaged
from areal_like.weights.catalog import read_manifest
from areal_like.weights.delta import Base, DeltaManifest, DeltaTensor, digest, encode_tensor
from areal_like.weights.payload_layout import TensorEntry
from areal_like.weights.weight_store import WeightManifest
from rollout.weights import local_versions
from rollout.weights.local_versions import DeltaPart, Held, LocalVersions, local_roots

SIZE = 64


def arrays(version: int) -> list[np.ndarray]:
    """Two tensors; the second one never changes."""
    first = np.arange(SIZE, dtype=np.uint32)
    first[:version] += 7
    return [first, np.full(SIZE, 3, np.uint32)]


def manifest(version: int, lineage: str = "l0", *, damaged: bool = False, extra: int = 0) -> WeightManifest:
    entries = []
    for number, array in enumerate(arrays(version)):
        crc = zlib.crc32(array.tobytes()) ^ damaged
        entries.append(TensorEntry(
            name=f"t{number}", dtype="int32", shape=(SIZE,), offset=4 * SIZE * number, num_bytes=4 * SIZE, crc32=crc
        ))  # fmt: skip
    name = f"v{version:08d}-{lineage}"
    return WeightManifest(
        version=version, lineage=lineage, kind="shm", payload=f"{name}.weights", num_bytes=8 * SIZE + extra,
        tensors=tuple(entries),
    )  # fmt: skip


def content(version: int) -> bytes:
    return b"".join(array.tobytes() for array in arrays(version))


def full(version: int, **facts: Any) -> Held:
    made = manifest(version, **facts)
    return Held(made, memoryview(content(version) + bytes(made.num_bytes - 8 * SIZE)))


def delta(base: int, version: int, **facts: Any) -> DeltaPart:
    blocks = []
    parts = []
    for number, (old, new) in enumerate(zip(arrays(base), arrays(version), strict=True)):
        blob = b"".join(encode_tensor(memoryview(old.tobytes()), memoryview(new.tobytes()), "int32", 1))
        parts.append(DeltaTensor(name=f"t{number}", offset=sum(map(len, blocks)), num_bytes=len(blob)))
        blocks.append(blob)
    payload = b"".join(blocks)
    return DeltaPart(DeltaManifest(
        base_version=base, base_digest=digest(manifest(base)), payload="d", num_bytes=len(payload),
        tensors=tuple(parts), result=manifest(version, **facts),
    ), memoryview(payload))  # fmt: skip


def other_base(part: DeltaPart) -> DeltaPart:
    return part._replace(manifest=msgspec.structs.replace(part.manifest, base_digest="another"))


def names(folder: LocalVersions) -> list[str]:
    return sorted(path.name for path in folder.root.iterdir() if path.name.startswith("v"))


@pytest.fixture
def folder(tmp_path: Path) -> LocalVersions:
    made = LocalVersions([tmp_path / "local"])
    made.open(8 * SIZE)
    return made


def assert_version(path: Path, version: int) -> None:
    read = read_manifest(path)
    assert read.version == version  # type: ignore[union-attr]
    assert path.with_name(read.payload).read_bytes() == content(version)


# ------------------------------------------------------------ putting together


def test_a_whole_version_and_deltas_behind_it_or_behind_the_base_become_one_file(folder: LocalVersions) -> None:
    assert folder.base is None
    assert_version(folder.build(full(1), []), 1)
    assert folder.base == Base(1, digest(manifest(1)))
    assert_version(folder.build(None, [delta(1, 2), delta(2, 4)]), 4)
    assert folder.base == Base(4, digest(manifest(4)))
    assert_version(folder.build(full(2), [delta(2, 5)]), 5)


def test_a_received_file_is_renamed_and_not_copied(folder: LocalVersions) -> None:
    received = folder.part("p")
    assert received == folder.root / "p.part"
    received.write_bytes(content(1))
    inode = received.stat().st_ino
    path = folder.build(full(1), [], received)
    assert not received.exists()
    assert path.with_name(manifest(1).payload).stat().st_ino == inode
    second = folder.part("q")
    second.write_bytes(content(2))
    assert_version(folder.build(full(2), [delta(2, 3)], second), 3)


def test_a_version_with_a_wrong_checksum_leaves_the_base_and_no_file(folder: LocalVersions) -> None:
    folder.build(full(1), [])
    before = names(folder)
    for held, deltas in ((full(2, damaged=True), []), (None, [delta(1, 2, damaged=True)])):
        with pytest.raises(WeightsDamaged):
            folder.build(held, deltas)
        assert folder.base == Base(1, digest(manifest(1)))
        assert names(folder) == before


@pytest.mark.parametrize(
    ("deltas", "complaint"),
    [
        ([delta(2, 3)], "the delta to version 3 starts from version 2, but this worker has version 1"),
        ([other_base(delta(1, 3))], "starts from version 1, but this worker has version 1"),
        ([delta(1, 2), delta(1, 3)], "the delta to version 3 starts from version 1, but this worker has version 2"),
        ([delta(1, 2, extra=1)], "the delta to version 2 is for a different tensor layout"),
    ],
)
def test_deltas_that_do_not_fit_together_are_refused(
    folder: LocalVersions, deltas: list[DeltaPart], complaint: str
) -> None:
    folder.build(full(1), [])
    with pytest.raises(WeightsDamaged, match=complaint):
        folder.build(None, deltas)


def test_without_a_base_a_delta_is_refused(folder: LocalVersions) -> None:
    with pytest.raises(WeightsDamaged, match="without its base"):
        folder.build(None, [delta(1, 2)])
    folder.build(full(1), [])
    folder.forget()
    assert folder.base is None
    with pytest.raises(WeightsDamaged, match="without its base"):
        folder.build(None, [delta(1, 2)])


def test_a_received_file_that_is_gone_is_a_weight_error(folder: LocalVersions) -> None:
    with pytest.raises(WeightError, match="cannot assemble version 1: No such file"):
        folder.build(full(1), [], folder.part("gone"))
    assert folder.base is None


# ------------------------------------------------------------ which files stay


def test_the_version_in_use_and_the_newest_stay_and_received_parts_go(folder: LocalVersions) -> None:
    def files(*stems: str) -> list[str]:
        return sorted(f"{stem}.{end}" for stem in stems for end in ("weights", "manifest.json"))

    for version in (1, 2, 3):
        path = folder.build(full(version), [])
        os.utime(path, ns=(version, version))
        folder.part(f"v{version:08d}-l0").touch()
    assert names(folder) == sorted([*files("v00000002-l0", "v00000003-l0"), "v00000003-l0.part"])
    folder.build(full(2), [])
    assert names(folder) == files("v00000002-l0", "v00000003-l0"), "the one before stays, though its number is higher"
    folder.build(full(5, lineage="l1"), [])
    assert names(folder) == files("v00000002-l0", "v00000005-l1")


# ------------------------------------------------------------ where they lie


def test_versions_lie_where_there_is_room_for_four_of_them_and_else_in_the_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"a": 399, "b": 400}
    usage = lambda path: SimpleNamespace(free=free[Path(path).name])  # noqa: E731
    monkeypatch.setattr(local_versions.shutil, "disk_usage", usage)
    for name in free:
        (tmp_path / name).mkdir()
    roots = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    for version_bytes, place in ((100, "b"), (99, "a"), (101, "b")):
        folder = LocalVersions(roots)
        folder.open(version_bytes)
        assert folder.root == tmp_path / place / "x"
        assert folder.root.stat().st_mode & 0o777 == 0o700
        folder.close()
        assert not folder.root.exists()


def test_the_free_space_of_a_place_that_is_not_made_yet_is_that_of_the_folder_above(tmp_path: Path) -> None:
    folder = LocalVersions([tmp_path / "not" / "made" / "x"])
    folder.open(1)
    assert folder.root.is_dir()


def test_a_folder_is_opened_once_and_what_others_have_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "theirs").touch()
    folder = LocalVersions([tmp_path / "x"])
    folder.open(1)
    root = folder.root
    assert root.parent == tmp_path
    assert root.name.startswith("x-")
    (root / "mine").touch()
    folder.open(1)
    assert (folder.root, (root / "mine").exists()) == (root, True)
    folder.close()
    folder.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "theirs"]


def test_a_folder_that_cannot_be_made_is_a_weight_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match="cannot create"):
        LocalVersions([tmp_path / "file" / "x"]).open(1)


def test_places_of_a_worker_have_its_name_and_begin_with_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_versions, "SHARED_MEMORY", tmp_path)
    shared, files = local_roots("run/1", "rollout-0")
    assert (shared.parent, shared.name) == (tmp_path, files.name)
    assert shared.name == f"areal_like-run_1.rollout-0-{os.getuid()}"
    monkeypatch.setattr(local_versions, "SHARED_MEMORY", tmp_path / "none")
    assert local_roots("run/1", "rollout-0") == (files,)


def test_versions_of_an_encrypted_run_are_not_assembled_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_versions, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("AREAL_LIKE_SEALED_LOGS", str(tmp_path))
    assert [root.parent for root in local_roots("run/1", "rollout-0")] == [tmp_path]
