"""Log lines of an encrypted run: encrypted as they are written, decrypted as they are shown."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from areal_like import secret_values
from areal_like.encryption.run_key import encrypt_folder
from areal_like.encryption.settings import EncryptionSettings
from areal_like.plain_text import LineFormatter
from areal_like.secret_values import SEALED_LOGS, print_traceback
from controller.launch.launcher import tail_of
from controller.run_folder.run_folder import RunFolder
from controller.runs.logs import logs

CANARY = "Zebra-quartz-5519"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUN_KEY", bytes(range(32)).hex())
    monkeypatch.setenv(SEALED_LOGS, str(tmp_path))
    secret_values._texts.cache_clear()
    encrypt_folder(tmp_path, EncryptionSettings(key_env="RUN_KEY"))
    (tmp_path / "logs").mkdir()
    return tmp_path


def logged(stream: io.StringIO) -> None:
    logger = logging.Logger("mine")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    try:
        raise ValueError(f"cannot score {CANARY}")
    except ValueError:
        logger.exception("refused %s", CANARY)


def test_messages_and_tracebacks_are_encrypted_in_the_file_and_shown_by_the_command(run, monkeypatch):
    stream = io.StringIO()
    logged(stream)
    written = stream.getvalue()
    assert CANARY not in written
    assert " ERROR mine: sealed:" in written
    (run / "logs" / "reward.log").write_text(written)
    for text in (shown(run), tail_of(run / "logs" / "reward.log", 100)):
        assert f"ERROR mine: refused {CANARY}" in text
        assert f"ValueError: cannot score {CANARY}" in text
    monkeypatch.delenv("RUN_KEY")
    assert "ERROR mine: [encrypted]" in shown(run)


def shown(run: Path) -> str:
    out = io.StringIO()
    (run / "state.json").write_text('{"format": 1}')
    logs(RunFolder(run), tail=None, out=out)
    return out.getvalue()


def test_the_error_that_ends_a_process_is_encrypted(run, capsys):
    print_traceback(RuntimeError(CANARY))
    said = capsys.readouterr().err
    assert said.startswith("sealed:")
    assert CANARY not in said


def test_a_process_without_the_key_logs_no_content(run, monkeypatch):
    monkeypatch.delenv("RUN_KEY")
    stream = io.StringIO()
    logged(stream)
    assert CANARY not in stream.getvalue()
    assert "the key of the run is not available in this process" in stream.getvalue()


def test_a_process_whose_run_was_moved_logs_no_content(run, monkeypatch):
    (run / "encryption.json").unlink()
    stream = io.StringIO()
    logged(stream)
    assert CANARY not in stream.getvalue()


def test_other_runs_are_logged_as_they_are(monkeypatch):
    monkeypatch.delenv(SEALED_LOGS, raising=False)
    stream = io.StringIO()
    logged(stream)
    assert stream.getvalue().count(CANARY) >= 2
