"""Tools of MCP servers (Model Context Protocol), over standard streams or streamable HTTP.

A process has one connection to each server, which is made again after a loss. Deadlines of calls are in tools.py; the
server checks arguments.

Connections are held by separate tasks, which are not cancelled by an episode's end or deadline. A server that is
started by a command exits with the process that started it. The package `mcp` is optional.

The address of a server may contain a key, in its user, path or query. Texts that leave this module, and log records of
the package, contain only its scheme and host.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from areal_like.errors import OperationError, UserError
from areal_like.tools import Tool

MAX_PAGES = 100
"""Time limit for the list of a server's tools."""
_URL = re.compile(r"""([a-z][a-z0-9+.-]*://)(?:[^\s/?#'"<>]*@)?([^\s/?#'"<>]*)[^\s'"<>]*""", re.IGNORECASE)
_FORM = "{command: [python, server.py], env: {NAME: value}} or {url: http://127.0.0.1:8000/mcp}"


class McpFailed(OperationError):
    """A server cannot be reached, or one of its tools reported an error. The message is for the policy."""


class McpServer:
    """One server. `tools` connects first; all episodes of a process share it."""

    def __init__(self, name: str, spec: Mapping[str, Any], where: str) -> None:
        """Args:
            name: name of the server, for messages.
            spec: `command` (a list) with `env`, or `url`.
            where: the setting.

        Raises:
            UserError: the package is missing, or `spec` has another form.
        """
        has_url = isinstance(spec, Mapping) and set(spec) == {"url"} and isinstance(spec["url"], str)
        if not has_url and not _is_command(spec):
            seen = f"keys {', '.join(map(str, spec))}" if isinstance(spec, Mapping) else type(spec).__name__
            what = f"the description of the MCP server is invalid: {seen}"  # without values, which may be secrets
            raise UserError(what, where=where, remedy=_FORM)
        if find_spec("mcp") is None:
            raise UserError("the `mcp` package is not installed", where=where, remedy="pip install 'areal-like[mcp]'")
        self._name, self._spec = name, spec
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Any, list[Tool]]] | None = None
        self._client: Any = None
        """The client of the current connection; None while there is none."""
        _hide_addresses_in_log()

    async def tools(self) -> list[Tool]:
        """The server's tools, as listed when the connection was made. Raises McpFailed."""
        return (await self._connected())[1]

    async def _connected(self) -> tuple[Any, list[Tool]]:
        """Client and tools. A waiting caller may be cancelled without ending the connection."""
        if self._holder is None or self._holder.done():
            self._client = None
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready), name=f"MCP server {self._name}")
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[tuple[Any, list[Tool]]]) -> None:
        """Keep the connection until cancelled."""
        mcp = importlib.import_module("mcp")
        target = self._spec.get("url")
        if target is None:
            command, *arguments = self._spec["command"]
            target = mcp.StdioServerParameters(command=command, args=arguments, env=self._spec.get("env"))
        try:
            async with mcp.Client(target) as client:
                tools = await self._listed(client)
                self._client = client
                ready.set_result((client, tools))
                await asyncio.Event().wait()
        except Exception as error:  # a server, or the connection to it, may fail in any way
            if not ready.done():
                ready.set_exception(McpFailed(f"MCP server {self._name} cannot be used ({_innermost(error)})"))
        finally:
            ready.cancel()

    async def _listed(self, client: Any) -> list[Tool]:
        found, cursor = [], None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += [
                Tool(one.name, one.description or "", one.input_schema, partial(self._call, one.name))
                for one in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; returns the text of its result. Raises McpFailed."""
        client, _ = await self._connected()
        errors = importlib.import_module("mcp")
        try:
            result = await client.call_tool(name, dict(arguments))
        except errors.MCPError as error:
            if error.code == importlib.import_module("mcp.types").CONNECTION_CLOSED:
                self._lose(client)
            raise McpFailed(without_addresses(str(error))) from None  # a traceback would contain the address
        except Exception as error:  # as above; the next call connects again
            self._lose(client)
            raise McpFailed(f"the connection to MCP server {self._name} was lost ({_innermost(error)})") from None
        parts = [getattr(one, "text", f"[{one.type}]") for one in result.content]
        if result.is_error:
            raise McpFailed("\n".join(parts))
        return "\n".join(parts)

    def _lose(self, client: Any) -> None:
        """Drop the connection of this client, unless a newer one has replaced it."""
        if self._holder is not None and self._client is client:
            self._holder.cancel()
            self._holder = self._client = None


def _is_command(spec: Any) -> bool:
    if not isinstance(spec, Mapping) or not {"command"} <= set(spec) <= {"command", "env"}:
        return False
    command, env = spec["command"], spec.get("env", {})
    has_texts = isinstance(env, Mapping) and all(isinstance(one, str) for one in env.values())
    return has_texts and isinstance(command, list) and bool(command) and all(isinstance(one, str) for one in command)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return without_addresses(f"{type(error).__name__}: {error}")


def without_addresses(text: str) -> str:
    """The text with each URL shortened to scheme and host."""
    return _URL.sub(r"\1\2/...", text)


class _WithoutAddresses(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_addresses(super().format(record))


def _hide_addresses_in_log() -> None:
    """Hide addresses in log records of the package `mcp`, which logs failed requests with address and traceback."""
    package = logging.getLogger("mcp")
    if not any(isinstance(one.formatter, _WithoutAddresses) for one in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(_WithoutAddresses())
        package.addHandler(handler)
        package.propagate = False
