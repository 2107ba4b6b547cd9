"""The newest lines of a run's logs, all processes merged by time, up to a maximum.

Reading and ordering is in runs/logs.py.
"""

from __future__ import annotations

from collections import deque

from areal_like.errors import UserError
from controller.report.overview import text
from controller.run_folder.run_folder import RunFolder
from controller.runs.logs import LogFile, names, woven

MAX_LINES = 400
MAX_CHARS = 1000
Line = list[str]


class LogTail:
    """The logs of one run. Each file is read forward from its last lines."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._files: dict[str, LogFile] = {}
        self._recent: deque[Line] = deque(maxlen=MAX_LINES)

    def news(self) -> list[Line]:
        """Return the lines since the last call as [process, text], at most MAX_LINES; the first call returns the
        newest.
        """
        try:
            found = names(self._folder)
        except UserError:
            found = []
        sources = []
        for name in found:
            if name in self._files:
                file = self._files[name]
                sources.append((file, iter(file.news())))
            else:
                file = self._files[name] = LogFile(name, self._folder.logs / f"{name}.log")
                sources.append((file, iter(file.tail(MAX_LINES))))
        lines = [[text(name, 60), text(line, MAX_CHARS)] for name, line in woven(sources)][-MAX_LINES:]
        self._recent.extend(lines)
        return lines

    def recent(self) -> list[Line]:
        """Return the newest lines."""
        return list(self._recent)
