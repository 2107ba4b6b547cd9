"""CURVE keys of one run and the door that lets only their holder in.

Owns: making, storing and loading the two key pairs; the ZAP handler of a hub. Refuses: users and roles (who holds the
run's client key belongs to the run), plain sockets (sockets.py).

A run has one server pair (its hubs) and one client pair (everybody else). Files are readable by their owner alone and
are not used when they are not. Whoever may read the folder may join the run; nobody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.utils.z85

from areal_like.errors import UserError
from areal_like.sockets import ReadySocket

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"areal_like"
_PAIRS = ("server", "client")


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """One side's own pair and the other side's public key, each 40 characters of Z85."""

    public: bytes
    secret: bytes
    other_public: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=..., other_public={self.other_public!r})"


def make_run_keys(folder: Path) -> None:
    """Make both pairs in `folder` (0700, files 0600); pairs of an earlier start of the run are replaced."""
    if not zmq.has("curve"):
        raise UserError("this pyzmq has no CURVE", remedy="install the pyzmq wheel from PyPI, it brings libsodium")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for pair in _PAIRS:
        public, secret = zmq.curve_keypair()
        _write_private(folder / f"{pair}.public", public)
        _write_private(folder / f"{pair}.secret", secret)


def load_server(folder: Path) -> CurveKeys:
    """What a hub needs. Raises UserError when files are missing, damaged or readable by others."""
    return _load(folder, own="server", other="client")


def load_client(folder: Path) -> CurveKeys:
    """What a peer needs. Raises UserError when files are missing, damaged or readable by others."""
    return _load(folder, own="client", other="server")


def arm_client(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make `socket` speak CURVE to the holder of the server key only. Before connect."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = keys.public, keys.secret, keys.other_public


class Door:
    """ZAP handler (ZeroMQ RFC 27) of one context: lets in CURVE clients that hold the run's client key.

    It runs on the hub's loop, so a hub that does not run admits nobody. `on_refused(address)` is called for the others.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, on_refused: Callable[[str], None]
    ) -> None:
        self._keys = keys
        self._client_key = zmq.utils.z85.decode(keys.other_public)
        self._on_refused = on_refused
        self._socket = ReadySocket(context, zmq.REP, self._answer_waiting)
        self._socket.raw.bind(_ZAP_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE server behind this door. Before bind."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._socket.attach()

    def close(self) -> None:
        """Take the door off."""
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


def _write_private(path: Path, key: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")
    os.replace(temporary, path)


def _load(folder: Path, *, own: str, other: str) -> CurveKeys:
    keys: dict[str, Any] = {
        "public": _read_private(folder / f"{own}.public"),
        "secret": _read_private(folder / f"{own}.secret"),
        "other_public": _read_private(folder / f"{other}.public"),
    }
    return CurveKeys(**keys)


def _read_private(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        key = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"cannot read a CURVE key: {error.strerror}", where=str(path)) from error
    if stat.S_IMODE(mode) & 0o077:
        raise UserError("a CURVE key that others may read", where=str(path), remedy="start the run again, or chmod 600")
    try:
        is_key = len(zmq.utils.z85.decode(key)) == 32
    except (KeyError, ValueError, ArithmeticError, TypeError):
        is_key = False
    if not is_key:
        raise UserError("not a CURVE key", where=str(path))
    return key
