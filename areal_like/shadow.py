"""Says which file stands in the way when one of our five packages is not the one that Python would import.

Owns: the check, and where a user's own modules are looked for: after everything installed, so that a `random.py` or
`numpy.py` beside them replaces nothing. Refuses: mending it. Our package names are generic (`trainer` exists on PyPI,
and a user's own `trainer.py` in the current folder is likely), and `python -m trainer` looks into the current folder
first: there our code would never run, so whoever starts processes must call this before, from the folder they will
start in.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from areal_like.errors import UserError

USER_PATH = "AREAL_LIKE_USER_PATH"
"""Environment variable that tells a process the folder of the user's own modules (PYTHONPATH would put it in front)."""
PACKAGES = ("areal_like", "services", "trainer", "rollout", "controller")


def append_user_path() -> None:
    """Look for modules in the user's folder as well, last of all."""
    folder = os.environ.get(USER_PATH)
    if folder and folder not in sys.path:
        sys.path.append(folder)


def check_not_shadowed(folder: Path | None = None) -> None:
    """Check what is imported already, and what a process started in `folder` (default: here) would find.

    Raises UserError naming the file or folder that is found instead of ours.
    """
    home = Path(__file__).resolve().parent.parent
    folder = folder or Path.cwd()
    importlib.invalidate_caches()
    search = [*([] if sys.flags.safe_path else [str(folder)]), *sys.path]
    for name in PACKAGES:
        imported = sys.modules.get(name)
        if imported is not None:
            _refuse_stranger(name, _location(getattr(imported, "__file__", None), imported), home)
        spec = PathFinder.find_spec(name, search) or find_spec(name)
        _refuse_stranger(name, _location(spec.origin if spec else None, spec), home)


def _location(file: str | None, holder: object) -> Path | None:
    """Where a module or spec lies: its file, or the first folder of a namespace package."""
    if file is not None:
        return Path(file)
    folders = list(getattr(holder, "__path__", None) or getattr(holder, "submodule_search_locations", None) or [])
    return Path(folders[0]) if folders else None


def _refuse_stranger(name: str, found: Path | None, home: Path) -> None:
    if found is None:
        raise UserError(f"the package {name} of this installation is missing", where=str(home), remedy="reinstall")
    if found.resolve() != home / name / "__init__.py":
        raise UserError(
            f"Python would import this instead of areal_like's package {name} (in {home / name})",
            where=str(found),
            remedy="rename or move it, or start from another folder",
        )
