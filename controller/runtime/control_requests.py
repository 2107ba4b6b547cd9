"""What other processes ask a running controller for: drain a worker, add one, save a checkpoint.

Owns: the files of one request (question and answer), their bounds. Refuses: doing what is asked (worker_admin.py), the
command line (runs/crew.py).

A request is a small JSON file in <run>/requests, written whole and then named; the controller looks there at every
tick, takes it away, and answers in a file of the same name, at once or when it is done. A user who may write into the
run's folder may ask: no port, no key.
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
"""Requests taken at one look; more wait for the next."""


@dataclass(frozen=True)
class Request:
    """One wish. worker: whom it is about; for `drain` alone."""

    key: str
    wish: Wish
    worker: str = ""


class Requests:
    """The controller's side. `folder` is made when somebody asks; what an earlier session left there is void."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for path in self._waiting():
            self._remove(path)

    def take(self) -> list[Request]:
        """Requests since the last call; what is no request is answered as such."""
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
        """Answer the command that asked. Nobody may be there to read it; a full disk is no reason to end the run."""
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
    """Leave a request; returns its key. Raises UserError where the folder cannot be written."""
    key = f"{time.time_ns()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(exist_ok=True)
        _write(folder / f"{key}.json", {"wish": wish, "worker": worker})
    except OSError as error:
        raise UserError(
            f"cannot leave a request there ({error.strerror})", where=str(folder), remedy="ask the run's owner"
        ) from error
    return key


def answer_to(folder: Path, key: str) -> tuple[bool, str] | None:
    """Whether the request was granted, and the controller's words; None while there is no answer."""
    path = folder / f"{key}.answer"
    found = _read(path)
    if not found:
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    return bool(found.get("is_granted")), str(found.get("text", ""))


def is_taken(folder: Path, key: str) -> bool:
    """The controller has seen the request; its answer may take longer."""
    return not (folder / f"{key}.json").exists()


def withdraw(folder: Path, key: str) -> None:
    """Nobody waits for it any more."""
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
    """Whole or not at all: readers look for the final name only."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)
