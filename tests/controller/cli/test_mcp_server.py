"""`areal-like mcp`: its tools answer as the commands do, mistakes are results, and nothing of a run changes.

The server is called through the package's own client, once over stdio.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from made_run import write_run

from controller.cli.main import main

mcp = pytest.importorskip("mcp", reason="the `mcp` package is not installed")
REPOSITORY = Path(__file__).resolve().parents[3]
TOOLS = {"list_runs", "status", "why", "samples", "report_summary", "validate", "probe", "simulate"}
JOB = """\
name: job
model: {init: {model_type: qwen3, max_position_embeddings: 4096}, tokenizer: bytes}
data: {train: {generator: running_sum}}
"""
Call = Callable[..., Coroutine[Any, Any, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and a config, which is the current one."""
    write_run(tmp_path / "runs" / "made")
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_client(use: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Run `use(client)` on a server in this process."""
    from controller.cli.mcp_server import make_server

    async def connected() -> None:
        async with mcp.Client(make_server()) as client:
            await use(client)

    asyncio.run(connected())


def contents(folder: Path) -> dict[str, bytes]:
    names = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {str(path): path.read_bytes() for path in names}


def test_tools_about_runs_answer_with_text_and_data_and_change_nothing(here: Path) -> None:
    before = contents(here)

    async def use(client: Any) -> None:
        async def ask(tool: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result.content
            return result.content[0].text, result.structured_content

        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        text, data = await ask("list_runs")
        assert "made" in text
        assert [row["kind"] for row in data["runs"] if row["run"] == "made"] == ["finished"]
        assert not [row for row in (await ask("list_runs", include_ended=False))[1]["runs"] if row["run"] == "made"]
        text, data = await ask("status", run="made")
        assert "finished" in text
        assert (data["kind"], "findings" in data) == ("finished", False)
        text, data = await ask("why", run="made")
        assert data["findings"][0]["title"][:20] in text
        text, data = await ask("samples", run="made", order="worst", limit=2)
        assert len(data["samples"]) == 2
        assert "worst first" in text
        text, data = await ask("report_summary", run="runs/made")
        assert data["summary"]["audit"] == "clean"
        assert data["page"] is None
        assert data["figures"][0]["label"] in text

    with_client(use)
    assert contents(here) == before


def test_tools_about_configs_answer_as_their_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def use(client: Any) -> None:
        result = await client.call_tool("validate", {"config": "job.yaml", "overrides": ["num_steps=7"]})
        assert "num_steps: 7" in result.content[0].text
        assert result.structured_content["source"] == "job.yaml"
        words = {"config": "math_8b_8gpu", "arguments": ["--steps=2", "--lengths=200", "group_size=4"]}
        result = await client.call_tool("simulate", words)
        assert "64 groups x 4 samples per step, 2 steps" in result.content[0].text
        assert result.structured_content["best"]["step_s"] > 0
        assert (
            "usage:" in (await client.call_tool("simulate", {"config": "x", "arguments": ["--help"]})).content[0].text
        )

    with_client(use)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("status", {"run": "nope"}, "nope"),
        ("samples", {"run": "made", "limit": 1000}, "error: limit: the limit must be from 1 to 50, not 1000"),
        ("validate", {"config": "job.yaml", "overrides": ["num_stepz=1"]}, "did you mean num_steps?"),
        ("probe", {"config": "job.yaml", "prompts": 0}, "error: prompts, samples: there are no samples to generate"),
        ("probe", {"config": "offline/dpo"}, "this config trains from files without rollouts"),
        ("simulate", {"config": "math_8b_8gpu", "arguments": ["--gpu=abacus"]}, "abacus"),
        ("simulate", {"config": "math_8b_8gpu", "arguments": ["--frobnicate"]}, "unrecognized arguments"),
    ],
)
def test_a_mistake_is_an_error_with_the_line_of_the_command(
    here: Path, tool: str, arguments: dict[str, Any], said: str
) -> None:
    async def use(client: Any) -> None:
        result = await client.call_tool(tool, arguments)
        assert result.is_error
        assert result.content[0].text.startswith("error: ")
        assert said in result.content[0].text
        assert not (await client.call_tool("status", {"run": "made"})).is_error  # it goes on

    with_client(use)


def test_without_its_package_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: the `mcp` package is not installed -> pip install 'areal-like[mcp]'"
    )


@pytest.mark.processes
def test_a_probe_answers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probe_here import run_here

    monkeypatch.setattr("controller.probe.probe.run_module", run_here)

    async def use(client: Any) -> None:
        words = {"config": "own_data", "overrides": ["data.eval=null", "eval=null"], "prompts": 1, "samples": 2}
        result = await client.call_tool("probe", words)
        assert not result.is_error, result.content
        assert result.structured_content["num_samples"] == 2
        assert result.content[0].text.startswith("probe of own_data: 1 prompts, 2 samples")

    with_client(use)


@pytest.mark.e2e
def test_the_server_speaks_over_stdio(here: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "controller", "mcp"], cwd=str(here), env=environment
    )

    async def connected() -> None:
        async with mcp.Client(mcp.stdio_client(parameters)) as client:
            assert "made" in (await client.call_tool("status", {"run": "made"})).content[0].text

    asyncio.run(connected())
