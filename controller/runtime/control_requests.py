"""Requests of other processes to a running controller: drain a worker, add one, save a checkpoint.

Reads and writes the files of a request and its answer. Requests are carried out in worker_admin.py; the commands are in
runs/crew.py.

A request is a small JSON file in <run>/requests, written completely and then renamed. The controller checks the folder
at every tick, removes the file, and answers in a file of the same name, immediately or when the request is done. Every
user who may write to the run's folder may send requests: there is no port and no key.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_like.errors import UserError

Wish = Literal["drain", "add", "checkpoint"]
WISHES: tuple[Wish, ...] = ("drain", "add", "checkpoint")
MAX_BYTES = 4096
MAX_AT_ONCE = 64
"""Requests taken at one tick; more wait for the next."""


@dataclass(frozen=True)
class Request:
    """One request. worker: the worker concerned; only for `drain`."""

    key: str
    wish: Wish
    worker: str = ""


class Requests:
    """The controller's side. `folder` is created by the first request; requests of an earlier session are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for path in self._waiting():
            self._remove(path)

    def take(self) -> list[Request]:
        """Return the requests since the last call; invalid ones are answered with an error."""
        taken = []
        for path in self._waiting()[:MAX_AT_ONCE]:
            found = _read(path)
            self._remove(path)
            wish, worker = found.get("wish"), found.get("worker", "")
            if wish in WISHES and isinstance(worker, str):
                taken.append(Request(path.stem, wish, worker))
            else:
                self.answer(path.stem, f"{wish!r} is not a known request", is_granted=False)
        return taken

    def answer(self, key: str, text: str, *, is_granted: bool) -> None:
        """Answer the command that sent the request. It may have exited; a full disk does not end the run."""
        with contextlib.suppress(OSError):
            _write(self._folder / f"{key}.answer", {"is_granted": is_granted, "text": text})

    def _waiting(self) -> list[Path]:
        try:
            return sorted(self._folder.glob("*.json"))
        except OSError:
            return []

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def ask(folder: Path, wish: Wish, worker: str = "") -> str:
    """Write a request; return its key. Raises UserError if the folder cannot be written."""
    key = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(exist_ok=True)
        _write(folder / f"{key}.json", {"wish": wish, "worker": worker})
    except OSError as error:
        raise UserError(
            f"the request cannot be written to this folder ({error.strerror})",
            where=str(folder),
            remedy="ask the owner of the run to run this command",
        ) from error
    return key


def answer_to(folder: Path, key: str) -> tuple[bool, str] | None:
    """Whether the request was granted, and the controller's message; None if there is no answer yet."""
    path = folder / f"{key}.answer"
    found = _read(path)
    if not found:
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    return bool(found.get("is_granted")), str(found.get("text", ""))


def is_taken(folder: Path, key: str) -> bool:
    """Return whether the controller has taken the request; its answer may take longer."""
    return not (folder / f"{key}.json").exists()


def withdraw(folder: Path, key: str) -> None:
    """Withdraw a request."""
    for suffix in ("json", "answer"):
        with contextlib.suppress(OSError):
            (folder / f"{key}.{suffix}").unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write atomically: readers only use the final name."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)
