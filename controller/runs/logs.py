"""`areal-like logs RUN`: prints the logs of one or all processes of a run, merged by time.

Lines are not changed, except that control characters that could affect a terminal are written as escapes.

A line without a time stamp (a traceback, output of a library) belongs to the stamped line before it and stays with it.
--follow polls every POLL_S and ends with the run.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from areal_like.encryption.texts import Texts
from areal_like.errors import UserError
from controller.run_folder.formatting import printable
from controller.run_folder.owner_host import whereabouts_if_known
from controller.run_folder.run_folder import RunFolder

POLL_S = 0.3
DEFAULT_TAIL = 100
BLOCK_BYTES = 1 << 16
MAX_TAIL_BYTES = 1 << 26
MAX_LINE_BYTES = 1 << 20
"""A longer line is split into several, so that a process that writes no newline cannot fill the memory."""
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3}")
_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass
class LogFile:
    """Log of one process, read forward from the end of its tail."""

    name: str
    path: Path
    position: int = 0
    stamp: str = ""
    """Time stamp of the last line that had one."""
    rest: bytes = b""
    """An incomplete line."""

    def tail(self, num_lines: int) -> list[tuple[str, str]]:
        """Return the last lines with their time stamps; later lines are returned by `news`."""
        try:
            with self.path.open("rb") as file:
                size = start = file.seek(0, os.SEEK_END)
                blocks, found = deque[bytes](), 0
                while start > 0 and found <= num_lines and size - start < MAX_TAIL_BYTES:
                    length = min(BLOCK_BYTES, start)
                    start -= length
                    file.seek(start)
                    block = file.read(length)
                    found += block.count(b"\n")
                    blocks.appendleft(block)
        except FileNotFoundError:
            return []
        self.position = size
        lines = list(self._lines(b"".join(blocks)))
        return lines[-num_lines:] if num_lines else []

    def news(self) -> list[tuple[str, str]]:
        """Return the lines written since the last call."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self.position:  # the file was truncated; read it from the start
                    self.position, self.rest = 0, b""
                file.seek(self.position)
                data = file.read(MAX_LINE_BYTES)
                self.position = file.tell()
        except FileNotFoundError:
            return []
        return list(self._lines(data))

    def last_words(self) -> list[tuple[str, str]]:
        """Return a last line that does not end in a newline."""
        rest, self.rest = self.rest, b""
        return list(self._lines(rest + b"\n")) if rest else []

    def _lines(self, data: bytes) -> Iterator[tuple[str, str]]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) >= MAX_LINE_BYTES:
            lines.append(self.rest)
            self.rest = b""
        texts = Texts.to_show(self.path) if any(b"sealed:" in line for line in lines) else Texts(None)
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            if match := _STAMP.match(text):
                self.stamp = match[0].replace(".", ",")
            for part in texts.opened_in("log", text).split("\n"):
                yield self.stamp, part


@dataclass
class Printer:
    """Prints lines, with the process before each line if there are several."""

    out: TextIO
    width: int = 0
    """Width of the names; 0 if there is only one process."""
    is_terminal: bool = False
    _numbers: dict[str, int] = field(default_factory=dict)

    def lines(self, name: str, lines: Iterable[str]) -> None:
        """Print lines of one process."""
        for line in lines:
            text = printable(line)
            self.out.write(f"{self._label(name)}{text}\n" if self.width else f"{text}\n")

    def _label(self, name: str) -> str:
        number = self._numbers.setdefault(name, len(self._numbers))
        label = f"{name:<{self.width}} | "
        return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m" if self.is_terminal else label


