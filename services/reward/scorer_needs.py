"""Requirements of built-in scorers on the machine (packages, keys, files), checked before anything starts.

Does not import torch, sends nothing to a server (it only checks whether it listens), and loads no models.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from areal_like.errors import UserError
from areal_like.settings import Settings
from services.reward.option_files import read_key, read_rubric
from services.reward.scorer_options import (
    EndpointOptions,
    HttpOptions,
    JudgeOptions,
    ReasoningGymScorerOptions,
    RewardModelOptions,
)

REACH_TIMEOUT_S = 3.0


def needs_of(options: Settings) -> Iterator[UserError]:
    """Missing requirements of a scorer with these options; `where` of an error is the option."""
    if isinstance(options, EndpointOptions):
        yield from _of_an_endpoint(options)
    if isinstance(options, ReasoningGymScorerOptions) and find_spec("reasoning_gym") is None:
        yield UserError("the package reasoning-gym is not installed", remedy="pip install 'areal-like[reasoning-gym]'")
    if isinstance(options, RewardModelOptions):
        from services.reward.classifier_folder import check_folder

        try:
            check_folder(options.path, options.label)
        except UserError as error:
            yield UserError(error.what, where="label" if error.where == "label" else "path", remedy=error.remedy)
    if isinstance(options, JudgeOptions) and options.rubric_file is not None:
        try:
            read_rubric(options.rubric_file, "")
        except UserError as error:
            yield UserError(error.what, where="rubric_file", remedy=error.remedy)


def _of_an_endpoint(options: EndpointOptions) -> Iterator[UserError]:
    if find_spec("httpx2") is None:
        yield UserError("the scorer requires the package httpx2", remedy="pip install httpx2")
    try:
        read_key(options, "")
    except UserError as error:
        yield UserError(error.what, where="key_env" if options.key_env else "key_file", remedy=error.remedy)


def unreachable(options: Settings) -> UserError | None:
    """The error that nothing listens at the endpoint. None if a server listens, if there is no endpoint, or behind a
    proxy."""
    if isinstance(options, HttpOptions):
        return silent(options.url, "url")
    return silent(options.base_url, "base_url") if isinstance(options, JudgeOptions) else None


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
            f"no server is listening at {host}:{port} ({reason})", where=key, remedy="start the server first"
        )
    return None
