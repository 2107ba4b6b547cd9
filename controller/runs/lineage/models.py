"""Checkpoints and exported models of a run, stored and removed ones, with the version each holds."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from areal_like.errors import WeightError
from controller.run_folder.exports import read_exports
from controller.run_folder.run_folder import RunFolder
from controller.runs.lineage.chain import Chain, Version, saved_checkpoints
from controller.wiring.checkpoints import (
    checkpoint_digest,
    checkpoint_identity,
    checkpoints_on_disk,
    export_origin,
    is_checkpoint,
)


@dataclass(frozen=True)
class Model:
    """A checkpoint or an exported model. digest: SHA-256 of the checkpoint's manifest; empty: unknown."""

    kind: Literal["checkpoint", "export"]
    path: str
    version: Version
    digest: str
    is_stored: bool
    repository: str = ""
    """Repository of the hub that it was sent to."""

    def is_origin_of(self, export: Model) -> bool:
        """Whether this checkpoint is the one that a model was exported from."""
        if self.digest and export.digest:
            return self.digest == export.digest
        return self.version == export.version

    @property
    def state(self) -> str:
        """`stored`, or that it is gone."""
        return ("stored" if self.is_stored else "no longer stored") + (
            f", uploaded to {self.repository}" if self.repository else ""
        )


def models_of(db: sqlite3.Connection, folder: RunFolder, chain: Chain) -> dict[str, Model]:
    """All checkpoints and exported models of a run that are recorded or stored, by path."""
    found: dict[str, Model] = {}
    stored = [path for _, path in checkpoints_on_disk(folder.root)]
    stored += sorted(path for path in folder.best.glob("*") if is_checkpoint(path)) if folder.best.is_dir() else []
    for path in stored:
        if (model := checkpoint_model(path, chain)) is not None:
            found[model.path] = model
    known = {(one.version, one.digest) for one in found.values()}
    for saved in saved_checkpoints(db, chain):
        path = folder.checkpoints / Path(saved.path).name  # the run may have been moved
        if (saved.version, saved.digest) in known or (not saved.digest and str(path) in found):
            continue
        # A later lineage, or the newest save of a step, may have taken the folder's name.
        name = str(path) if str(path) not in found else f"{path} of {saved.version.lineage or 'the start'}"
        found[name] = Model("checkpoint", name, saved.version, saved.digest, is_stored=False)
    run_id = _run_id(db)
    for entry in [{"path": str(folder.final)}, *read_exports(folder.root)]:
        if (model := _export(entry, chain, run_id)) is None:
            continue
        before = found.get(model.path)
        if before is not None and before.version != model.version:  # replaced, but it may have been copied or sent
            found[f"{model.path} of version {before.version.step}"] = replace(before, is_stored=False)
        found[model.path] = model
    return found


def checkpoint_model(path: Path, chain: Chain) -> Model | None:
    """The checkpoint in a folder; None if it cannot be read, or its version is not of this run."""
    try:
        _, lineage, step = checkpoint_identity(path)
    except WeightError:
        return None
    version = chain.version(step, lineage)
    if version is None:
        return None
    return Model("checkpoint", str(path.resolve()), version, checkpoint_digest(path), is_stored=True)


def export_model(path: Path, chain: Chain, run_id: str) -> Model | None:
    """The exported model in a folder; None if it does not say what it is, or is not of this run."""
    try:
        origin = export_origin(path)
    except WeightError:
        return None
    if origin is None or origin[0] != run_id:
        return None
    _, lineage, step, digest = origin
    version = chain.version(step, lineage)
    return version and Model("export", str(path.resolve()), version, digest, is_stored=True)


def _export(entry: dict[str, Any], chain: Chain, run_id: str) -> Model | None:
    path, repository = Path(entry["path"]), str(entry.get("repository") or "")
    now = export_model(path, chain, run_id)
    if "version" not in entry:
        return now
    version = chain.version(entry["version"], entry["lineage"])
    if version is None:
        return None
    is_stored = now is not None and now.digest == entry["checkpoint"]
    return Model("export", str(path), version, entry["checkpoint"], is_stored, repository)


def _run_id(db: sqlite3.Connection) -> str:
    row = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    return str(row[0]) if row is not None else ""
