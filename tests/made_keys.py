"""Credentials of a run and of a reward service for tests that need some, made once for each test process."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from areal_like.transport.credentials import issue_credentials, make_run_credentials

KEYS = "AREAL_LIKE_TEST_KEYS"
"""Environment variable: what a test gives a process of its own."""


@functools.cache
def run_keys() -> Path:
    """Keys and both join secrets of one run: for its hubs, and for peers of any name. Those of KEYS where it is set."""
    if given := os.environ.get(KEYS):
        return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="areal-test-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_run_credentials(folder / "keys")
    return folder / "keys"


@functools.cache
def keys_of(role: str, name: str) -> Path:
    """What the controller of that run gives one of its processes."""
    return issue_credentials(run_keys(), role, name)
