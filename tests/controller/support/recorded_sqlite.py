"""Reports every change that SQLite makes to its files to a SimulatedDisk, and makes it fail as the disk says.

Registers a copy of SQLite's own VFS as the default one. Of its methods only those that change files are replaced:
xOpen, xDelete, and of each file below the disk's root xWrite, xTruncate, xSync and xClose, which call the original
ones. xSync only reports: the disk is simulated. This needs the SQLite library that Python's `sqlite3` module uses, by
ctypes; `unavailable()` says why it is missing, as in a Python that is linked statically.

The first xSync of a new journal or log also synchronises its folder (`UNIXFILE_DIRSYNC` in SQLite's os_unix.c).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from simulated_disk import SimulatedDisk

FULL, CANNOT_OPEN, IO_WRITE, IO_FSYNC, IO_TRUNCATE, IO_DELETE = 13, 14, 778, 1034, 1546, 2570
"""SQLite's result codes: SQLITE_FULL, SQLITE_CANTOPEN, SQLITE_IOERR_WRITE, ..._FSYNC, ..._TRUNCATE, ..._DELETE."""
CREATE, JOURNALS = 0x4, 0x800 | 0x4000 | 0x80000
"""SQLITE_OPEN_CREATE; SQLITE_OPEN_MAIN_JOURNAL, ..._SUPER_JOURNAL, ..._WAL."""
NUM_METHODS = 19
"""Words of sqlite3_io_methods: the version and 18 methods. Version 2 ends before xFetch."""
CLOSE, WRITE, TRUNCATE, SYNC = 1, 3, 4, 5


class _Vfs(ctypes.Structure):
    """sqlite3_vfs, version 3 (https://sqlite.org/c3ref/vfs.html)."""

    _fields_ = (
        ("iVersion", c_int), ("szOsFile", c_int), ("mxPathname", c_int), ("pNext", c_void_p), ("zName", c_char_p),
        ("pAppData", c_void_p), ("xOpen", c_void_p), ("xDelete", c_void_p), ("rest", c_void_p * 13),
    )  # fmt: skip


_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_DELETE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_CLOSE = CFUNCTYPE(c_int, c_void_p)
_WRITE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)


def _library() -> ctypes.CDLL:
    """The SQLite library of Python's `sqlite3` module. Raises OSError or AttributeError if it cannot be reached."""
    import _sqlite3

    library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    library.sqlite3_libversion.restype = c_char_p
    if library.sqlite3_libversion().decode() != sqlite3.sqlite_version:
        raise OSError("another SQLite library is loaded than the one of the sqlite3 module")
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    library.sqlite3_vfs_register.argtypes = (c_void_p, c_int)
    library.sqlite3_vfs_unregister.argtypes = (c_void_p,)
    return library


def unavailable() -> str:
    """Why SQLite's files cannot be recorded here; empty if they can."""
    try:
        _library()
    except (OSError, AttributeError) as error:
        return f"the SQLite library of this Python cannot be called: {error}"
    return ""


class _OpenFile:
    """A file that SQLite has open: its number, its original methods, and whether its folder is not synchronised yet."""

    def __init__(self, file: int, folder: str, methods: Any, *, is_new_journal: bool) -> None:
        self.file, self.folder, self.is_new_journal = file, folder, is_new_journal
        self.close = _CLOSE(methods[CLOSE])
        self.write = _WRITE(methods[WRITE])
        self.truncate = _TRUNCATE(methods[TRUNCATE])


