"""The key of a run: where it comes from, and the sentences for a key that is missing or wrong."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.encryption import run_key
from areal_like.encryption.master_key import KEY_FILE_VARIABLE, MissingKey, read_master_key
from areal_like.encryption.run_key import MARKER, available_key, encrypt_as, encrypt_folder, run_key_of
from areal_like.encryption.settings import EncryptionSettings
from areal_like.encryption.texts import CHANGED, HIDDEN, Texts
from areal_like.errors import UserError

KEY = bytes(range(32))


def key_file(path: Path, text: str = KEY.hex()) -> Path:
    path.touch(mode=0o600)
    path.write_text(text + "\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "one"
    root.mkdir(parents=True)
    encrypt_folder(root, EncryptionSettings(key_file=str(key_file(tmp_path / "key"))))
    return root


@pytest.mark.parametrize("text", [KEY.hex(), KEY.hex().upper(), base64.b64encode(KEY).decode(),
                                  base64.urlsafe_b64encode(KEY).decode()])  # fmt: skip
def test_a_key_is_read_in_hexadecimal_digits_and_base64(text, tmp_path, monkeypatch):
    assert read_master_key(EncryptionSettings(key_file=str(key_file(tmp_path / "key", text)))) == KEY
    monkeypatch.setenv("MY_KEY", text)
    assert read_master_key(EncryptionSettings(key_env="MY_KEY")) == KEY


@pytest.mark.parametrize("text", ["", "password", KEY.hex()[:-2], KEY.hex() + "00", "ü" * 32, "00" * 32, "ab" * 32])
def test_other_texts_are_refused_without_being_repeated(text, tmp_path):
    with pytest.raises(UserError) as caught:
        read_master_key(EncryptionSettings(key_file=str(key_file(tmp_path / "key", text))))
    assert "openssl rand -hex 32" in str(caught.value)
    assert len(text) < 8 or text not in str(caught.value)


def test_a_key_file_that_others_can_read_or_that_lies_with_the_runs_is_refused(run, tmp_path):
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UserError, match=r"other users can read .* chmod 600"):
        run_key_of(run)
    inside = key_file(tmp_path / "runs" / "key")
    with pytest.raises(UserError, match="store the key somewhere else"):
        encrypt_folder(run, EncryptionSettings(key_file=str(inside)))


def test_every_path_of_a_run_finds_its_key_and_no_other_folder_does(run, tmp_path):
    deep = run / "checkpoints" / "step_000001" / "model.safetensors"
    assert run_key_of(deep) is run_key_of(run) is not None
    assert run_key_of(tmp_path / "runs") is None


def test_a_missing_key_says_where_it_is_expected_and_how_to_name_another_place(run, tmp_path, monkeypatch):
    (tmp_path / "key").rename(tmp_path / "moved")
    with pytest.raises(MissingKey, match=f"No such file.*{KEY_FILE_VARIABLE}"):
        run_key_of(run)
    assert available_key(run) is None
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "moved"))
    assert run_key_of(run) is not None


def test_an_environment_variable_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY.hex())
    encrypt_folder(tmp_path, EncryptionSettings(key_env="MY_KEY"))
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(MissingKey, match="environment variable MY_KEY, which is not set"):
        run_key_of(tmp_path)


def test_another_key_is_named_and_not_taken_for_a_damaged_file(run, tmp_path):
    key_file(tmp_path / "key", bytes(range(1, 33)).hex())
    with pytest.raises(UserError, match="is not the key that the data was encrypted with"):
        run_key_of(run)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 1, "salt": "00", "key_id": "00", "key_env": "A"}',
                                     '{"format": "x"}'])  # fmt: skip
def test_a_damaged_marker_is_named(run, content):
    (run / MARKER).write_text(content)
    with pytest.raises(UserError, match=r"encryption.json: the file cannot be read"):
        run_key_of(run)


@pytest.mark.parametrize("place", ['"key_file": null', '"key_file": "a", "key_env": "B"', '"key_file": 1'])
def test_a_marker_that_does_not_name_one_place_of_the_key_is_refused(run, place):
    marker = json.loads((run / MARKER).read_text())
    both = {"format": 1, "salt": marker["salt"], "key_id": marker["key_id"], **json.loads(f"{{{place}}}")}
    (run / MARKER).write_text(json.dumps(both))
    with pytest.raises(UserError, match="does not say where the key is"):
        run_key_of(run)


def test_a_marker_of_a_newer_version_is_refused(run):
    (run / MARKER).write_text((run / MARKER).read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="this version of areal_like reads format 1"):
        run_key_of(run)


def test_the_marker_and_the_text_of_a_key_contain_no_key(run):
    key = run_key_of(run)
    assert key is not None
    for secret in (KEY, key._secret, key._digests):
        assert secret.hex() not in (run / MARKER).read_text()
        assert secret.hex() not in repr(key)
        assert repr(secret) not in repr(key)


def test_two_runs_with_one_key_have_different_keys_and_an_export_has_that_of_its_run(run, tmp_path):
    other, export = tmp_path / "runs" / "other", tmp_path / "export"
    for folder in (other, export):
        folder.mkdir()
    encrypt_folder(other, EncryptionSettings(key_file=str(tmp_path / "key")))
    assert encrypt_as(run / "checkpoints", export)
    assert not encrypt_as(tmp_path / "runs", tmp_path)
    ours, theirs, copied = (run_key_of(folder) for folder in (run, other, export))
    assert ours is not None
    assert theirs is not None
    assert copied is not None
    assert ours.key_id != theirs.key_id
    assert ours.digest(b"x") != theirs.digest(b"x")
    assert ours.key_id == copied.key_id


def test_without_the_package_a_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    monkeypatch.setattr(run_key, "_known", {})
    with pytest.raises(UserError, match=r"requires the package cryptography.*pip install 'areal-like\[encryption\]'"):
        run_key_of(run)


@pytest.mark.parametrize("given", [{}, {"key_env": "A", "key_file": "b"}, {"key_env": "a b"}])
def test_settings_name_exactly_one_place(given):
    with pytest.raises(ValueError):
        EncryptionSettings(**given)


def test_texts_are_bound_to_their_field_and_hidden_without_the_key(run, tmp_path):
    texts = Texts.to_write(run)
    sealed = texts.sealed("reason", "the prompt was: Zebra \ud800")
    assert "Zebra" not in sealed
    assert texts.opened("reason", sealed) == "the prompt was: Zebra \ud800"
    assert texts.opened("detail", sealed) == CHANGED
    assert texts.opened("reason", sealed[:-8] + "AAAAAAA=") == CHANGED
    assert Texts(None).opened("reason", sealed) == HIDDEN
    assert texts.sealed("reason", "") == ""
    assert texts.opened("reason", "in the clear") == "in the clear"
    assert Texts.to_write(tmp_path / "runs").sealed("reason", "a") == "a"


def test_rows_keep_their_numbers_and_lose_their_texts_without_the_key(run):
    texts = Texts.to_write(run)
    row = {
        "kind": "eval",
        "accuracy": 0.5,
        "text": "Zebra",
        "reason": "",
        "answers": [{"prompt": "Zebra", "value": 1.0}],
    }
    sealed = dict(texts.sealed_row(row))
    assert "Zebra" not in str(sealed)
    assert (sealed["kind"], sealed["accuracy"], sealed["reason"]) == ("eval", 0.5, "")
    assert texts.opened_row(dict(sealed)) == row
    assert Texts(None).opened_row(dict(sealed)) == {"kind": "eval", "accuracy": 0.5, "text": HIDDEN, "reason": ""}
    assert Texts(None).sealed_row(row) is row
