"""Checks of the folder of runs, the temporary folder, and the cache of models: space, file system, locks, SQLite's
write-ahead log, duration of a synchronous write.

All test files are in a temporary folder within the tested folder and are removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from controller.doctor.finding import Check, Finding, absent, ok, problem, size, warning
from controller.doctor.machine import Machine, Mount

TOPIC = "Disk"
QUICKSTART_BYTES = 200_000_000
"""Size of a run of the quickstart, including the warm start."""
GOOD_BYTES = 10_000_000_000
NETWORK_KINDS = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afpfs", "afs", "webdav", "ceph", "lustre", "gpfs",
    "beegfs", "glusterfs", "orangefs", "pvfs2", "panfs", "9p", "virtiofs", "wekafs", "juicefs", "sshfs",
})  # fmt: skip
MEMORY_KINDS = frozenset({"tmpfs", "ramfs"})
LOCAL = "store runs on a local disk, for example with runs_dir=/local/runs"
TRIALS = 5
SLOW_S = 0.05
SPEEDS = ((0.002, "fast"), (0.01, "ordinary"), (SLOW_S, "slow"), (float("inf"), "very slow"))
"""Upper limits in seconds of a small synchronous write: a disk with its own cache, a good SSD, other SSDs and cloud
volumes.
"""


def nearest_folder(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    path = path.expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def mount_of(machine: Machine, folder: Path) -> Mount:
    """The file system of a folder; of kind "" if unknown."""
    real = folder.resolve()
    over = [mount for mount in machine.mounts() if real.is_relative_to(mount.point)]
    return max(reversed(over), key=lambda mount: len(Path(mount.point).parts), default=Mount("/", ""))


def is_network(kind: str) -> bool:
    """Return whether it is a network file system (or a FUSE program, which has the same problems with locks and mapped
    files).
    """
    return kind in NETWORK_KINDS or kind.startswith("fuse.")


@contextmanager
def _scratch(machine: Machine) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".areal_like-doctor-", dir=nearest_folder(machine.runs_dir)) as folder:
        yield Path(folder)


def _not_written(error: OSError) -> Finding:
    """Finding of a check that needs a writable folder; the remedy is in the line `runs folder`."""
    return absent(f"cannot be tested: the runs folder is not writable ({error.strerror})")


def runs_folder(machine: Machine) -> Finding:
    """Check free space and write permission."""
    folder = nearest_folder(machine.runs_dir)
    where = f"{machine.runs_dir.expanduser().absolute()}"
    elsewhere = "start in a different folder, or set one with runs_dir=/path/to/folder"
    try:
        with _scratch(machine) as scratch:
            (scratch / "file").write_bytes(bytes(4096))
        free = machine.free_bytes(folder)
    except OSError as error:
        return problem(f"{where} is not writable ({error.strerror})", elsewhere)
    words = f"{where}: {size(free)} free"
    if free < QUICKSTART_BYTES:
        return problem(
            words, f"the quickstart writes {size(QUICKSTART_BYTES)}: free some space, or {elsewhere}", free_bytes=free
        )
    if free < GOOD_BYTES:
        return warning(
            words, f"checkpoints of larger models do not fit: free some space, or {elsewhere}", free_bytes=free
        )
    return ok(words, free_bytes=free)


def file_system(machine: Machine) -> Finding:
    """Check whether the file system is local, and whether SQLite's write-ahead log, which maps a file into memory,
    works on it.
    """
    mount = mount_of(machine, nearest_folder(machine.runs_dir))
    kind, data = mount.kind or "unknown kind", {"kind": mount.kind, "mount": mount.point}
    try:
        with _scratch(machine) as scratch:
            fault = wal_fault(scratch / "ledger.sqlite")
    except OSError as error:
        return _not_written(error)
    if fault:
        return problem(f"{kind}: SQLite's write-ahead log does not work on this file system ({fault})", LOCAL, **data)
    if is_network(mount.kind):
        words = f"{kind} at {mount.point}, a network file system, for which SQLite's write-ahead log is not designed"
        return warning(words, LOCAL, **data)
    if mount.kind in MEMORY_KINDS:
        return warning(
            f"{kind} at {mount.point}: runs in this folder occupy memory and are lost when the machine reboots",
            LOCAL,
            **data,
        )
    return ok(f"{kind} at {mount.point}, SQLite's write-ahead log works", **data)


def wal_fault(path: Path) -> str:
    """Error if SQLite's write-ahead log does not work in the folder; else empty."""
    try:
        with closing(sqlite3.connect(path, timeout=2.0)) as one, closing(sqlite3.connect(path, timeout=2.0)) as other:
            (mode,) = one.execute("PRAGMA journal_mode = WAL").fetchone()
            one.execute("CREATE TABLE t (x)")
            one.execute("INSERT INTO t VALUES (1)")
            one.commit()
            (found,) = other.execute("SELECT x FROM t").fetchone()
    except sqlite3.Error as error:
        return str(error)
    return "" if (mode, found) == ("wal", 1) else f"mode {mode}"


