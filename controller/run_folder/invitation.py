"""The invitation of a run: the file with which `areal-like worker --join` connects to its controller.

It is written to RUN/keys at the start of every session, and may be copied to other machines. It contains a secret: who
has it can start rollout workers for this session of the run (docs/security.md).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from areal_like.errors import UserError
from areal_like.transport.curve import read_private, write_private
from areal_like.transport.sockets import is_reachable

INVITATION_FILE = "invitation.json"
FORMAT = 1


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a candidate needs to connect."""

    format: int = FORMAT
    run: str
    """Name of the run, for messages."""
    run_id: str
    release: str
    """Version of areal_like."""
    address: str
    """The controller's address, tcp://host:port."""
    host: str
    """Name of the controller's machine."""
    boot_id: str
    """Boot of the controller's machine: whether the reader is on it."""
    credentials: dict[str, str]
    """Key files by name."""

    def __repr__(self) -> str:
        return f"Invitation(run={self.run!r}, address={self.address!r})"

    @property
    def is_local(self) -> bool:
        """Whether only processes of the controller's machine reach the address."""
        return not is_reachable(urlsplit(self.address).hostname or "")

    def save(self, keys: Path) -> None:
        """Write it to the folder of the run's keys, readable by its owner only."""
        write_private(keys / INVITATION_FILE, msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> Invitation:
        """Read an invitation. Raises UserError if it is missing, damaged, of another format or readable by others."""
        remedy = "copy RUN/keys/invitation.json of the run in progress again, with mode 600"
        content = read_private(path)
        try:
            found = msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise UserError("the file is not an invitation of a run", where=str(path), remedy=remedy) from error
        if found.format != FORMAT:
            raise UserError(
                f"the invitation has format {found.format}, this version of areal_like reads format {FORMAT}",
                where=str(path), remedy="install the version of areal_like that the run uses",
            )  # fmt: skip
        return found
