"""An encrypted job is not started without its key."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like.encryption.master_key import KEY_FILE_VARIABLE
from areal_like.encryption.run_key import MARKER, encrypt_folder
from areal_like.encryption.settings import EncryptionSettings
from areal_like.errors import UserError
from areal_like.secret_values import SEALED_LOGS
from areal_like.store_owner import SHARED_MEMORY
from controller.cli import jobs
from controller.cli import serve as serving
from controller.cli.arguments import make_parser
from controller.cli.encrypted_model import opened_model
from controller.cli.jobs import new_folder
from controller.config.loading import load_config
from controller.probe import probe
from controller.run_folder.run_folder import RunFolder


def test_a_key_that_cannot_be_read_leaves_no_folder_behind(tmp_path):
    settings = ["warm_start=null", "encryption.key_file=/no/run.key", f"runs_dir={tmp_path / 'runs'}"]
    config = load_config("quickstart", settings).config
    with pytest.raises(UserError, match=r"the key cannot be read from the file /no/run.key"):
        new_folder(config, "job", "train", {})
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.fixture
def memory(monkeypatch):
    """Restores the folder for temporary files."""
    monkeypatch.setenv("TMPDIR", "")
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())


def stopped_run(root: Path, home: Path) -> RunFolder:
    folder = RunFolder.create(root, "run")
    folder.write_state("stopped", command="train", started_in=str(home))
    return folder


def test_a_relative_path_of_a_moved_key_is_that_of_the_folder_in_which_resume_is_called(tmp_path, monkeypatch, memory):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (here / "key").touch(mode=0o600)
    (here / "key").write_text(bytes(range(32)).hex())
    folder = stopped_run(tmp_path / "runs", home)
    encrypt_folder(folder.root, EncryptionSettings(key_file=str(here / "key")))
    monkeypatch.chdir(here)
    monkeypatch.setenv(KEY_FILE_VARIABLE, "key")
    monkeypatch.setenv(SEALED_LOGS, "")
    monkeypatch.setattr(jobs, "read_config", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jobs.resume(folder.root)
    assert os.environ[KEY_FILE_VARIABLE] == str(here / "key")


def test_a_run_that_was_started_in_the_clear_is_not_resumed_as_an_encrypted_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = stopped_run(tmp_path, tmp_path)
    config = load_config("quickstart", ["warm_start=null", "encryption.key_env=RUN_KEY"]).config
    monkeypatch.setattr(jobs, "read_config", lambda _: config)
    with pytest.raises(UserError, match=rf"{MARKER} is missing.* cannot be encrypted after its start"):
        jobs.resume(folder.root)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no shared memory")
def test_checks_and_probes_of_an_encrypted_job_write_to_shared_memory(tmp_path, monkeypatch, memory):
    settings = ["warm_start=null", "encryption.key_env=RUN_KEY", f"runs_dir={tmp_path / 'runs'}"]
    loaded = load_config("quickstart", settings)
    with opened_model(loaded, "probe"):
        assert tempfile.gettempdir() == str(SHARED_MEMORY)
    used: list[Path] = []
    monkeypatch.setattr(probe.Probe, "_look", lambda self, rows, folder: used.append(folder))
    probe.Probe(loaded.config, 1, 1, False, print).run([{"prompt": "1+1="}])
    assert [folder.parent for folder in used] == [SHARED_MEMORY]
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no shared memory")
def test_an_encrypted_model_is_served_from_shared_memory_wherever_temporary_files_are(tmp_path, monkeypatch, memory):
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    encrypt_folder(tmp_path, EncryptionSettings(key_env="RUN_KEY"))
    monkeypatch.setattr(serving, "find", lambda *_: serving.Found("m", None, tmp_path / "checkpoints", {}))
    used: list[Path] = []

    def prepare(arguments, found, key, folder, adapters):
        used.append(folder)
        raise UserError("enough")

    monkeypatch.setattr(serving, "prepare", prepare)
    with pytest.raises(UserError, match="enough"):
        serving.serve(make_parser(lambda text: 2).parse_args(["serve", "m", "--port", "0"]))
    assert [folder.parent for folder in used] == [SHARED_MEMORY]
