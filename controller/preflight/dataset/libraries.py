"""Imports the libraries of the `data` extra when a stage needs them."""

from __future__ import annotations

import importlib
from typing import Any

from areal_like.errors import UserError

PACKAGES = {
    "rensa": "rensa",
    "py3langid": "py3langid",
    "phonenumbers": "phonenumbers",
    "detect_secrets": "detect-secrets",
}
"""Package that contains each module."""


def library(module: str) -> Any:
    """Import a module of the extra. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PACKAGES[module.partition(".")[0]]
        raise UserError(f"the package {package} is not installed", remedy="pip install 'areal-like[data]'") from error