def logs(
    folder: RunFolder,
    *,
    processes: Sequence[str] = (),
    follow: bool = False,
    tail: int | None = DEFAULT_TAIL,
    out: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print logs; `tail` None means all of them. Returns the exit status. Raises UserError (no such process)."""
    out = out or sys.stdout
    files = choose(folder, processes)
    if not files and not follow:
        print(f"note: no process of {folder.name} has written a log yet", file=sys.stderr)
        return 0
    is_one = len(files) == 1 and (not follow or list(processes) == [files[0].name])
    printer = Printer(out, 0 if is_one else _width(files), out.isatty())
    if tail is None:
        _print_all(files, printer, is_last=not follow)
    else:
        _print_tail(files, printer, tail, is_last=not follow)
    out.flush()
    if not follow:
        return 0
    try:
        _follow(folder, processes, {file.name: file for file in files}, printer, sleep)
    except KeyboardInterrupt:  # the usual way to quit
        pass
    return 0


def names(folder: RunFolder) -> list[str]:
    """Processes that have a log or a spec."""
    try:
        found = [*folder.logs.glob("*.log"), *folder.processes.glob("*.json")]
        return sorted({path.stem for path in found})
    except OSError as error:
        raise UserError(
            f"the folder cannot be read ({error.strerror})",
            where=str(folder.logs),
            remedy="check the permissions of the folder",
        ) from error


def choose(folder: RunFolder, processes: Sequence[str]) -> list[LogFile]:
    """The logs of these processes; `rollout` selects all rollout workers. Raises UserError that lists the existing
    ones.
    """
    known = names(folder)
    chosen: dict[str, None] = {}
    for wanted in processes or known:
        found = [wanted] if wanted in known else [name for name in known if name.startswith(f"{wanted}-")]
        if not found:
            from controller.config.problems import nearest  # imports every setting

            near = nearest(wanted, known, count=1)
            hint = f"did you mean {near[0]}? " if near else ""
            remedy = f"{hint}processes with a log: {', '.join(known)}" if known else "no process has written a log yet"
            raise UserError(f"the run has no process `{wanted}`", where=f"--process {wanted}", remedy=remedy)
        chosen.update(dict.fromkeys(found))
    return [LogFile(name, folder.logs / f"{name}.log") for name in chosen]


def _width(files: Iterable[LogFile]) -> int:
    return max((len(file.name) for file in files), default=len("rollout-0"))


def _print_tail(files: Sequence[LogFile], printer: Printer, tail: int, *, is_last: bool) -> None:
    """Print the last lines of all processes together."""
    ends = [(file, iter(file.tail(tail) + (file.last_words() if is_last else []))) for file in files]
    for name, line in list(woven(ends))[-tail:] if tail else []:
        printer.lines(name, [line])


def _print_all(files: Sequence[LogFile], printer: Printer, *, is_last: bool) -> None:
    def whole(file: LogFile) -> Iterator[tuple[str, str]]:
        while lines := file.news():
            yield from lines
        if is_last:
            yield from file.last_words()

    for name, line in woven([(file, whole(file)) for file in files]):
        printer.lines(name, [line])


def woven(sources: Sequence[tuple[LogFile, Iterator[tuple[str, str]]]]) -> Iterator[tuple[str, str]]:
    """Names and lines in order of the stamps; each file keeps its own order, also where its clock went back."""

    def rising(number: int, file: LogFile, lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, int, str, str]]:
        latest = ""
        for stamp, line in lines:
            latest = max(latest, stamp)
            yield latest, number, file.name, line

    streams = [rising(number, file, lines) for number, (file, lines) in enumerate(sources)]
    for _, _, name, line in heapq.merge(*streams, key=lambda item: item[:2]):
        yield name, line


def _follow(
    folder: RunFolder,
    processes: Sequence[str],
    files: dict[str, LogFile],
    printer: Printer,
    sleep: Callable[[float], None],
) -> None:
    while True:
        # checked before reading, so that lines written before the end are still read
        where = whereabouts_if_known(folder)
        is_over = where.kind not in ("running", "foreign")
        _print_news(files, printer, is_last=is_over)
        if is_over:
            printer.out.flush()
            print(f"note: {folder.name}: {where.words}", file=sys.stderr)
            return
        sleep(POLL_S)
        for name in names(folder):  # a process that started late
            is_wanted = not processes or name in processes or any(name.startswith(f"{one}-") for one in processes)
            if is_wanted and name not in files:
                files[name] = LogFile(name, folder.logs / f"{name}.log")
                printer.width = max(printer.width, len(name)) if printer.width else 0


def _print_news(files: dict[str, LogFile], printer: Printer, *, is_last: bool) -> None:
    """Print new lines of all files, until there are no more."""
    while True:
        fresh = [(file, file.news()) for file in files.values()]
        if not any(lines for _, lines in fresh):
            break
        for name, line in woven([(file, iter(lines)) for file, lines in fresh]):
            printer.lines(name, [line])
    if is_last:
        for file in files.values():
            printer.lines(file.name, [line for _, line in file.last_words()])
    printer.out.flush()
