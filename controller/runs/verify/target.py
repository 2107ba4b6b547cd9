"""Finds the run that a checkpoint or an exported model belongs to, by what is written in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from areal_like.encryption.run_key import run_key_of
from areal_like.errors import UserError, WeightError
from areal_like.plain_folder import use_memory_for_scratch
from controller.run_folder import registry
from controller.run_folder.locate import RUNS_DIR, find_run_to_read
from controller.run_folder.run_folder import DamagedState, RunFolder
from controller.wiring.checkpoints import checkpoint_identity, is_checkpoint, read_export


class Target(NamedTuple):
    """What a command was asked about.

    version: None for a run itself. export: folder of an exported model. checkpoint: folder of a checkpoint.
    """

    run: RunFolder
    version: int | None = None
    export: Path | None = None
    checkpoint: Path | None = None


def find_target(text: str, run: str = "") -> Target:
    """Find the run of `text`: a run, a checkpoint's folder, or the folder of an exported model.

    run: the run, if it cannot be found by the folder. Raises UserError, also if the run is encrypted and the key is
    missing or another one.
    """
    found = _target(text, run)
    if run_key_of(found.run.root) is not None:
        use_memory_for_scratch()
    return found


def _target(text: str, run: str) -> Target:
    folder = Path(text).expanduser()
    if (folder / "state.json").is_file() and is_checkpoint(folder):
        own_id, _, own_version = _identity(folder)
        return Target(_run_of(folder.resolve(), own_id, run), own_version, checkpoint=folder.resolve())
    if (folder / "config.json").is_file():
        try:
            recorded = read_export(folder)
        except WeightError as error:
            raise UserError(
                str(error), where=text, remedy="specify the run that trained the model instead of the exported model"
            ) from error
        run_id = "" if recorded is None else recorded.run_id
        version = None if recorded is None else recorded.version
        return Target(_run_of(folder.resolve(), run_id, run), version, folder.resolve())
    return Target(find_run_to_read(text))


def _identity(folder: Path) -> tuple[str, str, int]:
    try:
        return checkpoint_identity(folder)
    except WeightError as error:
        raise UserError(str(error), where=str(folder), remedy="specify a different checkpoint of the run") from error


def _run_of(folder: Path, run_id: str, run: str) -> RunFolder:
    """The run that is named, or a parent of the folder, or one that this user started."""
    if run:
        return find_run_to_read(run)
    parents = [parent for parent in (folder.parent, folder.parent.parent) if (parent / "ledger.sqlite").is_file()]
    if parents:
        return RunFolder(parents[0])
    known = [path.parent for path in RUNS_DIR.glob("*/state.json")]
    known += [entry.root for entry in registry.known() if entry.is_here]
    for root in known if run_id else ():
        try:
            if RunFolder(root).read_state().get("run_id") == run_id:
                return RunFolder(root.resolve())
        except (UserError, DamagedState, OSError):
            continue
    what = (
        f"the run of this model ({run_id}) is not known on this machine"
        if run_id
        else "the folder does not record which run the model comes from"
    )
    raise UserError(what, where=str(folder), remedy="specify the run with --run RUN")
