"""`areal-like data review`: a local page on which likely wrong labels are accepted, rejected or removed.

Each decision is written to the review file at once. The set with the new labels is written by
controller/runs/labels/relabel.py, to a new folder. Access rules are in access.py: this page always needs its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_like.durable import flush_to_disk
from areal_like.errors import UserError
from areal_like.plain_text import printable
from controller.dashboard.access import Access, is_loopback
from controller.dashboard.actions import Busy
from controller.dashboard.command import listen, say
from controller.dashboard.guarding import body_of, check_origin, guarded, html, static_file
from controller.dashboard.pages import STATIC, asset, shell
from controller.preflight.dataset.reading import find_sources
from controller.runs.labels.relabel import DECISIONS, read_review, relabel

COMMAND = "data review"
MAX_BODY_BYTES = 4096
MAX_CHARS = 20_000
"""Characters of a prompt or an answer that are shown."""
_SHOWN = ("where", "key", "prompt", "label", "answer", "num_answers", "num_agree", "num_label", "versions", "decision")


class ReviewFile:
    """The lines of a review, and their decisions on disk."""

    def __init__(self, path: Path) -> None:
        """Raises UserError: the file cannot be read, or is no review."""
        read_review(path)
        self.path = path
        self._stamp = _stamp(path)
        with path.open(encoding="utf-8") as lines:  # splitlines() would also split at signs within a text
            self._lines = [line.rstrip("\n") for line in lines]
        self._entries: dict[int, dict[str, Any]] = {
            number: json.loads(line) for number, line in enumerate(self._lines) if line.strip()
        }

    def rows(self) -> list[dict[str, Any]]:
        """The entries, with `number`: of the line, from 0."""
        return [
            {"number": number, **{name: _shown(entry.get(name)) for name in _SHOWN}}
            for number, entry in self._entries.items()
        ]

    def decide(self, number: int, decision: str | None) -> None:
        """Write a decision to the file. Raises UserError: no such line, no such decision, or the file was changed by
        another program; OSError.
        """
        if number not in self._entries:
            raise UserError(f"there is no line {number + 1}", where=str(self.path), remedy="load the page again")
        if decision not in (None, *DECISIONS):
            raise UserError(f"{decision!r} is not a valid decision", remedy=f"use one of {', '.join(DECISIONS)}")
        if _stamp(self.path) != self._stamp:
            raise Busy(
                "the file was changed by another program",
                where=str(self.path),
                remedy="end the command with Ctrl-C, and start it again",
            )
        entry = {**self._entries[number], "decision": decision}
        lines = [json.dumps(entry) if place == number else line for place, line in enumerate(self._lines)]
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        shutil.copymode(self.path, fresh)
        flush_to_disk(fresh)
        fresh.replace(self.path)
        flush_to_disk(self.path.parent)
        self._lines, self._entries[number], self._stamp = lines, entry, _stamp(self.path)

    def counts(self) -> Counter[str]:
        """Lines by decision; `undecided` for those without one."""
        return Counter(str(entry.get("decision") or "undecided") for entry in self._entries.values())


@dataclass(frozen=True)
class Target:
    """The set that a review becomes."""

    files: Sequence[str]
    folder: Path
    columns: Mapping[str, str | None] = field(default_factory=dict)
    id_column: str = "id"


@dataclass
class ReviewPage:
    """The server of one review."""

    review: ReviewFile
    access: Access
    target: Target | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def application(self) -> web.Application:
        """Make the application with its routes."""
        made = web.Application(middlewares=[guarded(self.access, COMMAND)], client_max_size=MAX_BODY_BYTES)
        made.router.add_get("/", self._page)
        made.router.add_get("/rows", self._rows)
        made.router.add_post("/decisions", self._decide)
        made.router.add_post("/set", self._write)
        made.router.add_get("/static/{name}", static_file)
        return made

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return html(shell("review", self.review.path.name))

    async def _rows(self, _: web.Request) -> web.StreamResponse:
        folder = None if self.target is None else str(self.target.folder)
        return web.json_response({"rows": self.review.rows(), "counts": self.review.counts(), "folder": folder})

    async def _decide(self, request: web.Request) -> web.StreamResponse:
        check_origin(self.access, request)
        body = await body_of(request)
        number, decision = body.get("number"), body.get("decision")
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(decision, str | None):
            raise web.HTTPBadRequest(text="the request must contain a line number and a decision")
        async with self._writing:
            await asyncio.to_thread(self.review.decide, number, decision)
        return web.json_response({"counts": self.review.counts()})

    async def _write(self, request: web.Request) -> web.StreamResponse:
        check_origin(self.access, request)
        await body_of(request)
        if self.target is None:
            raise web.HTTPConflict(
                text="start the command with the data files and -o FOLDER to write the corrected data set here"
            )
        async with self._writing:
            done = await asyncio.to_thread(
                relabel, self.target.files, self.review.path, self.target.folder, columns=self.target.columns,
                id_column=self.target.id_column, accepts_all=False,
            )  # fmt: skip
        words = f"{done.num_rows:,} rows, {len(done.changes):,} with a new label; written to {self.target.folder}"
        return web.json_response({"words": words})


def review_command(
    path: str, *, host: str, port: int, token: str | None, target: Target | None, announce: Callable[[str], None] = say
) -> int:
    """Serve the page until SIGINT or SIGTERM; return the exit status, 0. Raises UserError."""
    if target is not None and target.folder.exists():
        raise UserError("the folder already exists", where=str(target.folder), remedy="choose a different folder")
    if target is not None:
        find_sources(target.files)
    access = replace(Access.of(host, token), reads_need_token=True)
    made = ReviewPage(ReviewFile(Path(path).expanduser()), access, target)
    for name in STATIC:
        asset(name)
    asyncio.run(_serve(made, port, announce))
    counts = made.review.counts()
    announce(", ".join(f"{counts[name]:,} {name}" for name in (*DECISIONS, "undecided") if counts[name]))
    return 0


async def _serve(made: ReviewPage, port: int, announce: Callable[[str], None]) -> None:
    runner = web.AppRunner(made.application, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await listen(runner, made.access.host, port)
        place = f"[{made.access.host}]" if ":" in made.access.host else made.access.host
        announce(f"review of {made.review.path}: http://{place}:{runner.addresses[0][1]}/?token={made.access.token}")
        if not is_loopback(made.access.host):
            announce("note: the connection is plain HTTP; on an untrusted network, use ssh -L and a loopback address")
        announce("press Ctrl-C to end the review; every decision is saved at once")
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                loop.add_signal_handler(number, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()


def _stamp(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size


def _shown(value: Any) -> Any:
    return printable(value[:MAX_CHARS]) if isinstance(value, str) else value
