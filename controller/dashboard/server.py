"""The dashboard's HTTP server: routes, event streams, one feed per page.

Content is in run_list.py and run_view.py, access and error responses in guarding.py, the command in command.py.

The server writes to no run folder. When a browser disconnects, its stream ends; with the last stream of a page its
computation ends.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from aiohttp import web

from controller.dashboard.access import HEADERS, TOKEN_HEADER, Access
from controller.dashboard.actions import Actions
from controller.dashboard.differences import differences
from controller.dashboard.feed import Feed, Viewer
from controller.dashboard.guarding import body_of, check_origin, guarded, html, static_file
from controller.dashboard.pages import shell
from controller.dashboard.run_list import RunList, find_run
from controller.dashboard.run_view import RunView
from controller.dashboard.sample_view import answers_content, groups_content
from controller.runs.sample_groups import GroupReader

_QUIET = logging.getLogger(f"{__name__}.http")
"""Log level of the HTTP server, which logs a traceback for a request that is not HTTP; the client gets status 400."""
_QUIET.setLevel(logging.CRITICAL)

HEARTBEAT_S = 15.0
"""Interval of comments in an idle stream, which detect disconnected browsers and keep the connection open."""
MAX_BODY_BYTES = 4096
MAX_VIEWERS = 200
SHUTDOWN_S = 2.0


@dataclass
class Dashboard:
    """The server of one folder of runs."""

    runs_dir: Path
    access: Access
    feeds: dict[str, Feed] = field(default_factory=dict)
    """Feeds by name of the run; the list of runs has the empty name."""
    actions: Actions = field(default_factory=Actions)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _group_reader: GroupReader | None = None

    @cached_property
    def application(self) -> web.Application:
        """Make the application with its routes."""
        made = web.Application(middlewares=[guarded(self.access, "dashboard")], client_max_size=MAX_BODY_BYTES)
        made.router.add_get("/", self._list_page)
        made.router.add_get("/run/{name}", self._run_page)
        made.router.add_get("/events", self._list_events)
        made.router.add_get("/run/{name}/events", self._run_events)
        made.router.add_get("/run/{name}/groups", self._groups)
        made.router.add_get("/run/{name}/groups/{group:[0-9]{1,15}}", self._answers)
        made.router.add_post("/run/{name}/actions/{action}", self._act)
        made.router.add_get("/differences", self._differences_page)
        made.router.add_get("/differences/rows", self._differences)
        made.router.add_get("/static/{name}", static_file)
        made.on_shutdown.append(self._shutdown)
        return made

    def runner(self) -> web.AppRunner:
        """Make the runner. A handler is cancelled when its browser disconnects."""
        return web.AppRunner(
            self.application, access_log=None, logger=_QUIET, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True
        )

    # -------------------------------------------------------- pages

    async def _list_page(self, _: web.Request) -> web.StreamResponse:
        return html(shell("list"))

    async def _run_page(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        find_run(self.runs_dir, name)
        return html(shell("run", name))

    async def _differences_page(self, _: web.Request) -> web.StreamResponse:
        return html(shell("differences"))

    async def _differences(self, request: web.Request) -> web.StreamResponse:
        return await self._looked_up(differences, self.runs_dir, request.query.getall("run", []))

    # -------------------------------------------------------- samples

    async def _groups(self, request: web.Request) -> web.StreamResponse:
        step = request.query.get("step", "")
        if step and not re.fullmatch(r"[0-9]{1,15}", step):
            raise web.HTTPBadRequest(text="the step is not a whole number")
        return await self._looked_up(groups_content, self._reader(request), int(step) if step else None)

    async def _answers(self, request: web.Request) -> web.StreamResponse:
        return await self._looked_up(answers_content, self._reader(request), int(request.match_info["group"]))

    def _reader(self, request: web.Request) -> GroupReader:
        folder = find_run(self.runs_dir, request.match_info["name"])
        if self._group_reader is None or self._group_reader.folder != folder:
            self._group_reader = GroupReader(folder)
        return self._group_reader

    async def _looked_up(self, look: Callable[..., dict[str, Any]], *arguments: Any) -> web.StreamResponse:
        """Run one query at a time for all viewers. Only for requests of a user, never repeated by a timer."""
        async with self._looking:
            return web.json_response(await asyncio.to_thread(look, *arguments))

    # -------------------------------------------------------- actions

    async def _act(self, request: web.Request) -> web.StreamResponse:
        check_origin(self.access, request)
        if not self.access.is_token(request.headers.get(TOKEN_HEADER)):
            raise web.HTTPForbidden(text="the token is wrong; use the token that `areal-like dashboard` printed")
        body = await body_of(request)
        folder = find_run(self.runs_dir, request.match_info["name"])
        worker = body.get("worker", "")
        if not isinstance(worker, str):
            raise web.HTTPBadRequest(text="worker must be the name of a rollout worker")
        return web.json_response(await self.actions.perform(folder, request.match_info["action"], worker))

    # -------------------------------------------------------- events

    async def _list_events(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, "", lambda: RunList(self.runs_dir))

    async def _run_events(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        folder = find_run(self.runs_dir, name)
        return await self._stream(request, name, lambda: RunView(folder))

    async def _stream(self, request: web.Request, name: str, make: Callable[[], Any]) -> web.StreamResponse:
        if sum(len(feed.viewers) for feed in self.feeds.values()) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(
                text=f"{MAX_VIEWERS} pages of the dashboard are open, which is the maximum; close some of these pages"
            )
        feed = self.feeds.setdefault(name, Feed(make))
        async with feed.watching() as viewer:
            answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8",
                                                 "Cache-Control": "no-store"})  # fmt: skip
            try:
                await answer.prepare(request)
                await _send(answer, viewer)
            except ConnectionError:  # the browser has disconnected; this response is not read
                pass
        return answer

    async def _shutdown(self, _: web.Application) -> None:
        for feed in self.feeds.values():
            await feed.close()
        await self.actions.close()


async def _send(answer: web.StreamResponse, viewer: Viewer) -> None:
    while True:
        try:
            part = await asyncio.wait_for(viewer.messages.get(), HEARTBEAT_S)
        except TimeoutError:
            part = b": still here\n\n"
        if part is None:
            return
        await answer.write(part)
