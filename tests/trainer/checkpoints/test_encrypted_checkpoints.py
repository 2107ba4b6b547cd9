"""Checkpoints and exports of an encrypted run: no weights on disk in the clear, and exchanged files are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like import plain_folder as plain_folders
from areal_like.encryption.run_key import MARKER, encrypt_folder, run_key_of
from areal_like.encryption.sealed_file import SealedFileError
from areal_like.encryption.settings import EncryptionSettings
from areal_like.errors import UserError, WeightError
from areal_like.plain_folder import filled_in_memory, is_encrypted_model, plain_folder
from controller.runs.convert import export
from controller.wiring.checkpoints import decrypt_model
from trainer.checkpoints import checkpoint, provenance
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.checkpoints.compare_export import other_tensor
from trainer.checkpoints.convert import export_checkpoint
from trainer.weights.tensor_file import write_tensors

pytestmark = pytest.mark.skipif(not plain_folders.SHARED_MEMORY.is_dir(), reason="there is no shared memory")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    root = tmp_path / "run"
    root.mkdir()
    encrypt_folder(root, EncryptionSettings(key_env="RUN_KEY"))
    return root


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a.weight": torch.randn(40, 30, generator=generator), "b.bias": torch.randn(7, generator=generator)}


def save(run: Path, version: int) -> Path:
    def write(folder: Path) -> dict[str, tuple[int, str]]:
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "tokenizer.json").write_text("{}")
        return {"model.safetensors": write_tensors(folder / "model.safetensors", weights(version))}

    state = CheckpointState(version=version, lineage="l0", run_id="r", config_digest="d")
    return checkpoint.save(run, state, write, Retention(keep=9))[0]


def is_in_clear(folder: Path, version: int) -> bool:
    raw = weights(version)["a.weight"].numpy().tobytes()[:48]
    return any(raw in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def copies() -> set[str]:
    return {path.name for path in plain_folders.SHARED_MEMORY.glob(f"{plain_folders.PREFIX}*")}


def test_a_checkpoint_is_verified_without_the_key_and_read_from_a_copy_with_it(run, monkeypatch):
    folder, before = save(run, 3), copies()
    assert not is_in_clear(run, 3)
    with plain_folder(folder) as plain:
        found = load_file(plain / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(3).items())
        assert checkpoint.read_state(plain).version == 3
        assert plain.stat().st_mode & 0o077 == 0
    assert copies() <= before
    monkeypatch.delenv("RUN_KEY")
    checkpoint.verify(folder)
    with pytest.raises(SafetensorError):
        load_file(folder / "model.safetensors")
    with pytest.raises(UserError, match="RUN_KEY, which is not set"), plain_folder(folder):
        raise AssertionError


def test_weights_of_another_version_are_found_also_where_the_manifest_was_exchanged(run):
    first, second = save(run, 1), save(run, 2)
    first.joinpath("model.safetensors").replace(second / "model.safetensors")
    with pytest.raises(WeightError, match=r"model.safetensors is damaged: its checksum differs"):
        checkpoint.verify(second)
    (second / "manifest.json").write_text((first / "manifest.json").read_text())
    (second / "state.json").write_text((first / "state.json").read_text())
    checkpoint.verify(second)
    before = copies()
    words = r"is 'step_000001/model\.safetensors', not 'step_000002"
    with pytest.raises(SealedFileError, match=words), plain_folder(second):
        raise AssertionError
    assert copies() <= before, "an incomplete copy is removed"


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:-5] + b"00000"])
def test_damage_is_named_by_the_checksum_and_by_the_tag(run, change):
    file = save(run, 1) / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(WeightError, match=r"model.safetensors is damaged"):
        checkpoint.verify(file.parent)
    with pytest.raises(SealedFileError, match="was changed, or the file was truncated"), plain_folder(file.parent):
        raise AssertionError


def test_an_export_is_encrypted_with_the_key_of_its_run_unless_it_is_asked_for_in_the_clear(run, tmp_path):
    folder = save(run, 1)
    assert export_checkpoint(folder, tmp_path / "export") == "float32"
    assert is_encrypted_model(tmp_path / "export")
    assert (tmp_path / "export" / MARKER).is_file()
    assert not is_in_clear(tmp_path / "export", 1)
    assert other_tensor(tmp_path / "export", folder) is None
    recorded = provenance.read_provenance(tmp_path / "export")
    assert recorded is not None
    assert provenance.changed_files(tmp_path / "export", recorded) == []
    export_checkpoint(folder, tmp_path / "clear", is_decrypted=True)
    assert is_in_clear(tmp_path / "clear", 1)
    assert not (tmp_path / "clear" / MARKER).exists()
    assert other_tensor(tmp_path / "clear", folder) is None
    (tmp_path / "moved").mkdir()
    (tmp_path / "export").rename(tmp_path / "moved" / "export")
    assert decrypt_model(tmp_path / "moved" / "export", tmp_path / "plain") == 1
    plain, clear = ({path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "clear"))
    assert plain == clear
    recorded = provenance.read_provenance(tmp_path / "plain")
    assert recorded is not None
    assert provenance.changed_files(tmp_path / "plain", recorded) == []
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(1).items())


def test_weights_in_the_clear_in_the_place_of_encrypted_ones_are_refused(run):
    folder = save(run, 1)
    save_file(weights(1), folder / "model.safetensors")
    with pytest.raises(SealedFileError, match="is not encrypted, although it belongs to encrypted data"):
        plain_folder(folder).__enter__()


def test_the_decrypted_copy_of_an_export_is_no_encrypted_folder(run, tmp_path):
    export_checkpoint(save(run, 1), tmp_path / "export")
    with plain_folder(tmp_path / "export") as plain:
        assert run_key_of(plain) is None
        assert not is_encrypted_model(plain)


def test_a_model_in_the_clear_is_not_exported_into_an_encrypted_folder(run):
    folder = save(run, 1)
    with pytest.raises(UserError, match="the folder is within an encrypted one"):
        export(str(folder), str(run / "clear"), version=None, best=False, dtype=None, lora=None, is_decrypted=True)


def test_what_a_library_writes_is_written_to_memory_and_encrypted_from_there(run):
    target, before = run / ".final.12.partial", copies()
    target.mkdir()
    with filled_in_memory(target) as folder:
        assert not folder.is_relative_to(run)
        save_file(weights(1), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        assert list(target.iterdir()) == []
    target.rename(run / "final")
    assert not is_in_clear(run, 1)
    assert json.loads((run / "final" / "config.json").read_text()) == {}
    with plain_folder(run / "final") as plain:
        assert torch.equal(load_file(plain / "model.safetensors")["b.bias"], weights(1)["b.bias"])
    assert copies() <= before


def test_too_little_shared_memory_is_said_before_anything_is_copied(run, monkeypatch):
    folder, before = save(run, 1), copies()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(plain_folders.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"/dev/shm, which has 1,000 free bytes -> .*--shm-size"), plain_folder(folder):
        raise AssertionError
    assert copies() <= before


def test_folders_that_are_not_encrypted_are_used_as_they_are(tmp_path):
    folder = save(tmp_path, 1)
    assert run_key_of(folder) is None
    assert is_in_clear(folder, 1)
    with plain_folder(folder) as plain, filled_in_memory(folder) as filled:
        assert plain == filled == folder
