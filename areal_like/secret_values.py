"""Removes secrets from texts that are written to files: values of environment variables with secret names.

Libraries put keys and addresses with passwords into their exceptions, which become reasons and lines of a log. What a
program prints by itself does not pass through here. Logs of an encrypted run pass through here as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from areal_like.errors import UserError

if TYPE_CHECKING:
    from areal_like.encryption.texts import Texts

_NAME = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|DSN)(_|$)|"
    r"(API_?KEY|TOKEN|SECRET|PASSWORD)$|_(URL|URI)$",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"://[^/@:\s]*:(?P<password>[^/@\s]+)@")
SEALED_LOGS = "AREAL_LIKE_SEALED_LOGS"
"""Environment variable with the folder of an encrypted run, in its processes: what they log is encrypted."""
MIN_CHARS = 8
"""A shorter value is not replaced: it could be a part of any text."""
_PLAIN = re.compile(r"[a-z]+|[\d.]+|/[\w./-]*", re.ASCII)
"""Values that are words, numbers or paths, such as those of SSH_AUTH_SOCK."""


def without_secrets(text: str) -> str:
    """Replace every secret of this process's environment by the name of its variable, such as `[HF_TOKEN]`."""
    return replaced(text, _secrets(tuple(os.environ.items())))


def print_traceback(error: BaseException, limit: int | None = None) -> None:
    """Print an exception with its traceback to stderr, without secrets, encrypted in processes of an encrypted run.
    limit: number of its frames."""
    text = without_secrets("".join(traceback.format_exception(error, limit=limit)))
    print(sealed_for_log(text.rstrip("\n")), file=sys.stderr, flush=True)


def sealed_for_log(text: str) -> str:
    """The text as it is written to a log: encrypted if SEALED_LOGS names an encrypted folder, which `areal-like logs`
    decrypts, and left out if the key is not available in this process.
    """
    root = os.environ.get(SEALED_LOGS)
    if not root:
        return text
    texts: Texts | None = None
    with contextlib.suppress(UserError):
        texts = _texts(root)
    if texts is None or not texts.is_sealing:  # no key, or the folder was moved
        return "[left out: the key of the run is not available in this process]"
    return texts.sealed("log", text)


@functools.lru_cache(maxsize=2)
def _texts(root: str) -> Texts:
    from areal_like.encryption.texts import Texts  # imports libraries, which most short-lived processes do not need

    return Texts.to_write(Path(root))


def replaced(text: str, secrets: Iterable[tuple[str, str]]) -> str:
    """Replace values by names. secrets: (value, name)."""
    for value, name in secrets:
        if value in text:
            text = text.replace(value, f"[{name}]")
    return text


@functools.lru_cache(maxsize=4)
def _secrets(environment: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """(value, name), longest first, so that a value within another one does not leave the rest of it."""
    found: dict[str, str] = {}
    for name, value in environment:
        if not _NAME.search(name):
            continue
        if name.upper().endswith(("_URL", "_URI", "_DSN")):
            match = _PASSWORD.search(value)
            value = match["password"] if match else ""
        if len(value) >= MIN_CHARS and not _PLAIN.fullmatch(value):
            found.setdefault(value, name)
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))
