"""Claims about publishing and reading policy versions."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from areal_like.errors import WeightError
from areal_like.store_owner import sweep_dead
from areal_like.weights import payload_layout, weight_store
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore, default_root, open_payload, verify

KINDS = ("shm", "disk")


def tensors(seed: int = 0) -> dict[str, TensorBytes]:
    dice = np.random.default_rng(seed)
    arrays = {"model.b": ("float32", dice.normal(size=(3, 5)).astype(np.float32)),
              "model.a": ("bfloat16", dice.integers(0, 2**16, (7,)).astype(np.uint16)),
              "model.empty": ("float32", np.zeros((0, 4), np.float32)),
              "model.flag": ("bool", np.array([True])),
              "model.scalar": ("float64", np.array(2.5))}  # fmt: skip
    return {name: TensorBytes(dtype, array.shape, array.data) for name, (dtype, array) in arrays.items()}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", request.param, keep=2)


def names(store: WeightStore) -> set[str]:
    return {path.name for path in store.root.iterdir()} - {"owner.json"}


def test_published_bytes_come_back_read_only(store: WeightStore) -> None:
    sent = tensors()
    manifest, payload = open_payload(store.publish(3, "l0", sent))
    verify(manifest, payload)
    assert (manifest.version, manifest.lineage, manifest.kind) == (3, "l0", store.kind)
    assert set(payload) == set(sent)
    for entry in manifest.tensors:
        assert bytes(payload[entry.name]) == sent[entry.name].data.tobytes()
        assert (entry.dtype, entry.shape) == sent[entry.name][:2]
        assert payload[entry.name].readonly
        assert entry.offset % payload_layout.ITEM_BYTES[entry.dtype] == 0


def test_disk_payload_is_a_safetensors_file(tmp_path: Path) -> None:
    sent = tensors()
    manifest_path = WeightStore(tmp_path, "disk", keep=2).publish(0, "l0", sent)
    payload = manifest_path.parent / open_payload(manifest_path)[0].payload
    with safe_open(payload, framework="np") as file:
        assert set(file.keys()) == set(sent)
        assert np.array_equal(file.get_tensor("model.b"), np.asarray(sent["model.b"].data))
        assert file.get_slice("model.a").get_dtype() == "BF16"
        assert file.get_tensor("model.scalar") == 2.5
        assert file.metadata() == {"format": "pt"}


def test_flat_payload_is_aligned(tmp_path: Path) -> None:
    manifest, _ = open_payload(WeightStore(tmp_path, "shm", keep=2).publish(0, "l0", tensors()))
    assert all(entry.offset % 64 == 0 for entry in manifest.tensors)


def test_tensors_of_a_safetensors_file_begin_aligned_whatever_their_names(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "disk", keep=2)
    for length in (1, 2, 30, 63):
        value = TensorBytes("float32", (1,), np.ones(1, np.float32).data)
        manifest, _ = open_payload(store.publish(length, "l0", {"w" * length: value}))
        assert manifest.tensors[0].offset % 64 == 0


def test_corrupt_tensor_is_named(store: WeightStore) -> None:
    manifest_path = store.publish(1, "l0", tensors())
    manifest, _ = open_payload(manifest_path)
    entry = next(entry for entry in manifest.tensors if entry.name == "model.b")
    with (store.root / manifest.payload).open("r+b") as file:
        file.seek(entry.offset + 5)
        file.write(b"\x99")
    with pytest.raises(WeightError, match=r"model\.b of version 1"):
        verify(*open_payload(manifest_path))


def test_missing_cut_or_damaged_files_are_weight_errors(store: WeightStore) -> None:
    manifest_path = store.publish(1, "l0", tensors())
    payload = store.root / open_payload(manifest_path)[0].payload
    os.truncate(payload, payload.stat().st_size - 1)
    with pytest.raises(WeightError, match="bytes where"):
        open_payload(manifest_path)
    payload.unlink()
    with pytest.raises(WeightError, match="cannot read payload"):
        open_payload(manifest_path)
    whole = manifest_path.read_bytes()
    manifest_path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightError, match="damaged manifest"):
        open_payload(manifest_path)
    manifest_path.unlink()
    with pytest.raises(WeightError, match="no manifest"):
        open_payload(manifest_path)


@pytest.mark.parametrize(
    ("field", "value"), [("offset", 10**9), ("offset", -1), ("dtype", "float31"), ("shape", [2]), ("num_bytes", 1)]
)
def test_manifest_that_contradicts_itself_is_a_weight_error(store: WeightStore, field: str, value: object) -> None:
    manifest_path = store.publish(1, "l0", tensors())
    document = json.loads(manifest_path.read_text())
    document["tensors"][0][field] = value
    manifest_path.write_text(json.dumps(document))
    with pytest.raises(WeightError, match="damaged manifest"):
        open_payload(manifest_path)


def test_manifest_cannot_point_out_of_its_folder(store: WeightStore) -> None:
    manifest_path = store.publish(1, "l0", tensors())
    manifest_path.write_text(json.dumps(json.loads(manifest_path.read_text()) | {"payload": "../secret"}))
    with pytest.raises(WeightError, match="damaged manifest"):
        open_payload(manifest_path)


def test_only_the_newest_versions_stay_and_an_open_one_remains_readable(store: WeightStore) -> None:
    manifest, payload = open_payload(store.publish(0, "l0", tensors()))
    for version in (1, 2, 3):
        store.publish(version, "l0", tensors(version))
    versions = sorted({int(name[1:9]) for name in names(store)})
    assert versions == [2, 3]
    assert len(names(store)) == 4
    verify(manifest, payload)
    newest = store.newest()
    assert newest is not None
    assert open_payload(newest)[0].version == 3


def test_republished_version_of_a_new_lineage_voids_the_abandoned_future(store: WeightStore) -> None:
    for version in (4, 5, 6):
        store.publish(version, "l0", tensors(version))
    path = store.publish(5, "l1", tensors(50))
    assert store.newest() == path
    assert {name.split(".")[0] for name in names(store)} == {"v00000005-l1"}
    store.publish(6, "l1", tensors(60))
    assert {name.split(".")[0] for name in names(store)} == {"v00000005-l1", "v00000006-l1"}


def test_version_can_be_published_again_under_its_own_lineage(store: WeightStore) -> None:
    store.publish(5, "l0", tensors(1))
    manifest, payload = open_payload(store.publish(5, "l0", tensors(2)))
    verify(manifest, payload)
    assert bytes(payload["model.b"]) == tensors(2)["model.b"].data.tobytes()


def test_payload_without_manifest_is_ignored_and_cleaned_up(store: WeightStore) -> None:
    good = store.publish(1, "l0", tensors())
    store.publish(2, "l0", tensors()).unlink()  # killed after the payload, before the manifest
    (store.root / "v00000003-l0.weights.tmp").write_bytes(b"half")  # killed within the payload
    (store.root / "v00000003-l0.manifest.json.tmp").write_bytes(b"half")  # killed within the manifest
    assert store.newest() == good
    WeightStore(store.root, store.kind, keep=2).publish(4, "l0", tensors())
    assert {name.split(".")[0] for name in names(store)} == {"v00000001-l0", "v00000004-l0"}
    verify(*open_payload(good))


def test_looking_at_a_store_disturbs_no_writer(store: WeightStore) -> None:
    (store.root / "v00000003-l0.weights.tmp").write_bytes(b"being written")
    assert WeightStore(store.root, store.kind, keep=2).newest() is None
    assert names(store) == {"v00000003-l0.weights.tmp"}


PUBLISHER = """
import itertools, sys
from pathlib import Path
import numpy as np
from areal_like.store_owner import sweep_dead
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
store = WeightStore(Path(sys.argv[1]), sys.argv[2], keep=2)
for version in itertools.count():
    array = np.full((64, 1024), version, np.float32)
    store.publish(version, "l0", {f"t{i}": TensorBytes("float32", array.shape, array.data) for i in range(8)})
    print(version, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_kill_at_any_moment_leaves_only_whole_versions(tmp_path: Path, kind: str) -> None:
    for attempt in range(3):
        root = tmp_path / str(attempt)
        publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(root), kind], stdout=subprocess.PIPE)
        assert publisher.stdout is not None
        for _ in range(3 + attempt):
            assert publisher.stdout.readline()
        time.sleep(0.0013 * attempt)
        publisher.send_signal(signal.SIGKILL)
        publisher.communicate(timeout=300.0)
        found = list(root.glob("*.manifest.json"))
        assert found
        for path in found:
            manifest, payload = open_payload(path)
            verify(manifest, payload)
            assert np.frombuffer(payload["t7"], np.float32)[-1] == manifest.version