def locks(machine: Machine) -> Finding:
    """Check that a file lock excludes a second holder, which prevents two controllers in one run."""
    try:
        with _scratch(machine) as scratch:
            is_exclusive = locks_exclude(scratch / "lock")
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return problem(f"files cannot be locked ({error.strerror})", LOCAL)
        return _not_written(error)
    if not is_exclusive:
        return warning("file locks do not work in this folder, so two controllers could write to the same run", LOCAL)
    return ok("a second lock on the same file is rejected, as required")


def locks_exclude(path: Path) -> bool:
    """Return whether a held lock cannot be acquired again. Raises OSError if it cannot be acquired at all."""
    path.touch()
    with path.open("rb") as one, path.open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def forced_writes(machine: Machine) -> Finding:
    """Measure the duration of a small synchronous write."""
    try:
        with _scratch(machine) as scratch:
            median_s = statistics.median(sync_times(scratch / "file"))
    except OSError as error:
        return _not_written(error)
    speed = next(word for bound_s, word in SPEEDS if median_s <= bound_s)
    words = f"{speed}: {median_s * 1000:.1f} ms for 4 kB"
    if median_s > SLOW_S:
        advice = "the disk is busy, remote or rotating, which slows down checkpoints and the ledger"
        return warning(words, advice, median_s=median_s)
    return ok(words, median_s=median_s)


def sync_times(path: Path) -> list[float]:
    """Seconds of a few small synchronous writes."""
    walls_s = []
    with path.open("wb", buffering=0) as file:
        for _ in range(TRIALS):
            started_s = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            walls_s.append(time.perf_counter() - started_s)
    return walls_s


def temporary(machine: Machine) -> Finding:
    """Check the folder for temporary files; kernel compilers also execute files in it."""
    try:
        folder = Path(tempfile.gettempdir())
        free = machine.free_bytes(folder)
    except OSError as error:
        return problem(
            f"there is no usable temporary folder ({error.strerror or error})",
            "make /tmp writable, or set TMPDIR to a writable folder",
        )
    words = f"{folder}: {size(free)} free"
    if "noexec" in mount_of(machine, folder).options:
        return warning(
            f"{words}; files in this folder cannot be executed",
            "compiled kernels need a folder in which files can be executed: set TMPDIR to such a folder",
            free_bytes=free,
        )
    if free < 1_000_000_000:
        return warning(words, "free some space in this folder, or set TMPDIR to a different folder", free_bytes=free)
    return ok(words, free_bytes=free)


def model_cache(machine: Machine) -> Finding:
    """Check the cache of models and data sets from the hub; the quickstart downloads none."""
    environment = machine.environment
    default = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = Path(environment.get("HF_HOME") or default).expanduser()
    there = nearest_folder(folder)
    offline = (
        ", offline mode set by HF_HUB_OFFLINE" if environment.get("HF_HUB_OFFLINE") in ("1", "true", "True") else ""
    )
    if not os.access(there, os.W_OK):
        return absent(
            f"{folder} is not writable",
            "to use models from the hub, set HF_HOME to a writable folder with enough free space",
        )
    free = machine.free_bytes(there)
    words = f"{folder}: {size(free)} free{offline}"
    if free < 2 * GOOD_BYTES:
        return absent(
            words, "to use models from the hub, set HF_HOME to a folder with more free space", free_bytes=free
        )
    return ok(words, free_bytes=free)


CHECKS = (
    Check(TOPIC, "runs folder", runs_folder, is_needed=True),
    Check(TOPIC, "file system", file_system, is_needed=True),
    Check(TOPIC, "file locks", locks, is_needed=True),
    Check(TOPIC, "forced writes", forced_writes),
    Check(TOPIC, "temporary files", temporary, is_needed=True),
    Check(TOPIC, "model cache", model_cache),
)
