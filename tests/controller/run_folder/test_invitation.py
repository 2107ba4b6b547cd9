"""The file with which external workers join a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.run_folder.invitation import INVITATION_FILE, Invitation


def made(**changes: Any) -> Invitation:
    facts: dict[str, Any] = {
        "run": "mine", "run_id": "r", "release": "1", "address": "tcp://10.0.0.5:4000", "host": "here",
        "boot_id": "b", "credentials": {"client.secret": "SECRET"},
    }  # fmt: skip
    return Invitation(**{**facts, **changes})


def test_an_invitation_is_private_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    made().save(tmp_path)
    path = tmp_path / INVITATION_FILE
    assert path.stat().st_mode & 0o077 == 0
    assert Invitation.load(path) == made()


def test_a_key_is_not_in_what_is_logged_of_an_invitation() -> None:
    assert "SECRET" not in f"{made()!r} {made()}"


def test_an_invitation_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made().save(tmp_path)
    (tmp_path / INVITATION_FILE).chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Invitation.load(tmp_path / INVITATION_FILE)


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"format": 1, "run": 3}), "\u00ff"])
def test_another_file_is_refused_in_words(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="not an invitation of a run"):
        Invitation.load(path)


def test_another_format_names_both(tmp_path: Path) -> None:
    made(format=2).save(tmp_path)
    with pytest.raises(UserError, match="format 2, this version of areal_like reads format 1"):
        Invitation.load(tmp_path / INVITATION_FILE)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("0.0.0.0", True),
        ("[::1]", True),
        ("localhost", True),
        ("10.0.0.5", False),
        ("gpu7", False),
    ],
)
def test_loopback_and_all_interfaces_are_no_addresses_for_other_machines(host: str, is_local: bool) -> None:
    assert made(address=f"tcp://{host}:4000").is_local == is_local
