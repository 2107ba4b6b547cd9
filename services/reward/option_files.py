"""Reads files and environment variables that scorers' options name: the key of an endpoint, a judge's rubric.

Errors never contain a key. Other requirements of scorers are in scorer_needs.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from areal_like.errors import UserError
from services.reward.scorer_options import EndpointOptions, fault_of_template


def read_key(options: EndpointOptions, where: str) -> str | None:
    """The key, or None if the server needs none. Raises UserError, which never contains the key."""
    if options.key_env is not None:
        key, place = os.environ.get(options.key_env, ""), f"environment variable {options.key_env}"
    elif options.key_file is not None:
        place = f"file {options.key_file}"
        try:
            key = Path(options.key_file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UserError(f"the key cannot be read from {place} ({reason})", where=where) from error
    else:
        return None
    key = key.strip()
    if not key:
        raise UserError(
            f"{place} contains no key", where=where, remedy="set the key in the environment in which the job is started"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"the key in {place} contains white space, control or non-ASCII characters", where=where)
    return key


def read_rubric(path: str, where: str) -> str:
    """The rubric in a file. Raises UserError if it does not exist, is not text, or is not a template that includes the
    answer."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"rubric_file {path} cannot be read ({reason})", where=where) from error
    if fault := fault_of_template(text):
        raise UserError(f"rubric_file {path} {fault}", where=where)
    return text
