"""What the servers of pages share: access to every request, one sentence for every error, static files.

The rules of access are in access.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from areal_like.errors import UserError, first_line
from controller.dashboard.access import COOKIE, HEADERS, TOKEN_HEADER, Access
from controller.dashboard.actions import Busy
from controller.dashboard.pages import STATIC, asset, refusal_page

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarded(access: Access, command: str) -> Middleware:
    """Make the middleware that checks every request and turns errors into responses.

    command: that printed the address, such as `dashboard`. Cookies of a host are sent to all of its ports, so each
    command has one of its own.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check(access, request, command)
            answer = await handler(request)
        except web.HTTPException as error:
            if error.status in (302, 303):
                error.headers.update(HEADERS)
                raise
            answer = _refusal(request, error.status, error.text or error.reason)
        except UserError as error:
            answer = _refusal(request, 409 if isinstance(error, Busy) else 404, str(error))
        except OSError as error:
            answer = _refusal(request, 500, f"a file cannot be read ({error.strerror or error})")
        except Exception as error:  # fault boundary: every request gets a response
            log.exception("%s %s", request.method, request.path)
            answer = _refusal(request, 500, f"the request failed ({first_line(error)})")
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    return guard


def _check(access: Access, request: web.Request, command: str) -> None:
    if not access.knows_host(request.headers.get("Host")):
        raise web.HTTPMisdirectedRequest(
            text="the host name in this request does not belong to this server; use the address that "
            f"`areal-like {command}` printed"
        )
    if not access.reads_need_token:
        return
    is_page = request.method == "GET" and request.match_info.http_exception is None
    if is_page and access.is_token(request.query.get("token")):
        # Removed from the URL, so that it is in no history and no log; from here on it is sent as a cookie.
        found = web.HTTPSeeOther(request.rel_url.raw_path)
        found.set_cookie(_cookie(command), access.token, httponly=True, samesite="Strict", path="/")
        raise found
    given = [request.headers.get(TOKEN_HEADER), request.cookies.get(_cookie(command))]
    if not any(map(access.is_token, given)):
        wrong = "the token is wrong" if any(given) or "token" in request.query else "this address needs a token"
        raise web.HTTPUnauthorized(text=f"{wrong}; open the address that `areal-like {command}` printed")


def _cookie(command: str) -> str:
    return COOKIE if command == "dashboard" else f"{COOKIE}_{command.replace(' ', '_')}"


def check_origin(access: Access, request: web.Request) -> None:
    """Refuse a request that a page of another site sent."""
    if not access.is_same_origin(request.headers):
        raise web.HTTPForbidden(
            text="the request was refused, because it comes from a different origin than this server"
        )


async def body_of(request: web.Request) -> dict[str, Any]:
    """Parse the JSON object of the request. A form of another site cannot send this content type."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send JSON")
    try:
        found = await request.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise web.HTTPBadRequest(text="the request is not a JSON object")
    return found


async def static_file(request: web.Request) -> web.StreamResponse:
    """Handle a request for a script or a style sheet."""
    name = request.match_info["name"]
    if name not in STATIC:
        raise web.HTTPNotFound(text="there is no such file")
    body, tag = await asyncio.to_thread(asset, name)
    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, content_type=STATIC[name], charset="utf-8", headers=headers)


def html(page: str) -> web.Response:
    """A page as a response."""
    return web.Response(text=page, content_type="text/html")


def _refusal(request: web.Request, status: int, words: str) -> web.Response:
    """One sentence: as a page for a browser, else as JSON."""
    if request.method == "GET" and "text/html" in request.headers.get("Accept", ""):
        return web.Response(status=status, text=refusal_page(words), content_type="text/html")
    return web.json_response({"error": words}, status=status)
