"""Claims about a capsule's archive: whole and unchanged, or the changed entry by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.runs.replay.capsule_file import MANIFEST, read_archive, write_archive


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    source = tmp_path / "weights"
    source.write_bytes(bytes(range(256)))
    write_archive(tmp_path / "c", {"a/weights": source, "b": b"batch"}, {"step": 3})
    return tmp_path / "c"


def test_entries_and_facts_come_back(archive: Path, tmp_path: Path) -> None:
    manifest = read_archive(archive, tmp_path / "out")
    assert manifest["step"] == 3
    assert (tmp_path / "out" / "a" / "weights").read_bytes() == bytes(range(256))
    assert (tmp_path / "out" / "b").read_bytes() == b"batch"


def test_equal_contents_make_equal_archives_and_an_existing_file_is_kept(archive: Path, tmp_path: Path) -> None:
    digest = write_archive(tmp_path / "d", {"a/weights": tmp_path / "weights", "b": b"batch"}, {"step": 3})
    assert (tmp_path / "d").read_bytes() == archive.read_bytes()
    assert digest != write_archive(tmp_path / "e", {"b": b"batch"}, {"step": 3})
    with pytest.raises(UserError, match="already exists"):
        write_archive(archive, {"b": b"other"}, {})
    assert read_archive(archive, tmp_path / "out")["step"] == 3
    assert not list(tmp_path.glob("*.partial"))


def changed(archive: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(archive) as opened:
        entries = {name: opened.read(name) for name in opened.namelist()}
    change(entries)
    with zipfile.ZipFile(archive, "w") as opened:
        for name, data in entries.items():
            opened.writestr(name, data)
    return archive


def names_of(data: bytes, name: str) -> bytes:
    manifest = json.loads(data)
    manifest["entries"][name] = {"num_bytes": 1, "sha256": "0"}
    return json.dumps(manifest).encode()


def size_of(data: bytes, number: str) -> bytes:
    """The manifest with another size of the entry `b`, of 5 bytes."""
    return data.replace(b'"num_bytes": 5', b'"num_bytes": ' + number.encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update({"b": b"batcH"}), "b was changed"),
        (lambda e: e.update({"b": b"batch and more"}), "b was changed"),
        (lambda e: e.pop("a/weights"), "a/weights is missing"),
        (lambda e: e.update({"extra": b""}), "extra is not in the manifest"),
        (lambda e: e.pop(MANIFEST), "not a complete capsule"),
        (lambda e: e.update({MANIFEST: b"[]"}), "not a complete capsule"),
        (lambda e: e.update({MANIFEST: b'{"format": 99, "entries": {}}'}), "the file has format 99, but this version"),
        (lambda e: e.update({MANIFEST: b'{"format": 1, "entries": ' + b"[" * 100_000}), "not a complete capsule"),
        (lambda e: e.update({MANIFEST: size_of(e[MANIFEST], "1e999")}), "not a complete capsule"),
        (lambda e: e.update({MANIFEST: size_of(e[MANIFEST], "-1")}), "not a complete capsule"),
        (lambda e: e.update({MANIFEST: size_of(e[MANIFEST], "1000000000000")}), "larger than the file"),
        (lambda e: e.update({"\x1b[2J": b""}), "\\x1b[2J is not in the manifest"),
        (lambda e: e.update({"../x": b"!", MANIFEST: names_of(e[MANIFEST], "../x")}), "is not a valid entry name"),
        (lambda e: e.update({"/x": b"!", MANIFEST: names_of(e[MANIFEST], "/x")}), "is not a valid entry name"),
    ],
)
def test_change_is_named(archive: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], None], words: str) -> None:
    with pytest.raises(UserError) as raised:
        read_archive(changed(archive, change), tmp_path / "out")
    assert words in raised.value.what
    assert not (tmp_path / "x").exists()


def test_damaged_and_cut_files_are_refused(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    place = whole.index(bytes(range(256)))
    archive.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    with pytest.raises(UserError, match="a/weights is damaged"):
        read_archive(archive, tmp_path / "out")
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a complete capsule"):
        read_archive(archive, tmp_path / "out")


@pytest.mark.parametrize("name", ["b", MANIFEST])
def test_compressed_entry_is_refused_before_it_is_expanded(
    archive: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(archive) as opened:
        entries = {one: opened.read(one) for one in opened.namelist()}
    with zipfile.ZipFile(archive, "w") as opened:
        for one, data in entries.items():
            opened.writestr(one, data, zipfile.ZIP_DEFLATED if one == name else zipfile.ZIP_STORED)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was expanded"))
    with pytest.raises(UserError, match=f"{name} is compressed or encrypted"):
        read_archive(archive, tmp_path / "out")


def test_encrypted_entry_is_refused(archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    place = data.index(b"PK\x01\x02")
    data[place + 8] |= 1
    archive.write_bytes(bytes(data))
    with pytest.raises(UserError, match="is compressed or encrypted"):
        read_archive(archive, tmp_path / "out")
