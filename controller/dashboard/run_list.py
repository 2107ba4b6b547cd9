"""The runs of one folder, a row each.

Only files that changed are read again. The state of a run is determined in owner_host.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from controller.report.charts import number
from controller.report.overview import text
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.run_notes import NOTES_FILE, read_notes
from controller.runs.ps import Row, look

_TRACES = ("state.json", "config.yaml", "metrics.jsonl", "ledger.sqlite")
_WATCHED = ("state.json", "status.json", "summary.json", NOTES_FILE)
Signature = tuple[int, ...]


def find_run(runs_dir: Path, name: str) -> RunFolder:
    """Find the run of this name in the folder. Raises UserError."""
    root = runs_dir / name
    if name in ("", ".", "..") or "/" in name or "\0" in name or not is_run(root):
        raise UserError(f"there is no run {text(name, 80)!r}", where=str(runs_dir), remedy="select a run from the list")
    return RunFolder(root.resolve())


def is_run(root: Path) -> bool:
    """Return whether the folder is that of a run, damaged or not."""
    try:
        return any((root / name).is_file() for name in _TRACES)
    except OSError:
        return False


@dataclass
class RunList:
    """A view for a feed."""

    runs_dir: Path
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    _signatures: dict[str, Signature] = field(default_factory=dict)

    def refresh(self) -> Mapping[str, Any]:
        """Return rows that changed, and names of removed runs. Raises UserError if the folder cannot be read."""
        found = self._names()
        gone = [name for name in self._rows if name not in found]
        for name in gone:
            del self._rows[name], self._signatures[name]
        changed = []
        for name in found:
            root = self.runs_dir / name
            signature = _signature(root)
            old = self._rows.get(name)
            # When the controller of a run is killed, the run ends without a change of a file.
            if old is not None and self._signatures[name] == signature and old["kind"] != "running":
                continue
            self._signatures[name] = signature
            self._rows[name] = row = row_of(root)
            if row != old:
                changed.append(row)
        return {"runs": changed, "gone": gone} if changed or gone else {}

    def snapshot(self) -> Mapping[str, Any]:
        """Every row."""
        return {"dir": text(self.runs_dir.resolve()), "runs": list(self._rows.values())}

    def _names(self) -> set[str]:
        try:
            with os.scandir(self.runs_dir) as entries:
                return {
                    entry.name
                    for entry in entries
                    if _is_text(entry.name) and entry.is_dir() and is_run(Path(entry.path))
                }
        except OSError as error:
            raise UserError(
                f"the folder cannot be read ({error.strerror})",
                where=str(self.runs_dir),
                remedy="check that the folder still exists",
            ) from error


def _is_text(name: str) -> bool:
    """Whether a page can show and link the name: areal_like creates no folder whose name is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def row_of(root: Path) -> dict[str, Any]:
    """One run as shown in the list; unknown numbers are None."""
    try:
        found = look(root)
    except OSError as error:
        found = Row(root, "damaged", f"the folder cannot be read ({error.strerror or error})", None, 0.0)
    row: dict[str, Any] = {"name": root.name, "label": text(root.name, 120), "kind": found.kind, "words": ""}
    row["note"] = text(read_notes(root).line)
    facts = found.facts
    if facts is None:
        row["words"] = text(found.words)
        return {**row, "step": None, "num_steps": None, "accuracy": None, "reward": None, "updated_s": None}
    status, row["words"] = facts.status, state_words(found.kind, found.state)
    updated_s = number(status.get("time_s")) or number(found.state.get("updated_s"))
    return {
        **row,
        "step": facts.step,
        "num_steps": facts.num_steps,
        "accuracy": facts.accuracy[max(facts.accuracy)] if facts.accuracy else None,
        "reward": number(facts.last_step.get("reward_mean")),
        "eta_s": number(status.get("eta_s")) if found.kind == "running" else None,
        "updated_s": updated_s,
    }


def state_words(kind: str, state: Mapping[str, Any]) -> str:
    """Explanation of a run's state, without times that would become outdated on the page."""
    if kind == "crashed":
        return "the controller is no longer running; use areal-like resume to continue the run"
    if kind == "foreign":
        return text(f"recorded as running on {state.get('host') or 'a different machine'}")
    return text(state.get("reason") or "")


def _signature(root: Path) -> Signature:
    found = []
    for name in _WATCHED:
        try:
            status = (root / name).stat()
            found += [status.st_mtime_ns, status.st_size, status.st_ino]
        except OSError:
            found += [-1]
    return tuple(found)
