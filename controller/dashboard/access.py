"""Access rules of the dashboard: tokens, Host header, origins, and headers of every response.

Routes are in server.py, actions in actions.py.

Reading is open on a loopback address, unless a token was given; on any other address it requires the token. Actions
always require the token, in a header that no form and no link of another site can send. The Host header must name this
server by an address, by `localhost` or by the machine's own name. A page of another site whose name resolves to this
machine (DNS rebinding) cannot send such a header.
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
"""Cookie of the dashboard; other commands add their name (guarding.py)."""
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
"""Headers of every response."""


@dataclass(frozen=True)
class Access:
    """Access rules of one server. `token` is never empty."""

    host: str
    token: str
    reads_need_token: bool

    @staticmethod
    def of(host: str, token: str | None = None) -> Access:
        """The rules for an address. token: the user's own; None: from the environment, else a generated one.

        Raises UserError if the token is too short or contains characters not allowed in a URL.
        """
        given = os.environ.get(TOKEN_VARIABLE) if token is None else token
        if given is not None and not _TOKEN.fullmatch(given):
            raise UserError(
                "the token must consist of 16 to 200 letters, digits, - or _",
                where="--token" if token is not None else TOKEN_VARIABLE,
                remedy="remove this setting: a token is then generated and printed",
            )
        return Access(host, given or secrets.token_urlsafe(24), not is_loopback(host) or given is not None)

    def is_token(self, given: str | None) -> bool:
        """Compare in constant time."""
        return given is not None and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def knows_host(self, header: str | None) -> bool:
        """Return whether the Host header is a valid name of this server."""
        try:
            name = urlsplit(f"//{header or ''}").hostname or ""
        except ValueError:
            return False
        return _is_address(name) or name in {"localhost", self.host.lower()} or name in _machine_names()

    @staticmethod
    def is_same_origin(headers: Mapping[str, str]) -> bool:
        """Return whether the request was sent by a page of this server, or by a program that is not a browser."""
        if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return False
        origin = headers.get("Origin")
        return origin is None or urlsplit(origin).netloc.lower() == headers.get("Host", "").lower() != ""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _machine_names() -> frozenset[str]:
    """Names of this machine. Cached, because the second may require a network look-up."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
