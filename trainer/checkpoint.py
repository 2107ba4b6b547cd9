"""Checkpoints as folders: where they lie, when one counts, which one a run continues from. Torch-free.

Owns: <run>/checkpoints/step_000020/, its manifest and state.json, verification, the choice of the newest, retention.
Refuses: knowing what the training state is (training_state.py), deciding when to save (worker.py).

A folder becomes visible by one rename after its manifest (sha256 of each file) was written last, so a folder that
is there is complete; the manifest finds later damage. Folders newer than the one just saved belong to a lineage
that was rolled back; they go once the new one is safe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import WeightError
from trainer.atomic_folder import atomic_folder, remove_folder

log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What state.json says: which policy this is and how far the run was.

    version: policy version, equal to the number of steps done. counters: the trainer's monotonic counters.
    config_digest: sha256 over the settings it was trained with. generators: states of Python's and NumPy's generators.
    """

    version: int
    lineage: str
    run_id: str
    config_digest: str
    counters: dict[str, float] = {}
    generators: dict[str, Any] = {}
    saved_at_s: float = 0.0
    format: int = FORMAT


def checkpoint_folder(run_dir: Path, version: int) -> Path:
    """Where the checkpoint of `version` lies."""
    return run_dir / "checkpoints" / f"step_{version:06d}"


def all_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(version, folder) of every complete checkpoint, oldest first; temporary folders are not among them."""
    found = []
    for folder in (run_dir / "checkpoints").glob("step_*"):
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match and (folder / MANIFEST).is_file():
            found.append((int(match[1]), folder))
    return sorted(found)


def latest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, unverified; None where there is none."""
    found = all_checkpoints(run_dir)
    return found[-1][1] if found else None


def latest_valid(run_dir: Path) -> Path | None:
    """The newest checkpoint whose every file has its recorded checksum; damaged ones are logged and passed over."""
    for version, folder in reversed(all_checkpoints(run_dir)):
        try:
            verify(folder)
        except WeightError as error:
            log.error("checkpoint of version %d is passed over: %s", version, error)
        else:
            return folder
    return None


def verify(folder: Path) -> None:
    """Raises WeightError, naming the file, when `folder` is no checkpoint or a file is missing or has changed."""
    manifest = folder / MANIFEST
    try:
        recorded = json.loads(manifest.read_text())
        is_known, files = recorded["format"] == FORMAT, dict(recorded["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{manifest} is missing or damaged: this is not a complete checkpoint") from error
    if not is_known:
        raise WeightError(f"{manifest} has format {recorded['format']}; this version reads format {FORMAT}")
    for name, entry in sorted(files.items()):
        file = folder / name
        try:
            num_bytes, digest = _measure(file)
        except OSError as error:
            raise WeightError(f"{file} of the checkpoint cannot be read ({error.strerror})") from error
        if [num_bytes, digest] != [entry["num_bytes"], entry["sha256"]]:
            raise WeightError(f"{file} is damaged: its checksum is not the recorded one")


def read_state(folder: Path) -> CheckpointState:
    """state.json of a checkpoint. Raises WeightError when it is missing or damaged."""
    file = folder / STATE
    try:
        return msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightError(f"{file} is missing or damaged ({error})") from error


def save(run_dir: Path, state: CheckpointState, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write the checkpoint of `state.version`: `write` fills the folder, then state.json, then the manifest.

    Afterwards the newest `keep` remain. Raises OperationError when the disk refuses; older checkpoints are untouched.
    """
    target = checkpoint_folder(run_dir, state.version)
    with atomic_folder(target) as partial:
        write(partial)
        stamped = msgspec.structs.replace(state, saved_at_s=time.time())
        (partial / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(stamped), indent=1))
        files = {}
        for file in sorted(partial.rglob("*")):
            if file.is_file():
                num_bytes, digest = _measure(file)
                files[str(file.relative_to(partial))] = {"num_bytes": num_bytes, "sha256": digest}
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    _retain(run_dir, version=state.version, keep=keep)
    return target


def _retain(run_dir: Path, *, version: int, keep: int) -> None:
    everything = all_checkpoints(run_dir)
    surviving = [entry for entry in everything if entry[0] <= version][-keep:]
    for entry in everything:
        if entry not in surviving:
            remove_folder(entry[1])


def _measure(file: Path) -> tuple[int, str]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return opened.tell(), digest
