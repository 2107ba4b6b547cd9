"""Claims about the run's key files."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.utils.z85

from areal_like.errors import UserError
from areal_like.transport import curve
from areal_like.transport.curve import Authenticator, load_client, load_server, make_key_pairs, write_private


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
    with pytest.raises(UserError, match=r"other users can read.*if chmod has no effect there"):
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
    with pytest.raises(UserError, match="the file is not a CURVE key"):
        load_client(tmp_path / "curve")


def test_missing_keys_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_server(tmp_path / "curve")


class Door:
    """In place of the socket of the authenticator: requests come from `waiting`, answers go to `sent`."""

    def __init__(self, context: object, kind: int, look: Callable[[int], None]) -> None:
        self.waiting: list[list[bytes]] = []
        self.sent: list[list[bytes]] = []
        self.calls: list[object] = []
        self.look = look
        self.raw = SimpleNamespace(bind=lambda place: self.calls.append(("bind", place)))

    def attach(self) -> None:
        self.calls.append("attach")

    def close(self) -> None:
        self.calls.append("close")

    def receive(self) -> list[bytes] | None:
        return self.waiting.pop(0) if self.waiting else None

    def send(self, frames: list[bytes]) -> None:
        self.sent.append(frames)


class Guarded:
    """The authenticator of a hub with its keys, and who was refused."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(curve, "ReadySocket", Door)
        make_key_pairs(folder)
        self.keys = load_server(folder)
        self.client_key = zmq.utils.z85.decode(load_client(folder).public)
        self.refused: list[str] = []
        self.made = Authenticator(None, self.keys, self.refused.append)  # type: ignore[arg-type]
        self.door: Any = self.made._socket

    def ask(self, *requests: list[bytes]) -> list[list[bytes]]:
        self.door.waiting += requests
        self.door.look(1)
        return list(self.door.sent)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    return Guarded(tmp_path / "curve", monkeypatch)


def test_holder_of_the_run_s_key_is_admitted_and_each_request_answered(guarded: Guarded) -> None:
    request = [b"1.0", b"7", b"areal_like", b"10.0.0.1", b"name", b"CURVE", guarded.client_key]
    assert guarded.ask(request, [*request[:1], b"8", *request[2:]]) == [
        [b"1.0", b"7", b"200", b"OK", b"run", b""],
        [b"1.0", b"8", b"200", b"OK", b"run", b""],
    ]
    assert guarded.refused == []


@pytest.mark.parametrize(
    ("place", "frame"),
    [(2, b"another"), (5, b"PLAIN"), (5, b"NULL"), (6, b"k" * 32), (6, b"")],
)
def test_everybody_else_is_refused_and_reported_with_the_address(guarded: Guarded, place: int, frame: bytes) -> None:
    request = [b"1.0", b"7", b"areal_like", b"10.0.0.1", b"name", b"CURVE", guarded.client_key]
    request[place] = frame
    assert guarded.ask(request) == [[b"1.0", b"7", b"400", b"not a key of this run", b"", b""]]
    assert guarded.refused == ["10.0.0.1"]


@pytest.mark.parametrize("num_frames", range(7))
def test_request_that_is_cut_off_is_refused(guarded: Guarded, num_frames: int) -> None:
    request = [b"1.0", b"7", b"areal_like", b"\xff", b"name", b"CURVE", guarded.client_key][:num_frames]
    (answer,) = guarded.ask(request)
    assert answer == [b"1.0", b"7" if num_frames > 1 else b"", b"400", b"not a key of this run", b"", b""]
    assert guarded.refused == ["\ufffd" if num_frames > 3 else ""]


def test_request_with_another_credential_behind_the_key_is_refused(guarded: Guarded) -> None:
    guarded.ask([b"1.0", b"7", b"areal_like", b"a", b"", b"CURVE", guarded.client_key, b"more"])
    assert guarded.refused == ["a"]


def test_sockets_behind_the_door_serve_the_hub_s_keys(guarded: Guarded) -> None:
    options: list[object] = []
    socket: Any = SimpleNamespace(setsockopt=lambda *option: options.append(option))
    guarded.made.enable_server(socket)
    assert (socket.curve_server, socket.curve_publickey, socket.curve_secretkey) == (
        True, guarded.keys.public, guarded.keys.secret,
    )  # fmt: skip
    assert options == [(zmq.ZAP_DOMAIN, b"areal_like")]
    guarded.made.close()
    assert guarded.door.calls == [("bind", "inproc://zeromq.zap.01"), "attach", "close"]


def test_client_speaks_to_the_holder_of_the_hub_s_key(tmp_path: Path) -> None:
    make_key_pairs(tmp_path)
    keys = load_client(tmp_path)
    socket: Any = SimpleNamespace()
    curve.enable_client(socket, keys)
    assert (socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey) == (
        keys.public, keys.secret, load_server(tmp_path).public,
    )  # fmt: skip


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601])
def test_any_right_of_others_makes_a_key_unusable(tmp_path: Path, mode: int) -> None:
    write_private(tmp_path / "key", b"text")
    assert curve.read_private(tmp_path / "key") == b"text"
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UserError, match="other users can read this key"):
        curve.read_private(tmp_path / "key")


def test_file_is_replaced_whole_also_over_what_was_left_half_written(tmp_path: Path) -> None:
    (tmp_path / ".key.tmp").write_bytes(b"half")
    (tmp_path / "key").write_bytes(b"old")
    write_private(tmp_path / "key", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").read_bytes() == b"new\n"


def test_pyzmq_without_curve_is_the_users_to_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    with pytest.raises(
        UserError, match="the installed pyzmq was built without CURVE -> install the pyzmq wheel from PyPI"
    ):
        make_key_pairs(tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_keys_are_made_in_a_folder_below_one_that_is_not_there_yet(tmp_path: Path) -> None:
    make_key_pairs(tmp_path / "a" / "b")
    assert load_server(tmp_path / "a" / "b").public