@pytest.mark.parametrize(
    "tensor",
    [
        TensorBytes("float32", (3,), memoryview(b"12345678")),
        TensorBytes("complex", (1,), memoryview(b"12345678")),
        TensorBytes("uint8", (4,), memoryview(b"12345678")[::2]),
    ],
)
def test_tensor_that_does_not_fit_its_shape_is_refused_before_anything_is_written(
    store: WeightStore, tensor: TensorBytes
) -> None:
    with pytest.raises(ValueError):
        store.publish(1, "l0", {"w": tensor})
    assert names(store) == set()


def test_what_a_killed_publisher_left_is_removed_before_the_next_version_is_written(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = store.root / "v00000007-l0.weights.tmp"
    left.write_bytes(b"half")
    lay_out, seen = payload_layout.lay_out, list[bool]()
    monkeypatch.setattr(weight_store, "lay_out", lambda *parts: (seen.append(left.exists()), lay_out(*parts))[1])
    store.publish(1, "l0", tensors())
    assert seen == [False], "its room is free while the version is written"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_device_is_a_weight_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path, "shm", keep=2)
    monkeypatch.setattr(store, "_remove_leftovers", lambda: None)
    temporary = tmp_path / "v00000001-l0.weights.tmp"
    temporary.symlink_to("/dev/full")
    with pytest.raises(WeightError, match="kind: disk"):
        store.publish(1, "l0", tensors())
    assert names(store) == set()


