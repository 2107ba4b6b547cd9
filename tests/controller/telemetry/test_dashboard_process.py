"""Claims about `metrics.dashboard`: an address is printed, a failure is one warning, and nothing waits or is left."""

from __future__ import annotations

import asyncio
import functools
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_zoo as zoo

from controller.telemetry import dashboard_process as module
from controller.telemetry.dashboard_process import DashboardProcess, dashboard_process

pytestmark = pytest.mark.processes
TIMEOUT_S = 300.0
"""Generous: it only bounds a hang."""


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine would give a process of low priority nothing for minutes."""
    monkeypatch.setattr(module, "NICENESS", 0)


class Said(asyncio.Queue[tuple[str, str]]):
    """Lines and levels that the display was given."""

    def __call__(self, line: str, level: str) -> None:
        self.put_nowait((line, level))

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.get(), TIMEOUT_S)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop, as a session runs."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@in_a_loop
async def test_address_and_token_are_printed_and_the_process_ends_with_the_session(tmp_path: Path) -> None:
    zoo.make_run(tmp_path, name="mine")
    said = Said()
    process = DashboardProcess(tmp_path, 0, said)
    (place, level), (token, _) = await said.next(), await said.next()
    assert level == "info"
    assert place.startswith(f"dashboard of {tmp_path}: http://127.0.0.1:")
    assert token.startswith("token for actions (")
    address = place.split()[-1]
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{address}run/mine", timeout=TIMEOUT_S).read())
    assert b"mine" in page
    process.end()
    assert await asyncio.to_thread(process.join, TIMEOUT_S)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(urllib.request.urlopen, address)
    assert said.empty()


@in_a_loop
async def test_port_in_use_is_one_warning_that_names_the_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said, port = Said(), taken.getsockname()[1]
        process = DashboardProcess(tmp_path, port, said)
        found = await said.next()
        assert await asyncio.to_thread(process.join, TIMEOUT_S)
    words = f"port {port} is in use: set metrics.dashboard_port to a different port, or to 0 for any free port"
    assert found == (f"no dashboard: {words}; the run continues", "warning")
    assert said.empty()


@in_a_loop
async def test_command_that_cannot_start_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_command", lambda runs_dir, port: ["/no/such/program"])
    said = Said()
    assert await asyncio.to_thread(DashboardProcess(tmp_path, 0, said).join, TIMEOUT_S)
    line, level = await said.next()
    assert line.startswith("no dashboard: ")
    assert level == "warning"


@in_a_loop
async def test_session_waits_neither_for_its_start_nor_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('dashboard of x', flush=True); "
        "time.sleep(600)"
    )
    children: list[subprocess.Popen[str]] = []
    is_released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_start(command: object) -> subprocess.Popen[str]:
        asyncio.run_coroutine_threadsafe(is_released.wait(), loop).result(TIMEOUT_S)
        child = subprocess.Popen([sys.executable, "-c", hang], stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    monkeypatch.setattr(module, "_start", slow_start)
    said = Said()
    process = DashboardProcess(tmp_path, 0, said)  # returns although the start hangs
    assert said.empty()
    is_released.set()
    await said.next()
    process.end()  # returns although the process ignores the request
    assert children[0].poll() is None
    children[0].kill()
    assert await asyncio.to_thread(process.join, TIMEOUT_S)


@in_a_loop
async def test_nothing_is_started_unless_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DashboardProcess", None)
    with dashboard_process(False, tmp_path, 0, Said()):
        pass


def test_dashboard_is_killed_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even with SIGKILL."""
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom controller.telemetry import dashboard_process as module\n"
        "module.NICENESS = 0\n"
        "async def main():\n"
        "    module.DashboardProcess(Path(sys.argv[1]), 0, lambda line, level: print(line, flush=True))\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    repository = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=repository, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("dashboard of")
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        parent.kill()
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
