"""Where a weight store is: whose folders are used, with which rights, and what is said where there is no room."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.errors import UserError, WeightError
from areal_like.weights import payload_layout, weight_store
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightManifest, WeightStore, default_root, map_payload

ONES = {"w": TensorBytes("float32", (2, 3), np.ones((2, 3), np.float32).data)}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared memory of this host, with room for everything."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(weight_store, "SHARED_MEMORY", folder)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_stores_are_their_owner_s_alone(tmp_path: Path, shared: Path) -> None:
    made = WeightStore(tmp_path / "a" / "b", "disk", keep=1)
    in_memory, on_disk = default_root("r", "shm", tmp_path), default_root("r", "disk", tmp_path / "run")
    assert [mode(path) for path in (made.root, in_memory, on_disk)] == [0o700] * 3
    in_memory.chmod(0o755)
    assert mode(default_root("r", "shm", tmp_path)) == 0o700, "an old one too"
    assert (in_memory / "owner.json").exists()
    assert (on_disk / "owner.json").exists()
    WeightStore(made.root, "disk", keep=1)


def test_store_that_is_gone_is_removed_without_a_word(tmp_path: Path) -> None:
    made = WeightStore(tmp_path / "w", "disk", keep=1)
    for _ in range(2):
        made.close(remove=True)
        assert not made.root.exists()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot create the weight store: Not a directory") as refused:
        WeightStore(tmp_path / "file" / "weights", "disk", keep=1)
    assert refused.value.where == str(tmp_path / "file" / "weights")


@pytest.mark.parametrize("what", ["link", "file", "other user"])
def test_place_in_shared_memory_that_is_not_ours_is_not_used(
    what: str, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = os.getuid()
    place = shared / f"areal_like-r-{own}"
    if what == "link":
        (tmp_path / "theirs").mkdir()
        place.symlink_to(tmp_path / "theirs")
    elif what == "file":
        place.touch()
    else:
        real = Path.lstat
        monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_uid=own + 1, st_mode=real(path).st_mode))
    with caplog.at_level(logging.WARNING):
        found = weight_store._obstacle(place, 1)
    assert found.startswith(str(place))
    assert found.endswith("File exists" if what == "file" else "does not belong to this user")


def test_run_whose_place_is_taken_uses_its_own_folder_and_says_why(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shared / f"areal_like-r-{os.getuid()}").touch()
    with caplog.at_level(logging.WARNING):
        assert default_root("r", "shm", tmp_path / "run") == tmp_path / "run" / "weights"
    assert f"weights are transferred through {tmp_path}/run/weights instead of shared memory: " in caplog.text


def test_room_that_is_missing_is_said_in_mebibytes(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    assert weight_store._obstacle(shared / "x", 7 << 20) == f"{shared} has 5 MiB left, 7 MiB are needed"
    assert weight_store._obstacle(shared / "x", 5 << 20) == ""


@pytest.mark.parametrize(
    ("kind", "number", "advice"),
    [
        ("shm", errno.ENOSPC, "; use trainer.weights.kind: disk"),
        ("shm", errno.EIO, ""),
        ("disk", errno.ENOSPC, ""),
    ],
)
def test_version_that_cannot_be_written_is_said_with_its_size(
    kind: Any, number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path / "w", kind, keep=1)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(weight_store, "_write_all", fail)
    with pytest.raises(WeightError) as refused:
        store.publish(1, "l0", ONES)
    words = f"cannot write 24 bytes of weights to {tmp_path}/w: {os.strerror(number)}{advice}"
    assert str(refused.value).endswith(words)
    assert [path.name for path in store.root.iterdir()] == ["owner.json"]


def test_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class Slow:
        def write(self, data: memoryview) -> int:
            written.append(bytes(data[:3]))
            return len(written[-1])

    weight_store._write_all(Slow(), memoryview(b"abcdefgh"))  # type: ignore[arg-type]
    assert written == [b"abc", b"def", b"gh"]


def manifest(**changes: Any) -> WeightManifest:
    entry = payload_layout.TensorEntry(name="w", dtype="float32", shape=(2,), offset=4, num_bytes=8, crc32=0)
    facts = {"version": 0, "lineage": "l0", "kind": "disk", "payload": "p", "num_bytes": 12, "tensors": (entry,)}
    return WeightManifest(**{**facts, **changes})  # type: ignore[arg-type]


def test_manifest_is_checked_when_it_is_made() -> None:
    manifest()
    for changes, words in (
        ({"version": -1}, "version -1"), ({"payload": "a/p"}, "payload 'a/p'"), ({"payload": "/p"}, "payload '/p'"),
        ({"num_bytes": 11}, "tensor w is outside the payload"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            manifest(**changes)


def test_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"abc")
    assert bytes(map_payload(tmp_path / "p", 3)) == b"abc"
    for num_bytes in (2, 4):
        with pytest.raises(WeightError, match=f"has 3 bytes where {num_bytes} were written"):
            map_payload(tmp_path / "p", num_bytes)


def test_tensors_are_laid_out_from_wide_to_narrow_and_by_name() -> None:
    made = {
        name: TensorBytes(dtype, (1,), memoryview(bytes(size)))
        for name, dtype, size in (("b", "int8", 1), ("a", "int8", 1), ("z", "float64", 8), ("m", "float16", 2))
    }
    entries, header = payload_layout.lay_out("shm", made)
    assert header == b""
    assert [(entry.name, entry.offset) for entry in entries] == [("z", 0), ("m", 64), ("a", 128), ("b", 192)]
    entries, header = payload_layout.lay_out("disk", made)
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert [(entry.name, entry.offset - len(header)) for entry in entries] == [("z", 0), ("m", 8), ("a", 10), ("b", 11)]
