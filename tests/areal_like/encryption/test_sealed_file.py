"""The format of encrypted files: any change of stored bytes is found, and errors say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.encryption.files import copy_plain, open_to_write, read_bytes, write_text
from areal_like.encryption.run_key import MARKER, RunKey, encrypt_folder, run_key_of
from areal_like.encryption.sealed_file import TAG_BYTES, SealedFileError, SealedWriter, name_in, unsealed
from areal_like.encryption.settings import EncryptionSettings
from areal_like.errors import UserError

SECRET = bytes(range(32))
KEY_TEXT = SECRET.hex()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_KEY", KEY_TEXT)
    root = tmp_path / "run"
    root.mkdir()
    encrypt_folder(root, EncryptionSettings(key_env="RUN_KEY"))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("property")


def stored(path: Path, key: RunKey, content: bytes, pieces: list[int], chunk_bytes: int) -> bytes:
    with SealedWriter(path, key, chunk_bytes=chunk_bytes) as file:
        left = content
        for piece in pieces:
            file.write(left[:piece])
            left = left[piece:]
        file.write(left)
    data = path.read_bytes()
    assert file.num_bytes == len(data)
    return data


def content_of(path: Path, key: RunKey) -> bytes:
    return b"".join(unsealed(path, key))


@settings(max_examples=25, deadline=None)
@given(
    content=st.binary(max_size=200),
    pieces=st.lists(st.integers(0, 40), max_size=6),
    chunk_bytes=st.integers(1, 64),
    data=st.data(),
)
def test_content_is_restored_and_no_change_of_a_byte_or_the_length_is_read(folder, content, pieces, chunk_bytes, data):
    path, key = folder / "a", RunKey(folder, SECRET)
    whole = stored(path, key, content, pieces, chunk_bytes)
    assert content_of(path, key) == content
    assert len(content) < 4 or content not in whole
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(changed), whole[:place], whole + b"\0", whole + whole[-TAG_BYTES:]):
        path.write_bytes(bad)
        with pytest.raises(SealedFileError):
            content_of(path, key)


def test_reordered_repeated_and_removed_chunks_are_found(tmp_path):
    path, key = tmp_path / "a", RunKey(tmp_path, SECRET)
    whole = stored(path, key, bytes(40), [], 10)
    size = 10 + TAG_BYTES
    head, chunks = whole[: -4 * size], [whole[len(whole) - n * size :][:size] for n in (4, 3, 2, 1)]
    for order in ((1, 0, 2, 3), (0, 1, 1, 2, 3), (0, 2, 3), (0, 1, 2), (3,), ()):
        path.write_bytes(head + b"".join(chunks[number] for number in order))
        with pytest.raises(SealedFileError, match="was changed, or the file was truncated"):
            content_of(path, key)


def test_equal_content_is_stored_differently_each_time(tmp_path):
    key = RunKey(tmp_path, SECRET)
    first, second = (stored(tmp_path / "a", key, b"the same", [], 100) for _ in range(2))
    assert first[-24:] != second[-24:]


def test_a_file_that_was_exchanged_for_another_of_the_run_is_named(run):
    for name in ("trainer.json", "reward.json"):
        write_text(run / name, name)
    (run / "reward.json").replace(run / "trainer.json")
    with pytest.raises(SealedFileError, match=r"is 'reward.json', not 'trainer.json', so it was exchanged or renamed"):
        read_bytes(run / "trainer.json")


def test_weights_of_another_checkpoint_are_found_but_a_copied_folder_is_read(run):
    folders = [run / "checkpoints" / f"step_00000{number}" for number in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
        with open_to_write(folder / "model.safetensors") as file:
            file.write(folder.name.encode())
    (run / "best").mkdir()
    folders[0].rename(run / "best" / "step_000001")
    assert read_bytes(run / "best" / "step_000001" / "model.safetensors") == b"step_000001"
    (run / "best" / "step_000001" / "model.safetensors").replace(folders[1] / "model.safetensors")
    with pytest.raises(SealedFileError, match="exchanged"):
        read_bytes(folders[1] / "model.safetensors")


def test_a_folder_keeps_its_name_while_it_is_written(tmp_path):
    partial = tmp_path / "checkpoints" / ".step_000003.4711.partial" / "model.safetensors"
    assert name_in(tmp_path, partial) == "step_000003/model.safetensors"
    assert name_in(tmp_path, tmp_path / ".final.12.partial" / "model.safetensors") == "model.safetensors"
    assert name_in(tmp_path, tmp_path / "processes" / "a.json") == "processes/a.json"


def test_a_file_of_another_run_and_one_in_the_clear_are_found(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    encrypt_folder(other, EncryptionSettings(key_env="RUN_KEY"))
    write_text(other / "config.yaml", "a: 1")
    (other / "config.yaml").replace(run / "config.yaml")
    with pytest.raises(SealedFileError, match="encrypted with the key of another run"):
        read_bytes(run / "config.yaml")
    (run / "config.yaml").write_text("a: 2")
    with pytest.raises(SealedFileError, match="not encrypted, although it belongs to encrypted data"):
        read_bytes(run / "config.yaml")


def test_a_file_without_the_marker_of_its_run_is_not_read_as_text(run):
    write_text(run / "config.yaml", "a: 1")
    (run / MARKER).unlink()
    with pytest.raises(UserError, match=r"is encrypted, but the encryption.json of its run is missing"):
        read_bytes(run / "config.yaml")


def test_a_large_file_is_copied_in_chunks(run, tmp_path):
    with open_to_write(run / "model.safetensors") as file:
        for number in range(5):
            file.write(bytes([number]) * (1 << 19))
    key = run_key_of(run)
    assert key is not None
    assert max(map(len, unsealed(run / "model.safetensors", key))) == 1 << 20
    copy_plain(run / "model.safetensors", tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes() == b"".join(bytes([number]) * (1 << 19) for number in range(5))


def test_an_error_within_the_writer_leaves_a_file_that_is_not_read(run):
    def fail() -> None:
        with open_to_write(run / "a") as file:
            file.write(bytes(3 << 20))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(SealedFileError):
        read_bytes(run / "a")