class RecordedSqlite:
    """While it is installed, SQLite's files below the root of `disk` are recorded; None: none are."""

    def __init__(self) -> None:
        self.disk: SimulatedDisk | None = None
        self.error: BaseException | None = None
        """An exception of this code, which SQLite sees as an I/O error."""
        self._library = _library()
        self._default = self._library.sqlite3_vfs_find(None)
        original = self._default.contents
        self._vfs = _Vfs.from_buffer_copy(original)
        self._vfs.pNext, self._vfs.zName = None, b"recorded"
        self._open, self._delete = _OPEN(original.xOpen), _DELETE(original.xDelete)
        self._files: dict[int, _OpenFile] = {}
        self._tables: dict[int, Any] = {}
        """Replaced methods by the address of the original ones."""
        self._callbacks = [
            _OPEN(self._guarded(self._on_open, CANNOT_OPEN)), _DELETE(self._guarded(self._on_delete, IO_DELETE)),
            _CLOSE(self._guarded(self._on_close, IO_WRITE)), _WRITE(self._guarded(self._on_write, IO_WRITE)),
            _TRUNCATE(self._guarded(self._on_truncate, IO_TRUNCATE)), _SYNC(self._guarded(self._on_sync, IO_FSYNC)),
        ]  # fmt: skip
        addresses = [ctypes.cast(callback, c_void_p).value for callback in self._callbacks]
        self._vfs.xOpen, self._vfs.xDelete = addresses[:2]
        self._replaced = dict(zip((CLOSE, WRITE, TRUNCATE, SYNC), addresses[2:], strict=True))

    @contextlib.contextmanager
    def installed(self) -> Iterator[RecordedSqlite]:
        """Make it the default VFS. Connections of the body must be closed at its end."""
        self._library.sqlite3_vfs_register(ctypes.addressof(self._vfs), 1)
        try:
            yield self
        finally:
            self._library.sqlite3_vfs_unregister(ctypes.addressof(self._vfs))
            self._library.sqlite3_vfs_register(self._default, 1)

    def _guarded(self, method: Callable[..., int], code: int) -> Callable[..., int]:
        def called(*words: Any) -> int:
            try:
                return method(*words)
            except BaseException as error:  # an exception cannot pass through SQLite
                self.error = error
                return code

        return called

    def _name(self, pointer: int | None) -> str | None:
        """The path below the disk's root; None for other files."""
        if self.disk is None or not pointer:
            return None
        path = os.fsdecode(ctypes.string_at(pointer))
        root = str(self.disk.root) + os.sep
        return path.removeprefix(root) if path.startswith(root) else None

    # ------------------------------------------------------------ methods of the VFS and of files

    def _on_open(self, vfs: int, pointer: int | None, file: int, flags: int, out: Any) -> int:
        name, disk = self._name(pointer), self.disk
        if name is None or disk is None:
            return int(self._open(vfs, pointer, file, flags, out))
        is_new = bool(flags & CREATE) and not disk.has(name)
        if is_new and disk.refused("create"):
            return CANNOT_OPEN
        if code := int(self._open(vfs, pointer, file, flags, out)):
            return code
        number = disk.create(name) if is_new else disk.file_of(name)
        methods = c_void_p.from_address(file)
        original = (c_void_p * NUM_METHODS).from_address(methods.value or 0)
        if methods.value not in self._tables:
            table = (c_void_p * NUM_METHODS)(*original)
            c_int.from_buffer(table).value = 2
            for index, address in self._replaced.items():
                table[index] = address
            self._tables[methods.value or 0] = table
        self._files[file] = _OpenFile(
            number, str(Path(name).parent), original, is_new_journal=bool(flags & CREATE and flags & JOURNALS)
        )
        methods.value = ctypes.addressof(self._tables[methods.value or 0])
        return 0

    def _on_delete(self, vfs: int, pointer: int | None, is_folder_synced: int) -> int:
        name, disk = self._name(pointer), self.disk
        if name is not None and disk is not None and disk.has(name):
            if disk.refused("delete"):
                return IO_DELETE
            disk.delete(name)
            if is_folder_synced:
                disk.sync_folder(str(Path(name).parent))
        return int(self._delete(vfs, pointer, is_folder_synced))

    def _on_close(self, file: int) -> int:
        return int(self._files.pop(file).close(file))

    def _on_write(self, file: int, data: int, size: int, offset: int) -> int:
        known, disk = self._files[file], self.disk
        if disk is not None:
            number = disk.refused("write")
            size = size // 2 if number else size
            disk.write(known.file, offset, ctypes.string_at(data, size))
            if number:
                known.write(file, data, size, offset)
                return FULL if number == errno.ENOSPC else IO_WRITE
        return int(known.write(file, data, size, offset))

    def _on_truncate(self, file: int, size: int) -> int:
        known, disk = self._files[file], self.disk
        if disk is not None:
            if disk.refused("truncate"):
                return IO_TRUNCATE
            disk.truncate(known.file, size)
        return int(known.truncate(file, size))

    def _on_sync(self, file: int, _flags: int) -> int:
        known, disk = self._files[file], self.disk
        if disk is not None:
            number = disk.refused("sync")
            disk.sync(known.file, has_failed=bool(number))
            if number:
                return IO_FSYNC
            if known.is_new_journal:
                disk.sync_folder(known.folder)
                known.is_new_journal = False
        return 0
