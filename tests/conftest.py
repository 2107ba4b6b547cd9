"""What tests of several folders need; makes the helpers of this folder importable."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.append(str(Path(__file__).parent))

import streams

# No outcome depends on how fast the machine is: Hypothesis would fail a test whose example takes more than 200 ms.
settings.register_profile("areal_like", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=25)
settings.load_profile("areal_like")


EXIT_DEADLINE = "exit-deadline"
"""Name of a thread that ends its process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-processes", action="store_true", help="leave out tests that start a process")
    parser.addoption("--thorough-part", metavar="K/N", help="of the thorough tests, run the part K modulo N of N parts")
    parser.addoption("--by-file", action="store_true", help="with -n: collect each file once")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-processes"):
        settings.load_profile("fast")
        platform.platform()  # OpenAI's package asks for it, which starts `uname` once
        sys.addaudithook(_refuse_processes)
    streams.register(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--no-processes"):
        config.hook.pytest_deselected(items=[item for item in items if _starts_processes(item)])
        items[:] = [item for item in items if not _starts_processes(item)]
    if text := config.getoption("--thorough-part"):
        part = streams.part_of(text)
        config.hook.pytest_deselected(items=[item for item in items if not streams.is_in_part(item, part)])
        items[:] = [item for item in items if streams.is_in_part(item, part)]
    if streams.is_stream():
        items.sort(key=lambda item: streams.turn(item.path))  # stable: within a file the order stays


def pytest_collection_finish() -> None:
    streams.freeze()


def _starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("e2e") is not None or item.get_closest_marker("processes") is not None


_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_running: list[str] = []
_unmarked: list[str] = []


def _refuse_processes(event: str, _arguments: object) -> None:
    if event in _STARTS and _running:
        _unmarked.append(_running[-1])
        raise RuntimeError("this test starts a process: mark it with @pytest.mark.processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    if isinstance(item, streams.FileItem):
        return (yield)
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test whose code caught the refusal."""
    yield
    if item.nodeid in _unmarked:
        pytest.fail("starts a process: mark it with @pytest.mark.processes", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def own_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the suite, and of processes it starts, are registered in a folder of its own, not in the user's; reward
    services keep their keys in one of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Streams that compute with a thread for every core wait for each other's."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_exit_deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test may run the main function of a process: its exit deadline would end the stream of tests seconds later.
    A test that starts such a deadline nevertheless fails, since otherwise the stream ends in another test.
    """
    monkeypatch.setattr("areal_like.process._leave_within", lambda grace_s, error: None)
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)  # a command that ran in this process has set it
    yield
    left = [thread for thread in threading.enumerate() if thread.name == EXIT_DEADLINE]
    for thread in left:
        thread.name = f"{EXIT_DEADLINE}, reported"
    assert not left, "the test leaves a thread that ends this process"


@pytest.fixture(scope="session")
def published() -> Callable[[str], Path]:
    """`published("gsm8k/test.jsonl")`: a file of the published data sets; the test is skipped where it is not.

    They are in the folder AREAL_LIKE_TEST_DATA, else next to the checkout.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("AREAL_LIKE_TEST_DATA", default))

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"no published rows: set AREAL_LIKE_TEST_DATA to a folder with {name}")
        return folder / name

    return find