def test_shared_memory_without_room_falls_back_to_the_run_folder_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(weight_store, "SHARED_MEMORY", shared)
    assert default_root("run1", "shm", tmp_path, need_bytes=1) == shared / f"areal_like-run1-{os.getuid()}"
    assert sweep_dead(shared) == []
    with caplog.at_level(logging.WARNING):
        assert default_root("run2", "shm", tmp_path, need_bytes=1 << 60) == tmp_path / "weights"
    assert "MiB are needed" in caplog.text
    monkeypatch.setattr("areal_like.weights.weight_store.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert default_root("run4", "shm", tmp_path, need_bytes=1000).parent == shared, "exactly enough is enough"
    assert default_root("run5", "shm", tmp_path, need_bytes=1001) == tmp_path / "weights"
    assert default_root("run3", "disk", tmp_path) == tmp_path / "weights"
    monkeypatch.setattr(weight_store, "SHARED_MEMORY", tmp_path / "none")
    with caplog.at_level(logging.WARNING):
        assert default_root("run6", "shm", tmp_path, need_bytes=1) == tmp_path / "weights"
    assert "there is no" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [
        ("bool", 1), ("uint8", 1), ("int8", 1), ("int16", 2), ("int32", 4), ("int64", 8), ("float16", 2),
        ("bfloat16", 2), ("float32", 4), ("float64", 8), ("float8_e4m3fn", 1), ("float8_e5m2", 1),
    ],
)  # fmt: skip
def test_tensors_of_every_type_have_their_size_on_both_ends(tmp_path: Path, dtype: str, item_bytes: int) -> None:
    data = bytes(range(6 * item_bytes))
    for kind in ("disk", "shm"):
        folder = WeightStore(tmp_path / kind, kind, keep=1)  # type: ignore[arg-type]
        _, read = open_payload(folder.publish(0, "l0", {"w": TensorBytes(dtype, (2, 3), memoryview(data))}))
        assert bytes(read["w"]) == data
        with pytest.raises(
            ValueError,
            match=f"expected {6 * item_bytes} contiguous bytes for .* got {6 * item_bytes - 1} contiguous bytes",
        ):
            folder.publish(1, "l0", {"w": TensorBytes(dtype, (2, 3), memoryview(data[:-1]))})


@pytest.mark.parametrize("kind", ["disk", "shm"])
def test_a_description_is_the_manifest_that_publishing_gives(tmp_path: Path, kind: Any) -> None:
    path = WeightStore(tmp_path, kind, keep=1).publish(3, "l0", tensors())
    published, _ = open_payload(path)
    assert weight_store.describe(kind, 3, "l0", tensors()) == published
    assert path.name == weight_store.manifest_name(3, "l0") == "v00000003-l0.manifest.json"


def test_versions_that_were_kept_are_as_many_as_asked_for_and_void_lineages_go(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.publish(version, "l0", tensors())
    newest = store.newest()
    assert newest is not None
    assert newest.name == "v00000003-l0.manifest.json"
    kept = [path.name for path in sorted(store.root.glob("*.manifest.json"))]
    assert kept == [f"v{version:08d}-l0.manifest.json" for version in (1, 2, 3)][-store.keep :]
    store.publish(3, "l1", tensors())
    assert "v00000003-l0.manifest.json" not in names(store), "the same number of another lineage is void"
    assert "v00000003-l1.manifest.json" in names(store)
    store.close()
    assert store.root.exists()
    store.close(remove=True)
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("version", "lineage", "num_tensors"), [(-1, "l0", 1), (0, "", 1), (0, "a" * 65, 1), (0, "a/b", 1), (0, "l0", 0)]
)
def test_a_version_that_cannot_be_named_is_refused(
    tmp_path: Path, version: int, lineage: str, num_tensors: int
) -> None:
    store = WeightStore(tmp_path, "disk", keep=1)
    store.publish(0, "a" * 64, tensors())
    with pytest.raises(ValueError, match="of lineage"):
        store.publish(version, lineage, tensors() if num_tensors else {})


def test_a_store_keeps_at_least_one_version(tmp_path: Path) -> None:
    WeightStore(tmp_path, "disk", keep=1)
    with pytest.raises(ValueError):
        WeightStore(tmp_path, "disk", keep=0)


def test_a_folder_that_has_an_owner_keeps_it_and_one_without_is_claimed(tmp_path: Path) -> None:
    made = WeightStore(tmp_path / "weights", "disk", keep=1)
    owner = tmp_path / "weights" / "owner.json"
    assert owner.is_file()
    owner.write_bytes(b"another process")
    WeightStore(made.root, "disk", keep=1)
    assert owner.read_bytes() == b"another process", "the run's controller outlives the trainer"


def test_what_a_writer_without_room_has_begun_is_removed(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(0, "l0", tensors())
    before = sorted(path.name for path in store.root.iterdir())
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".json") and "v" in Path(target).name[:1]:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(weight_store.os, "replace", full)
    with pytest.raises(WeightError, match="No space left"):
        store.publish(1, "l0", tensors())
    assert sorted(path.name for path in store.root.iterdir()) == before
