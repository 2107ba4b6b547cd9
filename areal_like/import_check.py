"""Ensures that our five packages are imported instead of the user's modules of the same name.

Our package names are generic, and a user's own `trainer.py` in the current folder is likely. So our packages come first
on the path, and the user's folder comes after everything installed, so that a `random.py` or `numpy.py` there replaces
nothing. This module sets that order and checks it. One conflict is left, which raises an error: a user's module that is
configured under the name of one of our packages; the file must be renamed.

Processes of a run are started with `-P`, and with this installation first on their path (controller/launch/local.py).
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
"""Environment variable with the folder of the user's own modules (PYTHONPATH would put it first)."""
PACKAGES = ("areal_like", "services", "trainer", "rollout", "controller")
HOME = Path(__file__).resolve().parent.parent
"""Folder in which our packages are installed."""


def prefer_installation() -> None:
    """Search this installation first and the current folder last: `python -m` puts the current folder first.

    Call it before any package other than `areal_like` and the caller's own is imported.
    """
    here = Path.cwd()
    if not sys.flags.safe_path and sys.path and Path(sys.path[0] or here).resolve() == here != HOME:
        sys.path.append(sys.path.pop(0) or str(here))
    if sys.path[:1] != [str(HOME)]:
        sys.path.insert(0, str(HOME))


def append_user_path() -> None:
    """Append the user's folder to the search path."""
    folder = os.environ.get(USER_PATH)
    if folder and folder not in sys.path:
        sys.path.append(folder)


def check_not_shadowed() -> None:
    """Check the modules that are imported already, and those that would be found.

    Raises UserError naming the file or folder that is found instead of ours.
    """
    importlib.invalidate_caches()
    for name in PACKAGES:
        imported = sys.modules.get(name)
        if imported is not None:
            _check_location(name, _location(getattr(imported, "__file__", None), imported))
        spec = PathFinder.find_spec(name, sys.path) or find_spec(name)
        _check_location(name, _location(spec.origin if spec else None, spec))


def check_own_module(module: str, where: str) -> None:
    """Check that a module which the user configured is not hidden by one of our packages.

    module: dotted name. Raises UserError naming the user's file.
    """
    top, *rest = module.split(".")
    if top not in PACKAGES:
        return
    ours = HOME.joinpath(top, *rest)
    if rest and (ours.is_dir() or ours.with_suffix(".py").is_file()):
        return  # a built-in scorer
    folder = Path(os.environ.get(USER_PATH) or Path.cwd())
    theirs = next((path for path in (folder / f"{top}.py", folder / top) if path.exists() and folder != HOME), None)
    if theirs is not None:
        raise UserError(
            f"`{top}` is also the name of a package of areal_like, so Python imports that package instead of {theirs}",
            where=where,
            remedy=f"rename your module, for example to my_{theirs.name}, and use the new name in this setting",
        )


def _location(file: str | None, holder: object) -> Path | None:
    """Path of a module or spec: its file, or the first folder of a namespace package."""
    if file is not None:
        return Path(file)
    folders = list(getattr(holder, "__path__", None) or getattr(holder, "submodule_search_locations", None) or [])
    return Path(folders[0]) if folders else None


def _check_location(name: str, found: Path | None) -> None:
    if found is None:
        raise UserError(
            f"the package {name} is missing from this installation", where=str(HOME), remedy="install areal_like again"
        )
    if found.resolve() != HOME / name / "__init__.py":
        raise UserError(
            f"Python would import this module instead of areal_like's package {name} (in {HOME / name})",
            where=str(found),
            remedy="rename or move this module, or start the program in a different folder",
        )
