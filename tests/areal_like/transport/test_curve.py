"""Claims about the run's key files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.transport.curve import load_client, load_server, make_key_pairs


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
    with pytest.raises(UserError, match="others may read"):
        load_client(tmp_path / "curve")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40])
def test_damaged_key_is_the_users_mistake(tmp_path: Path, content: bytes) -> None:
    make_key_pairs(tmp_path / "curve")
    (tmp_path / "curve" / "server.public").write_bytes(content)
    with pytest.raises(UserError, match="not a CURVE key"):
        load_client(tmp_path / "curve")


def test_missing_keys_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_server(tmp_path / "curve")
