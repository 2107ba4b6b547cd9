"""Claims about the run's key files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.transport.curve import load_client, load_server, make_key_pairs, write_private


def test_key_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    make_key_pairs(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 4


def test_both_sides_know_each_other_and_print_no_secret(tmp_path: Path) -> None:
    make_key_pairs(tmp_path / "curve")
    server, client = load_server(tmp_path / "curve"), load_client(tmp_path / "curve")
    assert (server.public, client.public) == (client.other_public, server.other_public)
    assert server.secret.decode() not in repr(server)


def test_keys_are_replaced_at_a_new_start(tmp_path: Path) -> None:
    make_key_pairs(tmp_path / "curve")
    before = load_server(tmp_path / "curve")
    make_key_pairs(tmp_path / "curve")
    assert load_server(tmp_path / "curve").public != before.public


def test_key_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    make_key_pairs(tmp_path / "curve")
    (tmp_path / "curve" / "client.secret").chmod(0o644)
    with pytest.raises(UserError, match=r"others may read.*if chmod has no effect there"):
        load_client(tmp_path / "curve")


def test_file_system_without_modes_gets_no_key_and_the_remedy_names_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on vfat: every file has the mode of the mount, and chmod is refused."""
    real_open = os.open

    def open_with_mode_of_mount(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        os.fchmod(descriptor, 0o755)
        return descriptor

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", open_with_mode_of_mount)
    monkeypatch.setattr(Path, "chmod", refuse)
    for make in (lambda: make_key_pairs(tmp_path / "keys"), lambda: write_private(tmp_path / "token", b"secret")):
        with pytest.raises(UserError, match="has no file modes") as refusal:
            make()
        assert "runs_dir=" in str(refusal.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40])
def test_damaged_key_is_the_users_mistake(tmp_path: Path, content: bytes) -> None:
    make_key_pairs(tmp_path / "curve")
    (tmp_path / "curve" / "server.public").write_bytes(content)
    with pytest.raises(UserError, match="not a CURVE key"):
        load_client(tmp_path / "curve")


def test_missing_keys_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_server(tmp_path / "curve")
