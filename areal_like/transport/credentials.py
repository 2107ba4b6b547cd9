"""Credentials of the processes of a run: CURVE keys, which let a process connect, and a token, which lets it use its
name.

The module creates them for a run, for one process of it and for a reward service that belongs to no run, and checks
tokens. The transport's use of keys is in curve.py, registration in hub.py.

There are two audiences, each with its own join secret: the controller's hub, whose secret never leaves the controller,
and all other hubs of a run (reward services, weight streams). The processes of the run have the second secret, because
each of them may have to check another. A token is a keyed hash (HMAC-SHA256) of role and name, so it is not valid for
another name, and hubs need no notification about a process that is started later.

Each process has its own folder (0700, files 0600) with only what it needs. Tokens are sent only inside encrypted
messages; they never appear in argv, environments, specs or names.

Candidates (`areal-like worker --join`) share one token, that of the name CANDIDATE, which is in the run's invitation.
Each registers as CANDIDATE/something.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from areal_like.errors import UserError
from areal_like.transport.curve import make_key_pairs, read_private, write_private

Audience = Literal["controller", "services"]
AUDIENCES: tuple[Audience, ...] = ("controller", "services")
CANDIDATE = "candidate"
"""Role of a candidate, and first part of its name."""
SECRET_BYTES = 32
_CURVE_FILES = ("server.public", "server.secret", "client.public", "client.secret")
_CLIENT_FILES = ("server.public", "client.public", "client.secret")
_HEX = re.compile(rb"[0-9a-f]{64}")


class JoinSecret:
    """Creates and checks the tokens of one audience."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def token(self, role: str, name: str) -> str:
        """The token of the process `name` in `role`."""
        return hmac.new(self._secret, f"{role}\0{name}".encode(), hashlib.sha256).hexdigest()

    def is_valid(self, token: str, role: str, name: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(token.encode(), self.token(role, name).encode())


def make_run_credentials(folder: Path) -> None:
    """Create keys and both join secrets of a run in `folder`; those of an earlier start of the run are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    make_key_pairs(folder)
    for audience in AUDIENCES:
        _make_secret(folder, audience)


def issue_credentials(run_keys: Path, role: str, name: str) -> Path:
    """Create the folder with the credentials of one process below that of the run, and return it."""
    folder = process_folder(run_keys, name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for file in (*_CURVE_FILES, _secret_file("services")):
        write_private(folder / file, (run_keys / file).read_bytes().strip())
    token = load_join_secret(run_keys, "controller").token(role, name)
    write_private(folder / _token_file("controller"), token.encode())
    return folder


def token_name(role: str, name: str) -> str:
    """The name that a token of this process is made for. Candidates share one, because any number of them use one
    invitation."""
    return name.partition("/")[0] if role == CANDIDATE else name


def candidate_credentials(run_keys: Path) -> dict[str, bytes]:
    """Files with which a candidate connects to the controller, by name. They contain no secret of a hub."""
    files = {file: read_private(run_keys / file) for file in _CLIENT_FILES}
    token = load_join_secret(run_keys, "controller").token(CANDIDATE, CANDIDATE)
    return files | {_token_file("controller"): token.encode()}


def credential_files(folder: Path, *, has_server: bool = True) -> dict[str, bytes]:
    """Files of a folder of credentials by name, to send them to another machine. has_server: with the hub's secret."""
    found = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
    return found if has_server else {name: content for name, content in found.items() if name != "server.secret"}


def write_credentials(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write credentials that another machine has sent to a new folder that only its owner can read; return it."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        write_private(folder / os.path.basename(name), content.strip())
    return folder


def process_folder(run_keys: Path, name: str) -> Path:
    """Folder of the credentials of the process `name`."""
    return run_keys / name


def make_service_credentials(folder: Path) -> None:
    """Create the credentials of a reward service that belongs to no run; existing credentials are kept.

    They are created in a temporary folder that is then renamed, so two services that start together use the same ones.
    """
    if (folder / "server.secret").exists():
        return
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make_key_pairs(made)
        _make_secret(made, "services")
        os.rename(made, folder)
    except OSError as error:
        if not (folder / "server.secret").exists():
            what = f"cannot create keys here: {error.strerror}"
            raise UserError(what, where=str(folder), remedy="use a new or empty folder") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def service_keys_folder() -> Path:
    """Default folder of the credentials of this user's reward services and their clients."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "areal_like" / "reward-keys"


def load_join_secret(folder: Path, audience: Audience) -> JoinSecret:
    """Load the secret with which a hub checks tokens. Raises UserError if the file is missing, damaged or readable by
    others."""
    return JoinSecret(_read_hex(folder / _secret_file(audience)))


def token_for(folder: Path, audience: Audience, role: str, name: str) -> str:
    """The token that the process `name` sends to a hub of `audience`. Raises UserError if the folder has none."""
    if (folder / _secret_file(audience)).exists():
        return load_join_secret(folder, audience).token(role, name)
    return _read_hex(folder / _token_file(audience)).decode()


def _make_secret(folder: Path, audience: Audience) -> None:
    write_private(folder / _secret_file(audience), secrets.token_hex(SECRET_BYTES).encode())


def _read_hex(path: Path) -> bytes:
    found = read_private(path)
    if not _HEX.fullmatch(found):
        raise UserError(
            "the file does not contain a valid secret or token for joining a run",
            where=str(path),
            remedy="start the run again, or create new keys with `python -m services.reward keys`",
        )
    return found


def _secret_file(audience: Audience) -> str:
    return f"{audience}.join"


def _token_file(audience: Audience) -> str:
    return f"{audience}.token"
