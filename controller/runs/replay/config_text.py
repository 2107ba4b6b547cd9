"""Settings of a run as text for others: without secrets and without paths of the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from areal_like.encryption.files import read_text

LEFT_OUT = "(left out)"
_SECRET = r"key|keys|api_?keys?|secrets?|password|passwd|pwd|passphrase|credentials?|auth|authorization|token|cookie"
_SECRET_KEY = re.compile(rf"(^|_)({_SECRET})$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_TEXT = (
    (re.compile(r"(\w+://)[^/@\s]+@"), rf"\1{LEFT_OUT}@"),
    (re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{12,}", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(rf"(\b(?:[\w-]*[_-])?(?:{_SECRET}|signature|sig)=)[^&\s#]+", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(r"(\bfile://)\S*"), rf"\1{LEFT_OUT}"),
    (re.compile(r"(?<![\w/.<~*})-])(?:~\w*)?/(?!/)[^\s\"',;)\]}]+"), LEFT_OUT),  # an absolute path
)
"""Parts of a text that are replaced, in this order."""


def config_text(file: Path) -> str:
    """Read a run's config.yaml, without secrets and paths as `portable` leaves them out.

    Raises OSError, ValueError (not YAML).
    """
    try:
        found = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return yaml.safe_dump(portable(found), sort_keys=False, width=100)


def portable(value: Any) -> Any:
    """Return a copy of a document without what belongs to one machine or user.

    Replaced are texts under keys such as `api_key` or `Authorization`, users and tokens in URLs, and absolute paths.

    Example:
        >>> portable({"api_key": "x", "uri": "https://me:pw@host/a", "path": "/home/me/m", "max_new_tokens": 3})
        {'api_key': '(left out)', 'uri': 'https://(left out)@host/a', 'path': '(left out)', 'max_new_tokens': 3}
    """
    if isinstance(value, dict):
        return {
            portable(key): _without_texts(one) if _is_secret(str(key)) else portable(one) for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [portable(one) for one in value]
    if isinstance(value, str):
        for pattern, replacement in _IN_TEXT:
            value = pattern.sub(replacement, value)
    return value


def _is_secret(key: str) -> bool:
    """Whether values of a key are secrets, in any of the usual spellings: api_key, x-api-key, apiKey."""
    return _SECRET_KEY.search(_CAMEL.sub("_", key.replace("-", "_"))) is not None


def _without_texts(value: Any) -> Any:
    """Replace all texts: numbers are kept, because `token` also names counts and ids."""
    if isinstance(value, dict):
        return {key: _without_texts(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_texts(one) for one in value]
    return LEFT_OUT if isinstance(value, str) else value
