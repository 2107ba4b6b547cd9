"""Finds the run that a command names: a folder, a name in `runs/`, or the name of a run that this user started.

The state of a run is determined in owner_host.py.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from areal_like.encryption.run_key import check_key
from areal_like.errors import UserError
from controller.run_folder import registry
from controller.run_folder.run_folder import DamagedState, RunFolder

RUNS_DIR = Path("runs")
_TRACES = ("config.yaml", "ledger.sqlite", "metrics.jsonl")
"""A folder without state.json that contains any of these is a damaged run."""


def find_run(text: str) -> RunFolder:
    """Find the run called `text`. Raises UserError if it does not exist, is incomplete, damaged, of a newer version, or
    ambiguous.
    """
    folder = _found(text)
    folder.read_state()
    return folder


def find_run_to_read(text: str) -> RunFolder:
    """Same for read-only commands: a damaged state file is reported on stderr, and the other files are used."""
    folder = _found(text)
    try:
        folder.read_state()
    except DamagedState as error:
        print(f"note: {error.where}: {error.what}; continuing with the other files of the run", file=sys.stderr)
    return folder


def find_run_for_content(text: str) -> RunFolder:
    """As `find_run_to_read`, for commands that show or check content. Raises UserError also if the run is encrypted and
    the key is missing or another one.
    """
    folder = find_run_to_read(text)
    check_key(folder.root)
    return folder


def _found(text: str) -> RunFolder:
    try:
        return _find(text)
    except OSError as error:
        raise UserError(
            f"the folder cannot be read ({error.strerror or error})",
            where=text,
            remedy="check the permissions of the folder",
        ) from error


def _find(text: str) -> RunFolder:
    for candidate in (Path(text).expanduser(), RUNS_DIR / text):
        if (candidate / "state.json").is_file():
            return RunFolder(candidate.resolve())
        if candidate.is_dir():
            _refuse_without_state(candidate)
    entries = [entry for entry in registry.known() if entry.is_here]
    named = [entry.root for entry in entries if entry.root.name == text]
    if len(named) == 1:
        return RunFolder(named[0].resolve())
    if named:
        raise UserError(
            f"{len(named)} runs have this name",
            where=text,
            remedy=f"specify the folder of the run: {', '.join(map(str, named[:5]))}",
        )
    names = [*_names_in(RUNS_DIR), *(entry.root.name for entry in entries)]
    near = difflib.get_close_matches(Path(text).name, names, n=3) or list(dict.fromkeys(names))[:3]
    remedy = (
        f"known runs: {', '.join(near)} (areal-like ps --all lists all runs)"
        if near
        else "start a run first: areal-like train"
    )
    raise UserError("there is no run of this name", where=text, remedy=remedy)


def _refuse_without_state(candidate: Path) -> None:
    """Raise UserError for a folder without a state file: an incomplete run, a folder of runs, or another folder."""
    if any((candidate / name).is_file() for name in _TRACES):
        raise UserError(
            "the folder has no state.json, because the run was interrupted while the folder was being created, or the "
            "file was deleted",
            where=str(candidate),
            remedy="start a new run",
        )
    if names := _names_in(candidate):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(
            "this is a folder of runs, not the folder of a single run",
            where=str(candidate),
            remedy=f"specify one of the runs in this folder: {shown}",
        )


def _names_in(runs_dir: Path) -> list[str]:
    """Names of the runs in a folder, newest first."""
    found = [(path.stat().st_mtime, path.parent.name) for path in runs_dir.glob("*/state.json")]
    return [name for _, name in sorted(found, reverse=True)]
