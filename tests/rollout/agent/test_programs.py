"""Programs as processes: what they print, how they end, and that nothing is left, with and without their imports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_like.errors import UserError
from rollout.agent.programs import Preloaded, Programs, Started, command_of

pytestmark = pytest.mark.processes


@pytest.fixture(params=["started", "preloaded"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made: list[Preloaded] = []

    def programs(source: str, *words: str) -> Programs:
        path = tmp_path / "agent.py"
        path.write_text(textwrap.dedent(source))
        command = [sys.executable, str(path), *words]
        if request.param == "started":
            return Started(command)
        made.append(Preloaded(command, ["json"]))
        return made[-1]

    yield programs
    for one in made:
        one.close()


async def ended(programs: Programs, **environment: str) -> tuple[str, int]:
    program = await programs.start({**os.environ, **environment})
    try:
        return (await program.output.read()).decode(), await program.wait()
    finally:
        await program.end()


def test_a_program_has_its_words_its_environment_and_no_input(make: Callable[..., Programs]) -> None:
    source = """
        import os, sys
        print(__name__, sys.argv[1:], os.environ["ONE"], repr(sys.stdin.read()), sys.path[0] in __file__)
        print("to stderr", file=sys.stderr)
        sys.exit(3)
    """

    async def twice() -> Any:
        programs = make(source, "a", "b")
        return await ended(programs, ONE="1"), await ended(programs, ONE="2")

    found = asyncio.run(twice())
    for place, (printed, status) in enumerate(found, start=1):
        assert sorted(printed.splitlines()) == [f"__main__ ['a', 'b'] {place} '' True", "to stderr"]
        assert status == 3


@pytest.mark.parametrize(
    ("source", "status", "last"),
    [
        ("print('done')", 0, "done"),
        ("raise ValueError('oh no')", 1, "ValueError: oh no"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_the_exit_status_of_a_program_is_reported(
    make: Callable[..., Programs], source: str, status: int, last: str
) -> None:
    printed, found = asyncio.run(ended(make(source)))
    assert found == status
    assert printed.rstrip().endswith(last)


def test_a_program_that_is_ended_goes_with_all_it_started(make: Callable[..., Programs]) -> None:
    source = """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        time.sleep(600)
    """

    async def play() -> list[int]:
        program = await make(source).start(os.environ)
        pids = [int(pid) for pid in (await program.output.readline()).split()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        await program.end()
        await program.end()
        return pids

    pids = asyncio.run(play())
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


# ---------------------------------------------------------------- preloaded ones


def preloaded(tmp_path: Path, source: str, module: str = "", name: str = "preloaded_for_test") -> Preloaded:
    (tmp_path / "agent.py").write_text(source)
    (tmp_path / f"{name}.py").write_text(module)
    return Preloaded([sys.executable, str(tmp_path / "agent.py")], [name])


def test_modules_are_imported_once_from_the_folder_of_the_program(tmp_path: Path) -> None:
    module = "import os; print('imported', flush=True); pid = os.getpid()"
    programs = preloaded(tmp_path, "import preloaded_for_test as p, os; print(p.pid, os.getpid())", module)

    async def twice() -> Any:
        return [(await ended(programs))[0].split() for _ in range(2)]

    try:
        (first, one), (second, other) = asyncio.run(twice())
    finally:
        programs.close()
    assert first == second
    assert len({first, one, other}) == 3


def test_a_server_that_was_killed_takes_its_programs_along_and_is_started_again(tmp_path: Path) -> None:
    source = "import preloaded_for_test as p, sys, time; print(p.pid, flush=True); time.sleep(600 * ('x' in sys.argv))"
    programs = preloaded(tmp_path, source, "import os; pid = os.getpid()")

    async def play() -> Any:
        programs._words.append("x")
        program = await programs.start(os.environ)
        server = int(await program.output.readline())
        os.kill(server, signal.SIGKILL)
        status = await program.wait()
        await program.end()
        programs._words.pop()
        assert programs._server is not None
        await asyncio.to_thread(programs._server[0].wait)
        return server, status, await ended(programs)

    try:
        server, status, (again, _) = asyncio.run(play())
    finally:
        programs.close()
    assert status == -9
    assert int(again) != server


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "importing preloaded_for_test starts a thread",
        ),
        ("raise ValueError('no\\nkey')", r"preloaded_for_test cannot be imported \(ValueError: no key\)"),
        ("import os; os._exit(3)", "the process that runs the imports has exited"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_named(tmp_path: Path, module: str, said: str) -> None:
    programs = preloaded(tmp_path, "print('never')", module)
    with pytest.raises(UserError, match=said):
        asyncio.run(ended(programs))
    assert programs._server is None


def test_a_program_may_be_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_agent.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    programs = Preloaded([sys.executable, "-m", "my_agent", "x"], ["json"])
    try:
        assert asyncio.run(ended(programs)) == ("__main__ ['x']\n", 0)
    finally:
        programs.close()


@pytest.mark.parametrize("command", [["python"], ["python", "-m"], ["python", "-u", "agent.py"]])
def test_preload_needs_a_script_or_a_module(command: list[str]) -> None:
    with pytest.raises(UserError, match=r"\[python, SCRIPT, \.\.\.\]"):
        Preloaded(command, ["openai"])


def test_python_is_the_interpreter_of_the_run(tmp_path: Path) -> None:
    (script := tmp_path / "a.py").touch()
    assert command_of(["python", str(script)]) == [sys.executable, str(script)]
    assert command_of([sys.executable, "-m", "a.py"]) == [sys.executable, "-m", "a.py"]
    assert command_of(["sh", "python"]) == ["sh", "python"]


def test_a_script_that_is_not_there_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"there is no file 'agents/mine\.py' in /"):
        command_of(["python", "agents/mine.py"])
