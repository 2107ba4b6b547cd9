"""Who may read the pages and who may act: tokens, names of this server, origins, headers of every answer.

Owns: the rules. Refuses: routes (server.py), doing what is asked (actions.py).

Reading is open on a loopback address, unless a token was given; anywhere else it needs the token. Acting always
needs it, in a header that no form and no link of another site can send. The Host header must name this server by an
address, by `localhost` or by the machine's own name: a page of another site whose name was pointed here (DNS
rebinding) cannot.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from areal_like.errors import UserError

TOKEN_VARIABLE = "AREAL_LIKE_DASHBOARD_TOKEN"
TOKEN_HEADER = "X-Areal-Like-Token"
COOKIE = "areal_like_dashboard"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer."""


@dataclass(frozen=True)
class Access:
    """The rules of one server. `token` is never empty."""

    host: str
    token: str
    reads_need_token: bool

    @staticmethod
    def of(host: str, token: str | None = None) -> Access:
        """The rules for an address. token: the user's own; None: that of the environment, else a generated one.

        Raises UserError where the token can be guessed or cannot stand in an address.
        """
        given = os.environ.get(TOKEN_VARIABLE) if token is None else token
        if given is not None and not _TOKEN.fullmatch(given):
            raise UserError(
                "the token must have 16 to 200 letters, digits, - or _",
                where="--token" if token is not None else TOKEN_VARIABLE,
                remedy="leave it out: one is generated and printed",
            )
        return Access(host, given or secrets.token_urlsafe(24), not is_loopback(host) or given is not None)

    def is_token(self, given: str | None) -> bool:
        """Compare in constant time."""
        return given is not None and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def knows_host(self, header: str | None) -> bool:
        """The Host header is one by which a browser of ours would call this server."""
        try:
            name = urlsplit(f"//{header or ''}").hostname or ""
        except ValueError:
            return False
        return _is_address(name) or name in {"localhost", self.host.lower()} or name in _machine_names()

    @staticmethod
    def is_same_origin(headers: Mapping[str, str]) -> bool:
        """A page of this server sent the request, or a program that is no browser."""
        if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return False
        origin = headers.get("Origin")
        return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower() != ""


def is_loopback(host: str) -> bool:
    """Only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _machine_names() -> frozenset[str]:
    """The second may take a look-up in the network: once."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
