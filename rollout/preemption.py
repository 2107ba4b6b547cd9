"""Notices that the machine of a rollout worker will be taken away: a file that appears, or a cloud's metadata address.

The watch runs in the worker's process, because the notice concerns its machine. It only waits: what a worker does when
it leaves is in worker.py, and is the same as after SIGTERM.

A notice that is there at the first look is not acted on until it has disappeared: a worker that the run restarts on the
same machine, because no other is left, would otherwise leave again at once. A look that fails says nothing, in
neither direction. File and address are watched independently: one that never answers does not hide the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from areal_like import limits
from areal_like.settings import Settings

REQUEST_S = 2.0
"""Time limit of each operation of a request, and of reading its reply; metadata servers answer within milliseconds."""
MAX_REPLY_BYTES = 64 << 10
TOKEN_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
TTL_S = 300


class PreemptionSettings(Settings):
    """How a rollout worker learns that its machine will be taken away; it then drains, as after SIGTERM."""

    file: str | None = None
    """A file whose appearance is the notice, for example written by a job scheduler's hook."""
    url: str | None = None
    """A cloud's metadata address that is polled. The notice is a reply with status 200 that contains `match`."""
    headers: dict[str, str] = Field({})
    """Headers of the requests to `url`, for example {Metadata-Flavor: Google}."""
    match: str = ""
    """Text that the reply contains when there is a notice; empty: any reply with status 200 is one."""
    token_url: str | None = None
    """Address from which a token for `url` is requested first (EC2's IMDSv2)."""
    poll_s: float = Field(5.0, gt=0, le=limits.SECONDS)
    """Seconds between two looks."""

    @property
    def is_set(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self.file or self.url)

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        for key in ("url", "token_url"):
            if (url := getattr(self, key)) and not url.startswith(("http://", "https://")):
                raise ValueError(f"{key} must begin with http:// or https://")
        if not self.url and (self.headers or self.match or self.token_url):
            raise ValueError("headers, match and token_url belong to url, which is not set")
        return self


Look = Callable[[PreemptionSettings], Awaitable[str | None]]
"""Returns the notice as a sentence, empty if there is none, None if that is not known."""


async def look(settings: PreemptionSettings) -> str | None:
    """Look at the file, then at the address.

    It does so in a thread of its own, which is abandoned when this call is cancelled: the loop waits at its end for
    threads of its pool, and a name server or a file system may hang.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str | None] = loop.create_future()

    def answer(text: str | None) -> None:
        if not found.done():
            found.set_result(text)

    def work() -> None:
        text = _look(settings)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, text)

    threading.Thread(target=work, name="preemption", daemon=True).start()
    return await found


async def notice(
    settings: PreemptionSettings,
    on_ignored: Callable[[str], None],
    *,
    look: Look = look,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> str:
    """Wait for a notice and return it. Never returns if nothing is configured.

    on_ignored: called with the sentence if a notice is there from the start.
    """
    sources: list[dict[str, object]] = (
        [{"url": None, "token_url": None, "headers": {}, "match": ""}] if settings.file else []
    )
    sources += [{"file": None}] if settings.url else []
    watches = [
        asyncio.create_task(_notice_of(settings.model_copy(update=source), on_ignored, look, sleep))
        for source in sources
    ]
    try:
        while not watches:
            await sleep(settings.poll_s)
        done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for watch in watches:
            watch.cancel()


async def _notice_of(
    settings: PreemptionSettings,
    on_ignored: Callable[[str], None],
    look: Look,
    sleep: Callable[[float], Awaitable[None]],
) -> str:
    """Wait for a notice of one source."""
    has_been_absent = is_first = True
    while True:
        found = await look(settings)
        if found is not None and is_first:
            is_first, has_been_absent = False, not found
            if found:
                on_ignored(f"a preemption notice was there when the worker started, and is ignored: {found}")
        elif found and has_been_absent:
            return found
        elif found == "":
            has_been_absent = True
        await sleep(settings.poll_s)


def _look(settings: PreemptionSettings) -> str | None:
    try:
        if settings.file and Path(settings.file).expanduser().exists():
            return f"{settings.file} exists"
    except (OSError, ValueError, RuntimeError):  # a folder that may not be read, an unknown user
        return None
    return _look_at_url(settings) if settings.url else ""


def _look_at_url(settings: PreemptionSettings) -> str | None:
    """Ask the metadata server. It is on this machine's own network: no proxy is asked and no redirect followed."""
    assert settings.url is not None
    headers = dict(settings.headers)
    try:
        if settings.token_url:
            request = urllib.request.Request(settings.token_url, method="PUT", headers={TOKEN_TTL: str(TTL_S)})
            headers[TOKEN] = _reply(request)
        reply = _reply(urllib.request.Request(settings.url, headers=headers))
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else None  # EC2: there is no notice
    except (OSError, HTTPException, ValueError):
        return None
    return f"{settings.url} says {_first_line(reply)}" if settings.match in reply else ""


def _reply(request: urllib.request.Request) -> str:
    """The beginning of the reply. Raises TimeoutError if it takes too long in small pieces."""
    with _OPENER.open(request, timeout=REQUEST_S) as answer:
        due_s, content = time.monotonic() + REQUEST_S, b""
        while len(content) < MAX_REPLY_BYTES and (part := answer.read1(MAX_REPLY_BYTES - len(content))):
            content += part
            if time.monotonic() > due_s:
                raise TimeoutError(f"{request.full_url} did not answer within {REQUEST_S:g} s")
        return content.decode(errors="replace")


def _first_line(text: str) -> str:
    line = " ".join(text.split())
    return f"{line[:80]}..." if len(line) > 80 else line


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **facts: Any) -> None:
        """Turn a redirect into an HTTPError."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
