"""A disk of which every change is recorded, so that what it holds after a crash can be computed for any moment.

The files below one folder are real; recorded_files.py and recorded_sqlite.py report each change before it is made.
After `kill -9` a disk holds every change, the last one perhaps in part. After a power loss it certainly holds only what
was synchronised:

- a write is lost or kept in sectors of 512 bytes, in any order within a file and between files, until its fsync;
- entries of a folder (created, renamed, deleted) are kept in their order up to some point, until fsync of the folder.
  Fsync of a file does not keep its entry;
- data of which an fsync failed may be lost although a later fsync of the file succeeds;
- a `lost` fsync reports success and does nothing.

Faults are EIO and ENOSPC at a chosen change, for once or from then on.
"""

from __future__ import annotations

import errno
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

SECTOR_BYTES = 512
Kind = Literal[
    "create", "write", "truncate", "sync", "failed_sync", "lost_sync", "delete", "rename", "mkdir", "sync_folder",
]  # fmt: skip
WITH_SPACE = ("create", "write", "mkdir")
"""Changes that a full disk refuses."""


class Change(NamedTuple):
    """One change. `file`: number of the file, whatever its name is; `name`: path below the root of the disk."""

    kind: Kind
    file: int
    name: str
    offset: int = 0
    data: bytes = b""
    new_name: str = ""


@dataclass
class Fault:
    """An error at the `after`-th change from now; a persistent one also at all later ones that it concerns."""

    number: int
    after: int
    is_persistent: bool = False
    was_raised: bool = False


@dataclass
class Image:
    """What a disk holds: content by path below the root, and folders."""

    files: dict[str, bytes] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def write(self, root: Path) -> None:
        """Create these files in a new folder."""
        root.mkdir(parents=True)
        for name in sorted(self.folders):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)


class SimulatedDisk:
    """The files below `root`, which exist and are durable at the start."""

    def __init__(self, root: Path, *, lost_syncs: float = 0.0, rng: random.Random | None = None) -> None:
        """lost_syncs: share of fsync calls that do nothing."""
        self.root = root
        self.changes: list[Change] = []
        self.fault: Fault | None = None
        self._lost_syncs, self._rng = lost_syncs, rng or random.Random(0)
        self._folders = {self._name(path) for path in root.rglob("*") if path.is_dir()}
        self._contents: list[bytes] = []
        self._base: dict[str, int] = {}
        for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.name.endswith("-shm")):
            self._base[self._name(path)] = len(self._contents)
            self._contents.append(path.read_bytes())
        self._names = dict(self._base)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    # ------------------------------------------------------------ recording

    def file_of(self, name: str) -> int:
        """Number of the file that has this name now."""
        return self._names[name]

    def has(self, name: str) -> bool:
        """Whether a file has this name now."""
        return name in self._names

    def refused(self, kind: Kind) -> int:
        """The errno with which the next change fails; 0: it succeeds."""
        fault = self.fault
        if fault is None:
            return 0
        fault.after -= 1
        is_due = fault.after == 0 or (fault.after < 0 and (fault.is_persistent or not fault.was_raised))
        if not is_due or (fault.number == errno.ENOSPC and kind not in WITH_SPACE):
            return 0
        fault.was_raised = True
        return fault.number

    def create(self, name: str) -> int:
        """A new empty file; returns its number."""
        number = len(self._contents)
        self._contents.append(b"")
        self._names[name] = number
        self.changes.append(Change("create", number, name))
        return number

    def write(self, file: int, offset: int, data: bytes) -> None:
        """Bytes written at an offset."""
        self.changes.append(Change("write", file, "", offset, data))

    def truncate(self, file: int, size: int) -> None:
        """The size of a file is set."""
        self.changes.append(Change("truncate", file, "", size))

    def sync(self, file: int, *, has_failed: bool = False) -> None:
        """Fsync of a file."""
        kind: Kind = "failed_sync" if has_failed else "lost_sync" if self._loses() else "sync"
        self.changes.append(Change(kind, file, ""))

    def sync_folder(self, name: str) -> None:
        """Fsync of a folder; "." is the root."""
        self.changes.append(Change("lost_sync" if self._loses() else "sync_folder", -1, name))

    def delete(self, name: str) -> None:
        """A file's name is removed."""
        self.changes.append(Change("delete", self._names.pop(name), name))

    def rename(self, name: str, new_name: str) -> None:
        """A file gets another name, whose file is replaced."""
        self._names[new_name] = self._names.pop(name)
        self.changes.append(Change("rename", self._names[new_name], name, new_name=new_name))

    def make_folder(self, name: str) -> None:
        """A new folder."""
        self.changes.append(Change("mkdir", -1, name))

    def _loses(self) -> bool:
        return bool(self._lost_syncs) and self._rng.random() < self._lost_syncs

    # ------------------------------------------------------------ after a crash

    def after_kill(self, at: int, rng: random.Random) -> Image:
        """What it holds if the process is killed at change number `at`; a write at this moment may be made in part."""
        changes = self.changes[:at]
        if at < len(self.changes) and self.changes[at].kind == "write" and rng.random() < 0.5:
            torn = self.changes[at]
            changes.append(torn._replace(data=torn.data[: rng.randrange(len(torn.data) + 1)]))
        return self._image(changes, [change for change in changes if _names_of(change)], _all_kept)

    def after_power_loss(self, at: int, rng: random.Random) -> Image:
        """What it may hold if power is lost at change number `at`."""
        changes = self.changes[: at + 1]  # the one in progress may be on the disk
        return self._image(changes, list(_kept_entries(changes, rng)), lambda mine: _kept_data(mine, rng))

    def _image(
        self, changes: list[Change], entries: list[Change], keep: Callable[[list[Change]], Iterator[Change]]
    ) -> Image:
        names, folders = dict(self._base), set(self._folders)
        for change in entries:
            match change.kind:
                case "create":
                    names[change.name] = change.file
                case "delete":
                    names.pop(change.name, None)
                case "rename":
                    names.pop(change.name, None)
                    names[change.new_name] = change.file
                case "mkdir":
                    folders.add(change.name)
        by_file: defaultdict[int, list[Change]] = defaultdict(list)
        for change in changes:
            by_file[change.file].append(change)
        there = {name for name in folders if all(parent in folders for parent in _parents(name))}
        files = {
            name: _content(self._contents[file], keep(by_file[file]))
            for name, file in names.items()
            if all(parent in there for parent in _parents(name))
        }
        return Image(files, there)


