"""Tools of real MCP servers; skipped where the package is not installed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from services.environment.mcp_servers import McpFailed, McpServer
from services.environment.tools import ToolEnvironment

SERVER = str(Path(__file__).parent / "support" / "mcp_server.py")
STDIO = {
    "sums": {
        "command": [sys.executable, SERVER, "stdio"],
        "env": {"WHOM": "you", "PYTHONPATH": os.pathsep.join(sys.path)},
    }
}
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")


def play(mcp: dict[str, Any], *turns: tuple[float, ToolCall]) -> tuple[Step, list[Step]]:
    """Turns of one call each, with its deadline in seconds."""

    async def whole() -> tuple[Step, list[Step]]:
        environment = ToolEnvironment(mcp=mcp)
        steps = []
        async with asyncio.timeout(60):
            first = await environment.reset({}, 1)
            for environment._call_timeout_s, call in turns:
                steps.append(await environment.step((call,)))
        return first, steps

    return asyncio.run(whole())


@pytest.fixture
def address() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None:  # bounded by the test's own limit
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                continue
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        child.kill()
        child.wait()


@needs_mcp
@pytest.mark.processes
def test_tools_of_a_started_server_are_called_and_its_failures_are_words() -> None:
    first, steps = play(
        STDIO,
        (30, ToolCall("add", '{"x": 2, "y": 3}')),
        (30, ToolCall("add", '{"x": "a"}')),
        (30, ToolCall("fail", "{}")),
        (30, ToolCall("leave", "{}")),
        (30, ToolCall("add", '{"x": 2}')),
        (0.2, ToolCall("wait", "{}")),
    )
    (add, *_) = first.tools
    assert add["function"]["description"] == "Add two numbers."
    assert add["function"]["parameters"]["properties"]["x"]["type"] == "integer"
    added, refused, failed, lost, again, late = (step.results[0] for step in steps)
    assert added == "2 + 3 = 5 for you"
    assert refused.startswith("Error: add failed (McpFailed")
    assert failed.startswith("Error: fail failed (McpFailed")
    assert lost.startswith("Error: leave failed (McpFailed")
    assert again == "2 + 1 = 3 for you"  # the server was started again
    assert late == "Error: no result within 0.2 s"
    assert steps[-1].components["tool_calls"] == 6.0
    assert (steps[-1].components["tool_raised"], steps[-1].components["tool_timed_out"]) == (3.0, 1.0)


@needs_mcp
@pytest.mark.processes
def test_server_with_an_address_is_reached_over_http(address: str) -> None:
    _, (step,) = play({"sums": {"url": address}}, (30, ToolCall("add", '{"x": 2}')))
    assert step.results == ("2 + 1 = 3 for nobody",)


@needs_mcp
@pytest.mark.processes
def test_server_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(McpFailed, match="MCP server gone cannot be used"):
        play({"gone": {"command": [sys.executable, "-c", "pass"]}})


@pytest.mark.parametrize("spec", [{}, {"url": 3}, {"command": "python"}, {"command": []}, {"url": "x", "env": {}}, "x"])
def test_server_of_another_form_is_refused(spec: Any) -> None:
    with pytest.raises(UserError, match=r"options.mcp.a: no MCP server is described by .*command: \[python"):
        ToolEnvironment(mcp={"a": spec})


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.mcp_servers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"where: the package mcp is not installed -> pip install 'areal-like\[mcp\]'"):
        McpServer("a", {"url": "http://127.0.0.1:1"}, "where")


def test_wrong_description_of_a_server_shows_no_secrets() -> None:
    with pytest.raises(UserError, match="no MCP server is described by keys command, env") as raised:
        McpServer("web", {"command": "server.py", "env": {"TOKEN": "s3cret"}}, "x")
    assert "s3cret" not in str(raised.value)
