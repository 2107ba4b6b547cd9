"""Reports every change that Python code makes to files to a SimulatedDisk, and makes it fail as the disk says.

Replaces the functions of `os` that change files, and `open` for writing; calls for files elsewhere pass through. Fsync
only reports: the disk is simulated.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from simulated_disk import Kind, SimulatedDisk

PATCHED = ("open", "close", "write", "writev", "pwrite", "ftruncate", "fsync", "unlink", "mkdir", "rename", "replace")


class RecordedFiles:
    """While it is installed, files below the root of `disk` are recorded; None: none are."""

    def __init__(self) -> None:
        self.disk: SimulatedDisk | None = None
        self._real = {name: getattr(os, name) for name in PATCHED}
        self._real_open = io.open
        self._open_files: dict[int, int | str] = {}
        """By descriptor: number of a file, or name of a folder."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[RecordedFiles]:
        """Replace the functions."""
        with contextlib.ExitStack() as stack:
            for name in PATCHED:
                stack.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
            stack.enter_context(mock.patch.object(io, "open", self._open_stream))
            stack.enter_context(mock.patch.object(builtins, "open", self._open_stream))
            yield self

    def _name(self, path: Any) -> str | None:
        """The path below the disk's root; None for other files."""
        if self.disk is None or isinstance(path, int):
            return None
        full, root = os.path.abspath(os.fspath(path)), str(self.disk.root)
        if full == root:
            return "."
        return full.removeprefix(root + os.sep) if full.startswith(root + os.sep) else None

    def _refuse(self, kind: Kind, name: str | None = None) -> None:
        assert self.disk is not None
        if number := self.disk.refused(kind):
            raise OSError(number, os.strerror(number), *([name] if name else []))

    # ------------------------------------------------------------ functions of os

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real: Callable[..., int] = self._real["open"]
        name, disk = self._name(path), self.disk
        if name is None or disk is None or dir_fd is not None:
            return real(path, flags, mode, dir_fd=dir_fd)
        if is_new := bool(flags & os.O_CREAT) and not disk.has(name):
            self._refuse("create", str(path))
        descriptor = real(path, flags, mode)
        if os.path.isdir(path):
            self._open_files[descriptor] = name
            return descriptor
        file = disk.create(name) if is_new else disk.file_of(name) if disk.has(name) else None
        if file is not None:
            self._open_files[descriptor] = file
            if flags & os.O_TRUNC and not is_new:
                disk.truncate(file, 0)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._open_files.pop(descriptor, None)
        self._real["close"](descriptor)

    def _recorded(self, descriptor: int) -> int | None:
        file = self._open_files.get(descriptor)
        return file if self.disk is not None and isinstance(file, int) else None

    def _write(self, descriptor: int, data: Any) -> int:
        if (file := self._recorded(descriptor)) is None:
            return int(self._real["write"](descriptor, data))
        return self._put(descriptor, file, bytes(data), None)

    def _writev(self, descriptor: int, buffers: Sequence[Any]) -> int:
        if (file := self._recorded(descriptor)) is None:
            return int(self._real["writev"](descriptor, buffers))
        return self._put(descriptor, file, b"".join(buffers), None)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        if (file := self._recorded(descriptor)) is None:
            return int(self._real["pwrite"](descriptor, data, offset))
        return self._put(descriptor, file, bytes(data), offset)

    def _put(self, descriptor: int, file: int, data: bytes, offset: int | None) -> int:
        """Write; a write that is refused is made in part before, as a disk that becomes full does."""
        assert self.disk is not None
        number = self.disk.refused("write")
        data = data[: len(data) // 2] if number else data
        if offset is None:
            is_appending = bool(_flags_of(descriptor) & os.O_APPEND)
            place = os.fstat(descriptor).st_size if is_appending else os.lseek(descriptor, 0, os.SEEK_CUR)
        else:
            place = offset
        self.disk.write(file, place, data)
        written = (
            self._real["write"](descriptor, data) if offset is None else self._real["pwrite"](descriptor, data, offset)
        )
        assert written == len(data)
        if number:
            raise OSError(number, os.strerror(number))
        return len(data)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        if (file := self._recorded(descriptor)) is not None:
            assert self.disk is not None
            self._refuse("truncate")
            self.disk.truncate(file, size)
        self._real["ftruncate"](descriptor, size)

    def _fsync(self, descriptor: int) -> None:
        target = self._open_files.get(descriptor)
        if self.disk is None or target is None:
            self._real["fsync"](descriptor)
        elif isinstance(target, str):
            self._refuse("sync_folder")
            self.disk.sync_folder(target)
        else:
            number = self.disk.refused("sync")
            self.disk.sync(target, has_failed=bool(number))
            if number:
                raise OSError(number, os.strerror(number))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        name, disk = (self._name(path), self.disk) if dir_fd is None else (None, None)
        if name is not None and disk is not None and disk.has(name):
            self._refuse("delete", str(path))
            disk.delete(name)
        self._real["unlink"](path, dir_fd=dir_fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name, disk = (self._name(path), self.disk) if dir_fd is None else (None, None)
        is_new = name is not None and not os.path.exists(path)
        if is_new:
            self._refuse("mkdir", str(path))
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        if is_new and disk is not None and name is not None:
            disk.make_folder(name)

    def _rename(self, source: Any, target: Any) -> None:
        self._move("rename", source, target)

    def _replace(self, source: Any, target: Any) -> None:
        self._move("replace", source, target)

    def _move(self, how: str, source: Any, target: Any) -> None:
        name, new_name, disk = self._name(source), self._name(target), self.disk
        if name is not None and new_name is not None and disk is not None and disk.has(name):
            assert Path(name).parent == Path(new_name).parent, "moves between folders are not simulated"
            self._refuse("rename", str(source))
            disk.rename(name, new_name)
        self._real[how](source, target)

    # ------------------------------------------------------------ open()

    def _open_stream(self, file: Any, mode: str = "r", buffering: int = -1, *words: Any, **options: Any) -> Any:
        is_written = any(letter in mode for letter in "wax+")
        if not is_written or self._name(file) is None or options.get("opener") is not None:
            return self._real_open(file, mode, buffering, *words, **options)
        raw = _RecordedStream(self, file, mode.replace("b", "").replace("t", ""))
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        names = ("encoding", "errors", "newline")
        return io.TextIOWrapper(buffered, **{**dict(zip(names, words, strict=False)), **options})


class _RecordedStream(io.FileIO):
    """An open file whose writes are those of `os.write`."""

    def __init__(self, files: RecordedFiles, path: Any, mode: str) -> None:
        self._files = files
        super().__init__(path, mode, opener=lambda name, flags: os.open(name, flags, 0o666))

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._files._open_files.pop(self.fileno(), None)
        super().close()


def _flags_of(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)
