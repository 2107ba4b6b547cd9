"""Requirements of an endpoint on this machine (package, key, recorded answers), and whether a server listens there.

Nothing is sent to a server.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from areal_like.errors import UserError
from areal_like.external.key import read_key
from areal_like.external.settings import EndpointOptions, ModelEndpointOptions

REACH_TIMEOUT_S = 3.0


def endpoint_needs(options: EndpointOptions) -> Iterator[UserError]:
    """Missing requirements; `where` of an error is the option, empty for the package."""
    if find_spec("httpx2") is None:
        yield UserError("the package `httpx2` is not installed", remedy="pip install httpx2")
    if isinstance(options, ModelEndpointOptions) and options.record == "replay":
        if options.records is None or not Path(options.records).expanduser().is_file():
            what = f"there is no file {options.records}" if options.records else "no file of recorded answers is set"
            yield UserError(
                what,
                where="records",
                remedy="set `records` to the file of an earlier run, such as RUN/external/NAME.jsonl",
            )
        return
    try:
        read_key(options, "")
    except UserError as error:
        yield UserError(error.what, where="key_env" if options.key_env else "key_file", remedy=error.remedy)


def silent(url: str, key: str) -> UserError | None:
    """The error that nothing listens at `url`, the value of the option `key`. None if a server listens, behind a proxy,
    and if it is not the address of a server."""
    from urllib.request import getproxies, proxy_bypass  # imports ssl, which scoring processes do not need

    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    except ValueError:
        return None
    if not host:
        return None
    if getproxies().get(parts.scheme) and not proxy_bypass(host) and host not in ("localhost", "127.0.0.1", "::1"):
        return None
    try:
        socket.create_connection((host, port), timeout=REACH_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return UserError(
            f"cannot connect to {host}:{port} ({reason})",
            where=key,
            remedy="start the server first, or correct the address",
        )
    return None