def _names_of(change: Change) -> bool:
    return change.kind in ("create", "delete", "rename", "mkdir")


def _parents(name: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(name).parents if str(parent) != "."]


def _content(base: bytes, kept: Iterator[Change]) -> bytes:
    content = bytearray(base)
    for change in kept:
        if change.kind == "truncate":
            del content[change.offset :]
            content.extend(bytes(max(change.offset - len(content), 0)))
        else:
            content.extend(bytes(max(change.offset - len(content), 0)))
            content[change.offset : change.offset + len(change.data)] = change.data
    return bytes(content)


def _all_kept(changes: list[Change]) -> Iterator[Change]:
    return (change for change in changes if change.kind in ("write", "truncate"))


def _kept_entries(changes: list[Change], rng: random.Random) -> Iterator[Change]:
    """Entries of folders that are kept: of each folder all up to its last fsync, and some of those after it."""
    synced = {change.name: index for index, change in enumerate(changes) if change.kind == "sync_folder"}
    later: defaultdict[str, list[int]] = defaultdict(list)
    for index, change in enumerate(changes):
        if _names_of(change):
            folder = str(PurePosixPath(change.name).parent)
            if index > synced.get(folder, -1):
                later[folder].append(index)
    lost = set[int]()
    for indices in later.values():
        lost.update(indices[rng.choice([0, len(indices), rng.randint(0, len(indices))]) :])
    return (change for index, change in enumerate(changes) if _names_of(change) and index not in lost)


def _kept_data(changes: list[Change], rng: random.Random) -> Iterator[Change]:
    """Writes of one file that are kept: all that an fsync covered, and none, a part or all of the others."""
    is_sure: dict[int, bool] = {}
    waiting: list[int] = []
    for index, change in enumerate(changes):
        match change.kind:
            case "write" | "truncate":
                is_sure[index] = False
                waiting.append(index)
            case "sync":
                is_sure.update(dict.fromkeys(waiting, True))
                waiting.clear()
            case "failed_sync":
                waiting.clear()  # its data may never arrive, whatever later calls report
    unsure = [index for index, sure in is_sure.items() if not sure]
    how = rng.choice(["none", "all", "prefix", "sectors", "sectors"])
    num_kept = {"none": 0, "all": len(unsure)}.get(how, rng.randint(0, len(unsure)))
    whole = set(unsure[:num_kept])
    share = rng.choice([0.1, 0.5, 0.9])
    for index, sure in is_sure.items():
        change = changes[index]
        if sure or (how != "sectors" and index in whole):
            yield change
        elif how == "sectors" and change.kind == "truncate":
            if rng.random() < share:
                yield change
        elif how == "sectors":
            yield from (sector for sector in _sectors(change) if rng.random() < share)


def _sectors(change: Change) -> Iterator[Change]:
    start, end = change.offset, change.offset + len(change.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield change._replace(offset=start, data=change.data[start - change.offset : stop - change.offset])
        start = stop
