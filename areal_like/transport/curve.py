"""CURVE keys of one run, and the ZAP handler of a hub, which admits only clients that have a key.

Names and roles are proved by tokens (credentials.py).

A run has one server pair (its hubs) and one client pair (all other processes). Key files must be readable by their
owner only; others are rejected.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.utils.z85

from areal_like.errors import UserError
from areal_like.transport.sockets import ReadySocket

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"areal_like"
_PAIRS = ("server", "client")
MAX_KEY_FILE_BYTES = 4096
_KEY_REMEDY = "start the run again; for a standalone reward service, create its keys or copy them to this folder"
PLACE_WITH_MODES = "on a file system with Unix permissions (for a run: runs_dir=/some/where)"
"""Advice for file systems without file modes (FAT, and some network and FUSE mounts)."""


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The key pair of one side and the public key of the other side, each 40 characters of Z85."""

    public: bytes
    secret: bytes
    other_public: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=..., other_public={self.other_public!r})"


def make_key_pairs(folder: Path) -> None:
    """Create the key pairs of a hub and its clients, replacing those that are there.

    Args:
        folder: folder of the files; it gets mode 0700, its files 0600.
    """
    if not zmq.has("curve"):
        raise UserError(
            "the installed pyzmq was built without CURVE",
            remedy="install the pyzmq wheel from PyPI, which contains libsodium",
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # fails on a file system without modes; write_private reports that
        folder.chmod(0o700)
    for pair in _PAIRS:
        public, secret = zmq.curve_keypair()
        write_private(folder / f"{pair}.public", public)
        write_private(folder / f"{pair}.secret", secret)


def load_server(folder: Path) -> CurveKeys:
    """Read the keys that a hub needs.

    Args:
        folder: a folder written by `make_key_pairs`.

    Returns:
        The keys.

    Raises:
        UserError: files are missing, damaged or readable by others.
    """
    return _load(folder, own="server", other="client")


def load_client(folder: Path) -> CurveKeys:
    """Read the keys that a peer needs.

    Args:
        folder: a folder written by `make_key_pairs`; `server.secret` may be missing.

    Returns:
        The keys.

    Raises:
        UserError: files are missing, damaged or readable by others.
    """
    return _load(folder, own="client", other="server")


def enable_client(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make `socket` use CURVE, and accept only the server with this key. Call it before connect."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.other_public


class Authenticator:
    """ZAP handler (ZeroMQ RFC 27) of one context: admits CURVE clients that have the run's client key.

    It runs on the hub's event loop, so a hub that does not run admits no client. `on_refused(address)` is called for
    each refused client.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, on_refused: Callable[[str], None]
    ) -> None:
        self._keys = keys
        self._client_key = zmq.utils.z85.decode(keys.other_public)
        self._on_refused = on_refused
        self._socket = ReadySocket(context, zmq.REP, self._answer_waiting)
        self._socket.raw.bind(_ZAP_ENDPOINT)

    def enable_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE server that uses this handler. Call it before bind."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._socket.attach()

    def close(self) -> None:
        """Close the handler's socket."""
        self._socket.close()

    def _answer_waiting(self, events: int) -> None:
        while (frames := self._socket.receive()) is not None:
            request = [bytes(frame) for frame in frames]
            version, request_id, domain, address = (*request, b"", b"", b"", b"")[:4]
            mechanism, credentials = request[5:6], request[6:]
            is_ours = (
                domain == _ZAP_DOMAIN and mechanism == [b"CURVE"] and credentials == [self._client_key]
            )  # an exact match; the handshake itself has proved possession of the secret key
            status = (b"200", b"OK", b"run") if is_ours else (b"400", b"not a key of this run", b"")
            if not is_ours:
                self._on_refused(address.decode("ascii", "replace"))
            self._socket.send([version or b"1.0", request_id, *status, b""])


def write_private(path: Path, content: bytes) -> None:
    """Atomically write a file that only its owner may read (0600).

    Raises UserError if the file system has no file modes; nothing is written then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        is_private = not stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077
        if is_private:
            file.write(content + b"\n")
    if not is_private:
        temporary.unlink()
        what = "the file system of this folder has no file modes, so other users could read a key in it"
        raise UserError(what, where=str(path.parent), remedy=f"use a folder {PLACE_WITH_MODES}")
    os.replace(temporary, path)


def read_private(path: Path) -> bytes:
    """Read a file written by `write_private`. Raises UserError if it cannot be read, or if others may read it too."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_KEY_FILE_BYTES).strip()
    except OSError as error:
        what, remedy = (
            f"cannot read a key: {error.strerror}",
            _KEY_REMEDY,
        )
        raise UserError(what, where=str(path), remedy=remedy) from error
    if stat.S_IMODE(mode) & 0o077:
        remedy = (
            "run chmod 600 on this file, or create new keys; if chmod has no effect there, keep the keys "
            f"{PLACE_WITH_MODES}"
        )
        raise UserError("other users can read this key", where=str(path), remedy=remedy)
    return content


def _load(folder: Path, *, own: str, other: str) -> CurveKeys:
    keys: dict[str, Any] = {
        "public": _read_key(folder / f"{own}.public"),
        "secret": _read_key(folder / f"{own}.secret"),
        "other_public": _read_key(folder / f"{other}.public"),
    }
    return CurveKeys(**keys)


def _read_key(path: Path) -> bytes:
    key = read_private(path)
    try:
        is_key = len(zmq.utils.z85.decode(key)) == 32
    except (KeyError, ValueError, ArithmeticError, TypeError):
        is_key = False
    if not is_key:
        raise UserError(
            "the file is not a CURVE key",
            where=str(path),
            remedy=_KEY_REMEDY,
        )
    return key
