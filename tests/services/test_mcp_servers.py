"""Tools of real MCP servers; skipped where the package is not installed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from local_server import listening

from areal_like.environment import Step
from areal_like.errors import UserError
from areal_like.tool_call import ToolCall
from services.environment.mcp_servers import McpFailed, McpServer, without_addresses
from services.environment.tools import ToolEnvironment

SERVER = str(Path(__file__).parent / "support" / "mcp_server.py")
STDIO = {
    "sums": {
        "command": [sys.executable, SERVER, "stdio"],
        "env": {"WHOM": "you", "PYTHONPATH": os.pathsep.join(sys.path)},
    }
}
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="the `mcp` package is not installed")


def play(mcp: dict[str, Any], *turns: tuple[float, ToolCall]) -> tuple[Step, list[Step]]:
    """Turns of one call each, with its deadline in seconds."""

    async def whole() -> tuple[Step, list[Step]]:
        environment = ToolEnvironment(mcp=mcp)
        steps = []
        async with asyncio.timeout(300.0):
            first = await environment.reset({}, 1)
            for environment._call_timeout_s, call in turns:
                steps.append(await environment.step((call,)))
        return first, steps

    return asyncio.run(whole())


@pytest.fixture
def address() -> Iterator[str]:
    with listening(lambda port: [sys.executable, SERVER, "http", str(port)]) as port:
        yield f"http://127.0.0.1:{port}/mcp"


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
    assert late == "Error: the tool returned no result within 0.2 s"
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
    with pytest.raises(
        UserError, match=r"options.mcp.a: the description of the MCP server is invalid: .*command: \[python"
    ):
        ToolEnvironment(mcp={"a": spec})


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.environment.mcp_servers.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"where: the `mcp` package is not installed -> pip install 'areal-like\[mcp\]'"
    ):
        McpServer("a", {"url": "http://127.0.0.1:1"}, "where")


def test_wrong_description_of_a_server_shows_no_secrets() -> None:
    with pytest.raises(UserError, match="the description of the MCP server is invalid: keys command, env") as raised:
        McpServer("web", {"command": "server.py", "env": {"TOKEN": "s3cret"}}, "x")
    assert "s3cret" not in str(raised.value)


# ---------------------------------------------------------------- one connection replaced by another


class Client:
    """As `mcp.Client`. Calls of the tool `hang` end when `calls` says so; `calls` and `opened` are of the class."""

    calls: asyncio.Queue[asyncio.Future[Any]]
    opened: list[Client]
    refusal: Exception | None = None

    def __init__(self, target: Any) -> None:
        self.is_open = False

    async def __aenter__(self) -> Client:
        if Client.refusal is not None:
            raise ExceptionGroup("of the transport", [Client.refusal])
        Client.opened.append(self)
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def list_tools(self, cursor: str | None) -> Any:
        tool = types.SimpleNamespace(name="hang", description="", input_schema={"type": "object"})
        return types.SimpleNamespace(tools=[tool], next_cursor=None)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        end = asyncio.get_running_loop().create_future()
        Client.calls.put_nowait(end)
        return await end


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    Client.calls, Client.opened, Client.refusal = asyncio.Queue(), [], None
    mcp = types.SimpleNamespace(Client=Client, MCPError=NotImplementedError)
    monkeypatch.setitem(sys.modules, "mcp", mcp)
    monkeypatch.setitem(sys.modules, "mcp.types", types.SimpleNamespace(CONNECTION_CLOSED=-32000))
    monkeypatch.setattr("services.environment.mcp_servers.find_spec", lambda name: True)


ADDRESS = "https://me:p4ss@tools.example:8443/s3cret/mcp?key=k3y"


@pytest.mark.usefixtures("package")
def test_late_failure_of_a_lost_connection_leaves_the_newer_one() -> None:
    async def whole() -> None:
        server = McpServer("web", {"url": ADDRESS}, "x")
        (tool,) = await server.tools()
        first, late = (asyncio.create_task(tool.run({})) for _ in range(2))
        ends = [await Client.calls.get() for _ in range(2)]
        ends[0].set_exception(OSError("reset"))
        with pytest.raises(McpFailed, match="was lost"):
            await first
        await server.tools()
        assert [one.is_open for one in Client.opened] == [False, True]
        ends[1].set_exception(OSError("reset"))
        with pytest.raises(McpFailed, match="was lost"):
            await late
        await asyncio.sleep(0)
        assert [one.is_open for one in Client.opened] == [False, True]
        again = asyncio.create_task(tool.run({}))
        end = await Client.calls.get()
        end.set_result(types.SimpleNamespace(content=[types.SimpleNamespace(type="text", text="ok")], is_error=False))
        assert await again == "ok"
        assert len(Client.opened) == 2

    asyncio.run(whole())


@pytest.mark.usefixtures("package")
def test_no_failure_shows_the_key_in_an_address() -> None:
    async def failures() -> list[BaseException]:
        refused, working = McpServer("web", {"url": ADDRESS}, "x"), McpServer("web", {"url": ADDRESS}, "x")
        found: list[BaseException] = []
        (tool,) = await working.tools()
        for error in (OSError, NotImplementedError):
            call = asyncio.create_task(tool.run({}))
            end = await Client.calls.get()
            failure = error(f"401 for url '{ADDRESS}'")
            failure.code = 0  # type: ignore[attr-defined]
            end.set_exception(failure)
            found += (await asyncio.gather(call, return_exceptions=True))[:1]  # type: ignore[arg-type]
        Client.refusal = OSError(f"401 for url '{ADDRESS}'")
        found += (await asyncio.gather(refused.tools(), return_exceptions=True))[:1]  # type: ignore[arg-type]
        return found

    found = asyncio.run(failures())
    assert len(found) == 3
    for error in found:
        assert isinstance(error, McpFailed)
        shown = "".join(traceback.format_exception(error))
        assert "https://tools.example:8443/..." in shown
        assert not [secret for secret in ("p4ss", "s3cret", "k3y") if secret in shown]


@pytest.mark.usefixtures("package")
def test_log_of_the_package_shows_no_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("mcp"), "handlers", [])
    McpServer("web", {"url": ADDRESS}, "x")
    McpServer("other", {"url": ADDRESS}, "x")
    try:
        raise OSError(f"401 for url '{ADDRESS}'")
    except OSError:
        logging.getLogger("mcp.client.streamable_http").exception("Error in post_writer")
    said = capsys.readouterr().err
    assert said.count("Error in post_writer") == 1
    assert "https://tools.example:8443/..." in said
    assert not [secret for secret in ("p4ss", "s3cret", "k3y") if secret in said]


def test_address_is_cut_to_scheme_and_host_wherever_it_stands() -> None:
    text = "a (http://h/x) 'https://u:p@x/y@h2:1?k=v' wss://h3#f plain words"
    assert without_addresses(text) == "a (http://h/... 'https://x/...' wss://h3/... plain words"
