"""`areal-like dashboard [RUNS_DIR]`: serves the pages until Ctrl-C.

Checks the arguments and prints the address. Routes are in server.py, access rules in access.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from areal_like.errors import UserError
from controller.dashboard.access import Access, is_loopback
from controller.dashboard.pages import STATIC, asset
from controller.dashboard.run_list import is_run
from controller.dashboard.server import Dashboard
from controller.telemetry.dashboard_process import ADDRESS_LINE, TOKEN_LINE

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8787


def say(line: str) -> None:
    """Print and flush, because a program may read the address from a pipe."""
    print(line, flush=True)


def dashboard(
    runs_dir: str, *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, token: str | None = None,
    announce: Callable[[str], None] = say,
) -> int:  # fmt: skip
    """Serve until SIGINT or SIGTERM; return the exit status, 0.

    Raises UserError: no such folder, a run instead of a folder of runs, port in use, a bad token.
    """
    folder = checked(runs_dir)
    made = Dashboard(folder, Access.of(host, token))
    for name in STATIC:
        asset(name)
    asyncio.run(_serve(made, port, announce))
    return 0


def checked(runs_dir: str) -> Path:
    """Check the folder of runs. Raises UserError."""
    folder = Path(runs_dir).expanduser()
    try:
        if not folder.is_dir():
            remedy = "specify a folder of runs: areal-like dashboard RUNS_DIR"
            raise UserError("there is no such folder", where=str(folder), remedy=remedy)
        if is_run(folder):
            remedy = f"specify the parent folder: areal-like dashboard {folder.resolve().parent}"
            raise UserError(
                "this is the folder of a single run, not a folder of runs", where=str(folder), remedy=remedy
            )
    except OSError as error:
        raise UserError(f"the folder cannot be read ({error.strerror})", where=str(folder)) from error
    return folder.resolve()


async def _serve(made: Dashboard, port: int, announce: Callable[[str], None]) -> None:
    runner = made.runner()
    await runner.setup()
    try:
        await listen(runner, made.access.host, port)
        for line in greeting(made, int(runner.addresses[0][1])):
            announce(line)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Listen on the address. Raises UserError if it is not available."""
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what, remedy = (
                f"port {port} is in use",
                "choose a different port with --port N, or use --port 0 for any free port",
            )
        elif error.errno == errno.EACCES:
            what, remedy = f"port {port} is reserved", "choose a port above 1023 with --port N"
        else:
            what, remedy = f"cannot listen on this address ({_reason(error)})", "specify an address of this machine"
        raise UserError(what, where=f"--host {host}", remedy=remedy) from error


def _reason(error: OSError) -> str:
    """Reason of an OSError without the address that asyncio adds; errors of name resolution have negative numbers."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)


def greeting(made: Dashboard, port: int) -> list[str]:
    """Text printed at the start: address, token, and a note if the address is open to the network."""
    access = made.access
    place = f"[{access.host}]" if ":" in access.host else access.host
    query = f"?token={access.token}" if access.reads_need_token else ""
    lines = [f"{ADDRESS_LINE}{made.runs_dir}: http://{place}:{port}/{query}"]
    if not access.reads_need_token:
        lines.append(f"{TOKEN_LINE}(checkpoint, stop, drain, add): {access.token}")
    if not is_loopback(access.host):
        lines.append("note: the connection is plain HTTP; on an untrusted network, use ssh -L and a loopback address")
    return [*lines, "press Ctrl-C to stop the dashboard; runs are not affected"]
