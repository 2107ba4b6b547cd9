"""Runs tests in forked children that find third-party libraries loaded already: `python fork_server.py COPY`.

Reads one request a line from stdin, writes one answer a line to stdout. Every child imports the project for itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "coverage", "torch", "numpy", "pytest", "hypothesis", "hypothesis.strategies", "msgspec", "zmq", "zmq.asyncio",
    "pydantic", "yaml", "rich.console", "psutil", "jinja2", "safetensors.torch", "safetensors.numpy", "tokenizers",
    "transformers", "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "aiohttp.web", "httpx2",
    "zstandard", "sympy", "math_verify", "torch.distributed", "torch.nn.functional", "sqlite3", "xml.etree.ElementTree",
    "torch._dynamo", "torch.distributed.fsdp",
)  # fmt: skip
SUBREAPER = 36
WAIT_FACTOR = 4.0
"""By the clock a session may take this many times its limit of processor time; it ends a session that only waits."""
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not e2e", "--hypothesis-seed=0", "--tb=line"]


class Select:
    """Runs chosen tests alone, in the order given within their files; says what ended the session."""

    def __init__(self, nodeids: list[str]) -> None:
        self.order = {nodeid: place for place, nodeid in enumerate(nodeids)}
        self.killer = ""
        self.at_import = False
        self.num_run = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.killer, self.at_import = self.killer or report.nodeid, True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num_run += report.when == "call"
        if report.failed:
            self.killer = self.killer or report.nodeid


def settle() -> None:
    """Hypothesis: the same examples in every run, none kept, none made smaller."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation", phases=[Phase.explicit, Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("mutation")


def wrong_origin(copy: Path) -> list[str]:
    """Modules of the packages that do not come from the copy."""
    packages = ("areal_like", "controller", "rollout", "trainer", "services")
    loaded = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    return [
        f"{name}: {file}" for name, file in loaded
        if file and name.split(".")[0] in packages and not Path(file).is_relative_to(copy)
    ]  # fmt: skip


def run_chosen(copy: Path, request: dict[str, Any], options: list[str]) -> dict[str, Any]:
    import pytest

    plugin = Select(request["tests"])
    status = pytest.main([*options, *request["files"]], plugins=[plugin])
    return {
        "status": int(status), "killer": plugin.killer, "at_import": plugin.at_import, "num_run": plugin.num_run,
        "wrong": wrong_origin(copy),
    }  # fmt: skip


def run_mapped(copy: Path, request: dict[str, Any], options: list[str], lines_in: Path) -> dict[str, Any]:
    import pytest

    sys.path.insert(0, str(Path(__file__).parent))
    from lines import FOLDER, ROOT, LineMap

    os.environ.update({FOLDER: str(lines_in), ROOT: str(copy)})
    plugin = LineMap(copy, lines_in)
    status = pytest.main([*(option for option in options if option != "-x"), *request["files"]],
                         plugins=[plugin, plugin.hooks()])  # fmt: skip
    return {"status": int(status), "wrong": wrong_origin(copy), **plugin.result()}


def child(copy: Path, request: dict[str, Any], work: Path) -> None:
    """One session of tests; the answer is stored in a file, since tests may write anywhere else."""
    os.setsid()
    log = os.open(work / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, number)
    os.environ["TMPDIR"] = str(work / "tmp")
    (work / "tmp").mkdir()
    options = [*OPTIONS, f"--basetemp={work / 'base'}", "-o", f"cache_dir={work / 'cache'}"]
    try:
        settle()
        if request["kind"] == "map":
            (work / "lines").mkdir()
            answer = run_mapped(copy, request, options, work / "lines")
        else:
            answer = run_chosen(copy, request, options)
    except BaseException:
        answer = {"status": -1, "error": traceback.format_exc()}
    (work / "part").write_text(json.dumps(answer))
    (work / "part").rename(work / "answer")
    os.kill(os.getpid(), signal.SIGKILL)  # a thread or an exit hook of a mutant must not delay the end


def end_descendants() -> None:
    """End what a session left: all of it became a child of this process (subreaper)."""
    import psutil

    for _ in range(3):
        left = psutil.Process().children(recursive=True)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def queued_s(pid: int) -> float:
    """Seconds that the threads of a process and of all below it stood in the queue for a processor; the longest."""
    import psutil

    waits = [0]
    with suppress(psutil.Error, OSError):
        for process in (pid, *(below.pid for below in psutil.Process(pid).children(recursive=True))):
            waits += [int(file.read_text().split()[1]) for file in Path(f"/proc/{process}/task").glob("*/schedstat")]
    return max(waits) / 1e9


def is_over(pid: int, limit_s: float, elapsed_s: float) -> bool:
    """True if a session has used up its processor time, or waited for too long.

    Processor time, and no waiting for a processor: other load on the machine must not make a mutant count as killed.
    """
    if elapsed_s <= limit_s:
        return False
    if elapsed_s > WAIT_FACTOR * limit_s and elapsed_s - queued_s(pid) > WAIT_FACTOR * limit_s:
        return True
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > limit_s


def has_ended(session: int) -> bool:
    """Collects a session's exit status, and those of processes that lost their parents: this process inherits them
    (subreaper), and a test that waits for the end of one would wait for it as a zombie.
    """
    while pid := os.waitpid(-1, os.WNOHANG)[0]:
        if pid == session:
            return True
    return False


def serve_one(copy: Path, request: dict[str, Any], work: Path) -> dict[str, Any]:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(copy, request, work)
    is_late = False
    while not has_ended(pid):
        if is_late := is_over(pid, request["limit_s"], time.monotonic() - started):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    seconds = time.monotonic() - started
    end_descendants()
    tail = (work / "log").read_text(errors="replace")[-2000:]
    if not (work / "answer").exists():
        return {"timeout": is_late, "seconds": seconds, "tail": tail, "died": True}
    return {**json.loads((work / "answer").read_text()), "seconds": seconds, "tail": tail}


def main() -> None:
    copy = Path(sys.argv[1]).resolve()
    os.chdir(copy)
    sys.dont_write_bytecode = True
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for name in PRELOADED:
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):
        sys.modules["torch"].set_num_threads(1)
    assert not wrong_origin(Path("/nowhere")), "the project itself must not be loaded yet"
    sys.path[0] = str(copy)  # was the folder of this file
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answer = serve_one(copy, json.loads(line), copy.parent / "w")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
