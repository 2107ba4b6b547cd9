"""An MCP server with three tools: `python mcp_server.py stdio`, or `http PORT`."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(x: int, y: int = 1) -> str:
    """Add two numbers."""
    return f"{x} + {y} = {x + y} for {os.environ.get('WHOM', 'nobody')}"


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no archive here")


@server.tool()
def wait() -> str:
    """Takes too long."""
    time.sleep(30)
    return "late"


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
