"""The linters of requirements-linters.lock."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def linter(name: str) -> str:
    """The program of this name next to the interpreter, where pip puts it, or on the path; skips without one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or pytest.skip(f"no {name} here: pip install -r requirements-linters.lock")
