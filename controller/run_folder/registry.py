"""Registry of this user's runs: one small file per run folder, written when the run starts.

The registry is in `$XDG_STATE_HOME/areal_like/runs` (else `~/.local/state/...`). Runs are also found through the
processes of this machine. A run that cannot be registered continues without an entry.

The folder of runs differs from job to job, so `ps` needs a common location. XDG_RUNTIME_DIR is missing in containers
and emptied at logout, while runs continue; the state folder always exists. It may be shared by several machines (home
on a network), so an entry contains its host. Processes are checked as well: each child of a run names its spec on its
command line, which finds runs whose entry could not be written, and runs of other users.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from controller.run_folder.run_folder import RunFolder

log = logging.getLogger(__name__)

MAX_ENTRIES = 500
FOREIGN_KEEP_S = 30 * 86400.0
"""Entries of other machines whose folder does not exist here are deleted after this time."""


@dataclass(frozen=True)
class Entry:
    """One run folder as it was registered."""

    root: Path
    host: str
    registered_s: float
    file: Path

    @property
    def is_here(self) -> bool:
        """Whether the run's state file is accessible from this machine."""
        return _exists(self.root / "state.json")


def registry_dir() -> Path | None:
    """Folder of the entries; None if there is no home folder."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # by the specification relative paths are ignored
        return Path(given) / "areal_like" / "runs"
    try:
        return Path.home() / ".local" / "state" / "areal_like" / "runs"
    except RuntimeError:
        return None


def enlist(folder: RunFolder) -> bool:
    """Register this run. False if that is not possible (read-only home): the run continues without an entry."""
    place = registry_dir()
    if place is None:
        return False
    root = folder.root.resolve()
    entry = {"format": 1, "root": str(root), "host": socket.gethostname(), "registered_s": time.time()}
    path = place / f"{hashlib.blake2b(str(root).encode(errors='surrogateescape'), digest_size=10).hexdigest()}.json"
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(entry))
        fresh.replace(path)
        _bound(place)
    except OSError as error:
        log.info("the run could not be registered for `areal-like ps` (%s)", error)
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        return False
    return True


def known(*, now_s: float | None = None) -> list[Entry]:
    """Registered runs, newest first. Entries whose run does not exist are deleted."""
    place, now_s = registry_dir(), time.time() if now_s is None else now_s
    if place is None:
        return []
    try:
        files = sorted(place.glob("*.json"))
    except OSError:
        return []
    found = []
    for file in files:
        entry = _read(file)
        if entry is None or _leads_nowhere(entry, now_s):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            continue
        found.append(entry)
    return sorted(found, key=lambda entry: -entry.registered_s)


def seen_in_processes() -> list[Path]:
    """Folders of runs that processes of this machine belong to, by the spec on their command lines."""
    roots: dict[Path, None] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        for flag, value in itertools.pairwise(words):
            spec = Path(value)
            if flag == "--spec" and spec.is_absolute() and spec.parent.name == "processes":
                roots[spec.parent.parent] = None
    return [root for root in roots if _exists(root / "state.json")]


def _read(file: Path) -> Entry | None:
    try:
        data = json.loads(file.read_text())
        root = Path(data["root"])
        entry = Entry(root, str(data.get("host", "")), float(data.get("registered_s", 0.0)), file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return entry if root.is_absolute() else None


def _leads_nowhere(entry: Entry, now_s: float) -> bool:
    if entry.is_here:
        return False
    return entry.host == socket.gethostname() or now_s - entry.registered_s > FOREIGN_KEEP_S


def _bound(place: Path) -> None:
    """Delete the oldest entries beyond MAX_ENTRIES."""
    files = list(place.glob("*.json"))
    if len(files) <= MAX_ENTRIES:
        return
    for file in sorted(files, key=lambda file: file.stat().st_mtime)[: len(files) - MAX_ENTRIES]:
        file.unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder of another user
        return False
