"""Reads the key of an endpoint from the environment variable or the file that its options name. Errors never contain
it.
"""

from __future__ import annotations

import os
from pathlib import Path

from areal_like.errors import UserError
from areal_like.external.settings import EndpointOptions


def key_place(options: EndpointOptions) -> str:
    """The place of the key, for messages."""
    if options.key_env is not None:
        return f"environment variable {options.key_env}"
    return f"file {options.key_file}" if options.key_file is not None else "no key"


def read_key(options: EndpointOptions, where: str) -> str | None:
    """The key, or None if the server needs none. Raises UserError, which never contains the key."""
    place = key_place(options)
    if options.key_env is not None:
        key = os.environ.get(options.key_env, "")
    elif options.key_file is not None:
        try:
            key = Path(options.key_file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            remedy = "check the path and its permissions"
            raise UserError(f"the key cannot be read from {place} ({reason})", where=where, remedy=remedy) from error
    else:
        return None
    key = key.strip()
    if not key:
        remedy = (
            "set this variable in the environment in which the job is started"
            if options.key_env is not None
            else "write the key into this file"
        )
        raise UserError(f"{place} contains no key", where=where, remedy=remedy)
    if not key.isascii() or not key.isprintable() or " " in key:
        what = f"the key in {place} contains white space, control or non-ASCII characters"
        raise UserError(what, where=where, remedy="remove these characters")
    return key
