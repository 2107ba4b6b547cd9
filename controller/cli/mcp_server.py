"""`areal-like mcp`: read-only commands as tools of the Model Context Protocol over standard input and output.

Defines names, arguments and descriptions of the tools, runs one call at a time and returns user errors as results. The
results are computed in mcp_answers.py. No tool starts, stops or changes a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from areal_like.errors import OperationError, UserError
from controller.cli import mcp_answers as answers

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import CallToolResult

INSTRUCTIONS = """\
Look at runs of areal_like (asynchronous reinforcement learning for language models) and check configs. Nothing here
starts, stops or changes a run. RUN is a run's folder, its name in runs/, or the name of a run started on this machine;
CONFIG is a YAML file, a run's folder or the name of a shipped config; overrides are key.path=value. Paths are relative
to the folder in which this server was started.
"""
Order = Literal["newest", "worst", "best", "given"]


def serve() -> int:
    """Serve until standard input ends; return the exit status. Raises UserError if the `mcp` package is missing."""
    try:
        server = make_server()
    except ImportError as error:
        from controller.doctor.versions import how_to_install

        raise UserError("the `mcp` package is not installed", remedy=how_to_install("mcp")) from error
    status = 0
    try:
        server.run("stdio")
    except* BrokenPipeError:  # the client disconnected during an answer
        status = 1
    return status


def make_server() -> MCPServer[Any]:
    """Make the server with its tools. Raises ImportError if the `mcp` package is missing."""
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    from areal_like import __version__

    server: MCPServer[Any] = MCPServer("areal-like", version=__version__, instructions=INSTRUCTIONS)
    for tool in _tools():
        # `validate` and `probe` execute the user's scorers, which may have any side effect.
        executes = tool.__name__ in ("validate", "probe")
        hints = ToolAnnotations(read_only_hint=True, open_world_hint=executes)
        server.add_tool(tool, annotations=hints)
    return server


def _tools() -> list[Callable[..., Any]]:
    import anyio
    import anyio.to_thread
    from mcp.types import CallToolResult, TextContent

    one_at_a_time = anyio.Lock()  # a call may redirect standard output, which all calls share

    async def answered(make: Callable[..., answers.Answer], *words: Any, **named: Any) -> CallToolResult:
        """Return the answer, or the error line that the command would print. Other exceptions are bugs and are left to
        MCPServer.
        """
        try:
            async with one_at_a_time:
                found = await anyio.to_thread.run_sync(functools.partial(make, *words, **named))
        except (UserError, OperationError) as error:
            return CallToolResult(content=[TextContent(type="text", text=f"error: {error}")], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=found.text)], structured_content=found.data)

    return [*_tools_of_runs(answered), *_tools_of_configs(answered)]


def _tools_of_runs(answered: Callable[..., Any]) -> list[Callable[..., Any]]:
    async def list_runs(include_ended: bool = True) -> Any:
        """List the runs of this machine: name, folder, whether it is in progress, step."""
        return await answered(answers.runs, include_ended)

    async def status(run: str) -> Any:
        """Show a run's status: health, step, time left, who waits for whom, each process, accuracy."""
        return await answered(answers.status, run)

    async def why(run: str) -> Any:
        """Diagnose a run from all its metrics: what is wrong or slow, the evidence, which settings to change."""
        return await answered(answers.status, run, why=True)

    async def samples(
        run: str,
        order: Order = "newest",
        limit: int = 5,
        step: int | None = None,
        group: int | None = None,
        grep: str = "",
    ) -> Any:
        """Show finished training samples: prompt, answer, reward and its parts, versions, staleness.

        step: samples that one step used. group: samples of one prompt. grep: samples with this text in prompt or
        answer. limit: at most 50.
        """
        choice = {"order": order, "limit": limit, "step": step, "group": group, "grep": grep}
        return await answered(answers.samples, run, choice)

    async def report_summary(run: str) -> Any:
        """Summarise a run: the key figures of its report, the diagnosis, the summary it wrote at its end."""
        return await answered(answers.report, run)

    return [list_runs, status, why, samples, report_summary]


def _tools_of_configs(answered: Callable[..., Any]) -> list[Callable[..., Any]]:
    async def validate(config: str, overrides: list[str] | None = None) -> Any:
        """Check a config on this machine: all errors at once, or derived numbers, memory, hours and remarks.

        Scorers of your own are executed on the gold answers of the first rows.
        """
        return await answered(answers.validate, config, overrides or [])

    async def probe(config: str, overrides: list[str] | None = None, prompts: int = 4, samples: int = 8) -> Any:
        """Sample the starting model and report why the reward would stay flat. Takes seconds to minutes."""
        return await answered(answers.probe, config, overrides or [], prompts, samples)

    async def simulate(config: str, arguments: list[str] | None = None) -> Any:
        """Predict speed, waiting and staleness of a config on machines that need not exist.

        arguments: overrides, and options of `areal-like simulate` such as --gpus=64, --gpu=h100, --model=7b,
        --calibrate=RUN, --sweep=rollout_share=0.5,0.75.
        """
        return await answered(answers.simulate, [config, *(arguments or [])])

    return [validate, probe, simulate]
