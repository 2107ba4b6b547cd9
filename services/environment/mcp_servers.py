"""Tools of MCP servers (Model Context Protocol), over standard streams or streamable HTTP.

Owns: one connection to each server for a process, its tools as `Tool`s, connecting again after a loss. Refuses:
deadlines of calls (tools.py), checking arguments (the server does), running servers that have an address.

Connections belong to tasks of their own, which no episode's end or deadline cancels. A server that is started by its
command ends with the process that started it. The package `mcp` is optional.

The address of a server may hold a key, in its user, path or query: no text that leaves this module shows more of it
than scheme and host, and what the package logs is treated alike.
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
"""Of the list of a server's tools."""
_URL = re.compile(r"""([a-z][a-z0-9+.-]*://)(?:[^\s/?#'"<>]*@)?([^\s/?#'"<>]*)[^\s'"<>]*""", re.IGNORECASE)
_FORM = "{command: [python, server.py], env: {NAME: value}} or {url: http://127.0.0.1:8000/mcp}"


class McpFailed(OperationError):
    """A server cannot be reached, or a tool of its reported an error; the text is for the policy."""


class McpServer:
    """One server. `tools` connects first; all episodes of a process share it."""

    def __init__(self, name: str, spec: Mapping[str, Any], where: str) -> None:
        """
        Args:
            name: of the server, for messages.
            spec: `command` (a list) with `env`, or `url`.
            where: the setting.

        Raises:
            UserError: the package is missing, or `spec` has another form.
        """
        has_url = isinstance(spec, Mapping) and set(spec) == {"url"} and isinstance(spec["url"], str)
        if not has_url and not _is_command(spec):
            seen = f"keys {', '.join(map(str, spec))}" if isinstance(spec, Mapping) else type(spec).__name__
            raise UserError(f"no MCP server is described by {seen}", where=where, remedy=_FORM)  # values may be secrets
        if find_spec("mcp") is None:
            raise UserError("the package mcp is not installed", where=where, remedy="pip install 'areal-like[mcp]'")
        self._name, self._spec = name, spec
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Any, list[Tool]]] | None = None
        self._client: Any = None
        """Of the connection that is in use; None while there is none."""
        _hide_addresses_in_log()

    async def tools(self) -> list[Tool]:
        """What the server offers, as listed when it was connected to. Raises McpFailed."""
        return (await self._connected())[1]

    async def _connected(self) -> tuple[Any, list[Tool]]:
        """Client and tools. A caller that waits may be cancelled; the connection goes on."""
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
        except Exception as error:  # whatever a server, or the way to it, does
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
        """The text of a result. Raises McpFailed."""
        client, _ = await self._connected()
        errors = importlib.import_module("mcp")
        try:
            result = await client.call_tool(name, dict(arguments))
        except errors.MCPError as error:
            if error.code == importlib.import_module("mcp.types").CONNECTION_CLOSED:
                self._lose(client)
            raise McpFailed(without_addresses(str(error))) from None  # a traceback would show the address
        except Exception as error:  # as above; the next call connects again
            self._lose(client)
            raise McpFailed(f"MCP server {self._name} was lost ({_innermost(error)})") from None
        parts = [getattr(one, "text", f"[{one.type}]") for one in result.content]
        if result.is_error:
            raise McpFailed("\n".join(parts))
        return "\n".join(parts)

    def _lose(self, client: Any) -> None:
        """Give up the connection of this client; a newer one that has replaced it stays."""
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
    """The text with each URL cut to scheme and host."""
    return _URL.sub(r"\1\2/...", text)


class _WithoutAddresses(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_addresses(super().format(record))


def _hide_addresses_in_log() -> None:
    """Of the package `mcp`, which logs failed requests with their address and a traceback."""
    package = logging.getLogger("mcp")
    if not any(isinstance(one.formatter, _WithoutAddresses) for one in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(_WithoutAddresses())
        package.addHandler(handler)
        package.propagate = False
