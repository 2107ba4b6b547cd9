"""Import paths of functions and classes that the caller passes as objects.

Returns `module:name` of an object, or raises an error if a worker process could not import it. The import itself is
tested before a run in a separate process (controller/preflight/user_code.py).

Worker processes import a user's modules from the folder in which the run was started, so that `resume` finds them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_like.errors import UserError

TOP_LEVEL_REMEDY = "define this object with `def` or `class` at the top level of a module"
FILE_REMEDY = (
    "save this object in a file in the current folder, for example my_rewards.py, and import it from that file"
)


def import_name(thing: Callable[..., Any], where: str) -> str:
    """`module:name` under which worker processes can import `thing`. Raises UserError that says how to make it
    importable.

    Args:
        thing: a function or class.
        where: the key of the configuration, for the message.
    """
    name, module = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", None) or ""
    if not name.isidentifier():
        shown = name or type(thing).__name__
        raise UserError(f"worker processes cannot import `{shown}`", where=where, remedy=TOP_LEVEL_REMEDY)
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if module == "__main__":
        module = _script_module(name, file, getattr(getattr(main, "__spec__", None), "name", None), where)
    _check_folder(name, module, file, where)
    return f"{module}:{name}"


def _script_module(name: str, file: str | None, spec_name: str | None, where: str) -> str:
    """Module name under which the running script or notebook can be imported."""
    if file is None or not Path(file).is_file():
        what = f"worker processes cannot import `{name}`, which is defined in a notebook or an interactive session"
        raise UserError(what, where=where, remedy=FILE_REMEDY)
    if spec_name:  # python -m package.script
        return spec_name
    path = Path(file)
    if path.suffix != ".py" or not path.stem.isidentifier():
        what = f"worker processes cannot import `{name}` from {path.name}, which is not a valid module name"
        raise UserError(what, where=where, remedy="rename the script, for example to my_job.py")
    return path.stem


def _check_folder(name: str, module: str, main_file: str | None, where: str) -> None:
    """Raise UserError for modules that are only found because they are next to a script in another folder."""
    if main_file is None:
        return
    folder = Path(main_file).resolve().parent
    searched = {Path.cwd().resolve(), *(Path(part).resolve() for part in _python_path())}
    top = module.partition(".")[0]
    is_there = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
    loaded = getattr(sys.modules.get(top), "__file__", None)
    is_from_there = top == Path(main_file).stem or (
        loaded is not None and Path(loaded).resolve() in (folder / f"{top}.py", folder / top / "__init__.py")
    )
    if is_there and is_from_there and folder not in searched:
        raise UserError(
            f"worker processes cannot import `{name}` from {folder}, because they search the current folder",
            where=where,
            remedy=f"start the script in its folder (cd {folder}), or install the module",
        )


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
