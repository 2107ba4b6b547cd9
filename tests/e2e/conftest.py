"""Real processes, started as a user starts them. One warm start is shared by the suite (cached in runs_dir)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_like.process import command_words
from controller.launch.forked import SHARED
from controller.launch.local import child_environment
from controller.wiring.process_specs import PRELOAD

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
START_TIMEOUT_S = 900.0
"""Deadline for anything a run does; generous, because it only bounds a hang."""

SHORT = [
    "num_steps=6", "groups_per_step=12", "group_size=4", "eval.every_steps=0", "data.eval.limit=64",
    "metrics.report=false", "warm_start.sft.threads=1", "data.train.limit=2000",
]  # fmt: skip
"""A run of the quickstart's model that takes seconds. The warm start takes one core: another stream has the other."""

LEARNING = [
    "data.train.limit=2000", "data.train.options.max_terms=6", "data.eval.options.max_terms=6",
    "sampling.max_new_tokens=48", "num_steps=30", "groups_per_step=24", "trainer.mini_batches=2",
    "trainer.optimizer.schedule=constant", "eval.every_steps=0", "data.eval.limit=200", "metrics.report=false",
]  # fmt: skip
"""The quickstart on sums of at most six terms, in an eighth of its tokens, with two updates a step: from 0.26 to 0.30
to 1.00, 1.00, 0.965, 1.00 and 1.00 (seeds 1 to 5, 2026-11-21). Sums of any length in as few samples reached 0.90 to
0.98, and 0.54 once on Ray."""


def words_of(process: psutil.Process) -> list[str]:
    try:
        return command_words(process)
    except psutil.Error:
        return []


def descendants_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class Run:
    """One `areal-like` command as a process."""

    def __init__(self, arguments: list[str], cwd: Path, runs_dir: Path) -> None:
        environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED="1", COLUMNS="160")
        self.runs_dir = runs_dir
        self.log_path = cwd / f"command-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "controller", *arguments],
                cwd=cwd,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def folder(self) -> Path:
        """The run's folder, as the command printed it."""
        for line in self.output.splitlines():
            if ": " in line and line.split(" ", 1)[-1].startswith("run "):
                return Path(line.rsplit(": ", 1)[1])
        raise AssertionError(f"no run folder in:\n{self.output}")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except (OSError, AssertionError):
            return []
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return [row for row in rows if row.get("kind") == kind]

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """The exit status; a run that does not end in time fails the test with what it printed."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.destroy()
            pytest.fail(f"still running after {timeout_s} s:\n{self.output}")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before {what}:\n{self.output}")
            if time.monotonic() > deadline_s:
                self.destroy()
                pytest.fail(f"no {what} within {timeout_s} s:\n{self.output}")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(row["step"] >= step for row in self.metrics("step")), f"step {step}")

    def pid_of(self, module: str, name: str = "") -> int:
        """Process id of a child by the module it runs (`rollout`, `trainer`, `services.reward`)."""
        for child in self.family():
            line = words_of(child)
            if "-m" in line and line[line.index("-m") + 1] == module and name in " ".join(line):
                return child.pid
        raise AssertionError(f"no process of {module}")

    def family(self) -> list[psutil.Process]:
        """The controller, what descends from it, and what was forked for it elsewhere."""
        heads = []
        with contextlib.suppress(psutil.NoSuchProcess):
            heads.append(psutil.Process(self.process.pid))
        with contextlib.suppress(AssertionError):  # it has not said where its folder is: nothing was forked for it
            specs = str(self.folder / "processes") + os.sep
            heads += [process for process in psutil.process_iter() if any(specs in word for word in words_of(process))]
        return list(dict.fromkeys(process for head in heads for process in (head, *descendants_of(head))))

    @staticmethod
    def survivors(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
        """Those of `processes` that still live after `timeout_s`."""
        _, alive = psutil.wait_procs(processes, timeout=timeout_s)
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def destroy(self) -> None:
        for process in self.family():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(10)


@pytest.fixture(scope="session", autouse=True)
def shared_forkserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs of this stream of tests are forked from one process: importing torch for each took a third of the suite.

    A test of how processes end with their controller wants `own_forkserver`.
    """
    if sys.platform != "linux":
        yield
        return
    path = tmp_path_factory.mktemp("forkserver") / "socket"
    words = ["--starter", str(os.getpid()), "--listen", str(path), *PRELOAD]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "areal_like.forkserver", *words],
        env=child_environment(1, user_path=Path.cwd()),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60.0
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED, str(path))
        yield
    server.kill()
    server.wait(10)


@pytest.fixture
def own_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test have a fork server of their own, as a user's have."""
    monkeypatch.delenv(SHARED, raising=False)


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this stream of tests; the warm start in it is shared with the other stream, where there is one."""
    folder = tmp_path_factory.mktemp("runs")
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = tmp_path_factory.getbasetemp().parent / "prepared"
        shared.mkdir(exist_ok=True)
        (folder / ".prepared").symlink_to(shared)
    return folder


@pytest.fixture
def areal(runs_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """areal("train", CONFIG, "key=value", ...) starts the command; whatever still runs at the end is killed."""
    started: list[Run] = []

    def start(command: str, *arguments: str) -> Run:
        extra = (
            []
            if command in ("resume", "drain", "add", "checkpoint", "export", "import", "samples")
            else [f"runs_dir={runs_dir}"]
        )
        run = Run([command, *arguments, *extra], tmp_path, runs_dir)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.destroy()


@pytest.fixture(scope="session")
def run_class() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def short() -> list[str]:
    return SHORT


@pytest.fixture(scope="session")
def learning() -> list[str]:
    return LEARNING


@pytest.fixture(scope="session")
def sglang_python() -> Iterator[str]:
    """Interpreter of the environment `make sglang-cpu` builds; also in the variable AREAL_LIKE_SGLANG_PYTHON."""
    name = "AREAL_LIKE_SGLANG_PYTHON"
    python = os.environ.get(name) or str(REPOSITORY / ".venv-sglang" / "bin" / "python")
    if not Path(python).is_file():
        pytest.skip("no SGLang here: make sglang-cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, python)
        yield python


@pytest.fixture(scope="session")
def quickstart() -> str:
    return str(REPOSITORY / "configs" / "quickstart.yaml")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of this machine."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
