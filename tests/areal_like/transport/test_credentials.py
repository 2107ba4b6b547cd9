"""Claims about the credentials of runs, processes and reward services."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.transport.credentials import (
    CANDIDATE,
    JoinSecret,
    candidate_credentials,
    credential_files,
    issue_credentials,
    load_join_secret,
    make_run_credentials,
    make_service_credentials,
    service_keys_folder,
    token_for,
    token_name,
    write_credentials,
)
from areal_like.transport.curve import load_client, load_server


def test_process_gets_its_own_token_and_not_the_secret_behind_it(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    given = issue_credentials(tmp_path / "keys", "rollout", "rollout-0")
    assert not (given / "controller.join").exists()
    secret = load_join_secret(tmp_path / "keys", "controller")
    token = token_for(given, "controller", "rollout", "rollout-0")
    assert secret.is_valid(token, "rollout", "rollout-0")
    assert not secret.is_valid(token, "rollout", "rollout-1")
    assert not secret.is_valid(token, "trainer", "rollout-0")
    assert load_client(given).other_public == load_server(tmp_path / "keys").public
    assert load_join_secret(given, "services").is_valid(
        token_for(given, "services", "rollout", "rollout-0"), "rollout", "rollout-0"
    )


def test_role_and_name_do_not_run_together() -> None:
    secret = JoinSecret(b"s")
    assert secret.token("a", "bc") != secret.token("ab", "c")


def test_credentials_are_created_again_for_each_session_and_old_ones_are_removed(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    given = issue_credentials(tmp_path / "keys", "rollout", "rollout-0")
    before = token_for(given, "controller", "rollout", "rollout-0")
    make_run_credentials(tmp_path / "keys")
    assert not given.exists()
    again = issue_credentials(tmp_path / "keys", "rollout", "rollout-0")
    assert token_for(again, "controller", "rollout", "rollout-0") != before


def test_credentials_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    issue_credentials(tmp_path / "keys", "trainer", "trainer")
    make_service_credentials(tmp_path / "service")
    for folder in (tmp_path / "keys", tmp_path / "service"):
        assert {path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*"))} == {0}


def test_services_that_start_together_use_the_same_keys(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "reward-keys"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: make_service_credentials(folder), range(8)))
    assert [path.name for path in folder.parent.iterdir()] == ["reward-keys"], "nothing half made is left"
    before = load_server(folder)
    make_service_credentials(folder)
    assert load_server(folder) == before


def test_folder_with_something_else_gets_no_keys(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="cannot create keys here"):
        make_service_credentials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("content", ["", "short", "g" * 64])
def test_damaged_secret_is_refused(tmp_path: Path, content: str) -> None:
    make_run_credentials(tmp_path / "keys")
    (tmp_path / "keys" / "services.join").write_text(content)
    with pytest.raises(UserError, match="does not contain a valid secret or token"):
        load_join_secret(tmp_path / "keys", "services")


def test_keys_of_services_are_in_the_users_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert service_keys_folder() == tmp_path / "xdg" / "areal_like" / "reward-keys"
    for unset in ("", None):
        monkeypatch.delenv("XDG_CONFIG_HOME") if unset is None else monkeypatch.setenv("XDG_CONFIG_HOME", unset)
        assert service_keys_folder() == tmp_path / ".config" / "areal_like" / "reward-keys"


def test_folders_on_the_way_to_a_service_s_keys_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    make_service_credentials(tmp_path / "a" / "b" / "keys")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_service_credentials(tmp_path / "a" / "b" / "other")
    assert load_server(tmp_path / "a" / "b" / "other").public != load_server(tmp_path / "a" / "b" / "keys").public


def test_an_invitation_lets_a_candidate_connect_and_nothing_else(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    folder = write_credentials(tmp_path / "invitation", candidate_credentials(tmp_path / "keys"))
    assert load_client(folder).other_public == load_server(tmp_path / "keys").public
    token, secret = token_for(folder, "controller", "x", "y"), load_join_secret(tmp_path / "keys", "controller")
    assert secret.is_valid(token, CANDIDATE, token_name(CANDIDATE, f"{CANDIDATE}/7"))
    for role in ("rollout", "trainer", "reward"):
        assert not secret.is_valid(token, role, token_name(role, f"{CANDIDATE}/7"))
        assert not secret.is_valid(token, role, token_name(role, CANDIDATE))
    secrets = {(tmp_path / "keys" / name).read_bytes().strip() for name in ("server.secret", "controller.join")}
    assert not secrets & {path.read_bytes().strip() for path in folder.iterdir()}


def test_credentials_sent_to_another_machine_are_private_there_and_work(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    given = issue_credentials(tmp_path / "keys", "rollout", "rollout-5")
    folder = write_credentials(tmp_path / "there", credential_files(given))
    assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}
    assert token_for(folder, "controller", "", "") == token_for(given, "controller", "", "")
    assert "server.secret" not in credential_files(given, has_server=False)


def test_a_name_of_a_sent_file_leads_out_of_no_folder(tmp_path: Path) -> None:
    write_credentials(tmp_path / "there", {"../outside": b"x"})
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "there" / "outside").is_file()
