"""The sandbox by itself: layers, what a program sees and may use, and that nothing of it is left."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from code_harness import CodeBench, layers_here

import services
from areal_like.errors import UserError
from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings, ScorerSettings
from services.reward.sandbox import demands
from services.reward.sandbox import layers as layers_module
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.demands import sandbox_problems
from services.reward.sandbox.interpreter import NoInterpreter, find_interpreter
from services.reward.sandbox.launch import Setup
from services.reward.sandbox.layers import LAYERS, LayerMissing, _homes_shown, find_sandbox, sandbox_problem
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.staging import is_reachable

pytestmark = pytest.mark.processes

ADD_TESTS = ["assert add(2, 3) == 5"]
ADD = "def add(a, b):\n    return a + b\n"


def facts(bench: CodeBench, expression: str) -> str:
    """What an expression gives inside, by way of a failed test's words."""
    outcome = bench.score(f"import os, sys\ndef fact():\n    return {expression}\n", ["raise KeyError(fact())"])
    assert outcome.value == 0.0
    return outcome.reason.partition("KeyError: ")[2]


def test_the_layer_is_named_in_the_version_of_every_verdict(bench: CodeBench) -> None:
    assert bench.label == f"code@2/{layers_here().chosen}"


def test_every_layer_says_how_it_fares_and_the_strongest_that_works_is_chosen() -> None:
    layers = layers_here()
    assert set(layers.parts) == set(LAYERS)
    works = [layer for layer in LAYERS if layers.parts[layer].startswith("works")]
    assert layers.chosen == (works[0] if works else "")


def test_trial_of_a_layer_has_its_own_seconds_and_no_bound_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy when a service starts must not make it take a weaker layer."""
    deadlines: list[Deadline] = []

    class Cell:
        def wait_ready(self) -> None: ...

        def begin(self, mode: str, fds: list[int]) -> None:
            os.write(fds[1], b"holds")

        def close(self) -> None: ...

    class Run:
        def __init__(self, cell: Cell, limits: Limits, deadline: Deadline) -> None:
            deadlines.append(deadline)

        def wait(self, fds: dict[int, int]) -> dict[int, int]:
            return {}

    monkeypatch.setattr(layers_module, "Cell", SimpleNamespace(start=lambda *_: Cell()))
    monkeypatch.setattr(layers_module, "Run", Run)
    layers_module._try_out(Setup("limits", find_interpreter()), -1, "")
    assert [(deadline.total_s, deadline.until_s) for deadline in deadlines] == [(5.0, math.inf)]


def test_the_fault_of_a_layer_names_the_layer_only_in_the_combined_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_missing_part", lambda layer: f"no {layer} here")
    with pytest.raises(LayerMissing, match=r"^namespaces: no namespaces here$"):
        find_sandbox("namespaces", ("namespaces",))
    assert layers_module._try_all("").parts == {layer: f"no {layer} here" for layer in LAYERS}


def test_a_demand_that_cannot_be_met_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="bubblewrap is not installed") as raised:
        CodeBench(require="namespaces")
    assert "apt install bubblewrap" in str(raised.value)


def test_a_layer_that_is_not_allowed_is_not_taken() -> None:
    with pytest.raises(LayerMissing):
        find_sandbox("namespaces", ("limits",))


def test_an_interpreter_that_is_none_is_the_users_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(NoInterpreter):
        find_interpreter(str(broken))
    with pytest.raises(UserError, match="failed"):
        CodeBench(python=str(broken))


def test_an_interpreter_of_the_users_brings_its_packages() -> None:
    if not layers_here().chosen:
        pytest.skip("no sandbox here")
    bench = CodeBench(python=sys.executable, require="limits", time_limit_s=8.0, memory_limit_mb=1024)
    outcome = bench.score("import msgspec\ndef f():\n    return msgspec.__name__\n", ["assert f() == 'msgspec'"])
    bench.close()
    assert outcome.value == 1.0, outcome.reason


def test_without_one_there_is_the_standard_library_alone(bench: CodeBench) -> None:
    assert "ModuleNotFoundError" in bench.score("import msgspec\n", ADD_TESTS).reason


def test_a_program_sees_python_and_an_empty_world(namespaces: CodeBench) -> None:
    assert facts(namespaces, "os.getppid()") == "1"
    assert facts(namespaces, "os.listdir('/tmp')") == "[]"
    assert (
        facts(namespaces, "[p for p in ('/proc', '/etc', '/home', '/sys', '/var', '/bin') if os.path.exists(p)]")
        == "[]"
    )
    assert facts(namespaces, "sorted(os.environ)") == "['HOME', 'LANG', 'PATH', 'PWD', 'PYTHONHASHSEED', 'TMPDIR']"
    assert facts(namespaces, "[os.getuid(), os.getgid(), os.getgroups()]").startswith("[65534, 65534,")
    assert facts(namespaces, "__import__('socket').gethostname()") == "'sandbox'"
    assert facts(namespaces, "[n for _, n in __import__('socket').if_nameindex()]") in ("['lo']", "")


def test_only_three_streams_and_its_channel_are_open(bench: CodeBench) -> None:
    program = (
        "import os\ndef fds():\n    found = []\n    for fd in range(256):\n        try:\n            os.fstat(fd)\n"
        "            found.append(fd)\n        except OSError: pass\n    return found\n"
    )
    assert bench.score(program, ["assert fds() == [0, 1, 2, 3]"]).value == 1.0


def test_the_limits_are_hard_ones(bench: CodeBench) -> None:
    program = (
        "import resource\ndef raises(name):\n    limit = resource.getrlimit(getattr(resource, name))\n"
        "    if limit[0] != limit[1]: return False\n"
        "    try: resource.setrlimit(getattr(resource, name), (-1, -1))\n"
        "    except (ValueError, OSError): return True\n"
        "    return False\n"
    )
    names = ["RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"]
    if layers_here().chosen == "limits" and os.getuid() == 0:
        pytest.skip("root may raise its own limits")
    assert bench.score(program, [f"assert raises({name!r})" for name in names]).value == 1.0


def test_a_files_size_and_a_folders_size_are_bounded(namespaces: CodeBench) -> None:
    program = (
        "def grow(path, size):\n    try:\n        with open(path, 'wb') as f: f.write(b'x' * size)\n"
        "    except OSError as e: return e.errno\n    return 0\n"
    )
    tests = ["assert grow('/tmp/small', 1 << 20) == 0", "assert grow('/tmp/long', 17 << 20) == 27"]
    tests += ["assert [grow(f'/tmp/{n}', 8 << 20) for n in range(5)][-1] == 28"]
    assert namespaces.score(program, tests).value == 1.0


def test_two_programs_share_nothing(namespaces: CodeBench) -> None:
    leaves = "open('/tmp/left', 'w').write('x')\nopen('/dev/shm/left', 'w').write('x')\n"
    looks = "import os\ndef look():\n    return os.listdir('/tmp') + os.listdir('/dev/shm')\n"
    assert namespaces.score(leaves + looks, ["assert sorted(look()) == ['left', 'left']"]).value == 1.0
    assert namespaces.score(looks, ["assert look() == []"]).value == 1.0


def test_nobody_outside_hears_of_a_program(namespaces: CodeBench, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(path)
        abstract.bind("\0areal_like-test")
        for listener in (tcp, unix, abstract):
            listener.listen()
            listener.setblocking(False)
        port = tcp.getsockname()[1]
        program = (
            f"import socket\ndef reach():\n    done = []\n"
            f"    for kind, address in ((2, ('127.0.0.1', {port})), (1, {path!r}), (1, '\\0areal_like-test')):\n"
            "        try:\n            s = socket.socket(kind, 1); s.connect(address); done.append(address)\n"
            "        except OSError: pass\n    return done\n"
        )
        assert namespaces.score(program, ["assert reach() == []"]).value == 1.0
        for listener in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_nothing_runs_below_the_supervisor_between_programs(bench: CodeBench) -> None:
    forks = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid(); time.sleep(600)\n"
    bench.score(forks + ADD, ADD_TESTS)
    assert bench.processes_left() == []
    bench.score("while True: pass\n", ADD_TESTS, time_limit_s=0.3)
    assert bench.processes_left() == []


def test_a_killed_supervisor_takes_its_programs_along_and_is_replaced(tmp_path: Path) -> None:
    if not layers_here().chosen:
        pytest.skip("no sandbox here")
    bench = CodeBench(require="limits")
    first = bench.judges._child.pid
    psutil.Process(first).kill()
    assert bench.score(ADD, ADD_TESTS).kind == "crashed"
    assert bench.score(ADD, ADD_TESTS).value == 1.0
    assert bench.judges._child.pid != first
    bench.close()
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize("layer", ["landlock", "seccomp", "limits"])
def test_weaker_layers_judge_alike(layer: str) -> None:
    if not layers_here().parts[layer].startswith("works"):
        pytest.skip(layers_here().parts[layer])
    bench = CodeBench(layer=layer, require="limits")
    assert bench.label == f"code@2/{layer}"
    assert bench.score(ADD, ADD_TESTS).value == 1.0
    assert bench.score("def add(a, b): return 1\n", ADD_TESTS).value == 0.0
    assert bench.score("print(int(input()) + 1)\n", [{"input": "1\n", "output": "2"}] * 2).value == 1.0
    assert "time limit" in bench.score("while True: pass\n", ADD_TESTS, time_limit_s=0.3).reason
    if layer != "limits":
        assert bench.score("import os\nos.fork()\n" + ADD, ADD_TESTS).value == 0.0
        assert "Read-only" in bench.score("open('/tmp/x', 'w')\n" + ADD, ADD_TESTS).reason
    if layer == "landlock":
        assert "PermissionError" in bench.score("open('/etc/passwd')\n" + ADD, ADD_TESTS).reason
    assert bench.processes_left() == []
    bench.close()


def test_what_everybody_can_reach_is_known(tmp_path: Path) -> None:
    assert is_reachable("/usr/lib")
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "file").write_text("")
    assert not is_reachable(str(hidden))
    assert not is_reachable(str(hidden / "file"))


def test_the_default_demands_a_layer_that_hides_files() -> None:
    assert CodeOptions().require == "landlock"


WEAKENED = """
import os, sys
sys.path.insert(0, {home!r})
from services.reward.sandbox import layers
layers.landlock_version = lambda: 0
layers.shutil.which = lambda name: None
{more}
try:
    print(layers.find_sandbox(*{arguments!r}).layers.chosen)
except layers.LayerMissing as error:
    print("missing:", error)
"""
"""A machine without bubblewrap and Landlock, in a process of its own."""


def chosen_without_strong_layers(*arguments: object, more: str = "") -> str:
    home = str(Path(services.__path__[0]).parent)
    source = WEAKENED.format(home=home, arguments=arguments, more=more)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.strip()


def test_without_bubblewrap_and_landlock_the_default_refuses_and_says_why() -> None:
    said = chosen_without_strong_layers(CodeOptions().require)
    assert said.startswith("missing:")
    assert "bubblewrap is not installed" in said
    assert "no Landlock" in said


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which would run programs as root")
@pytest.mark.parametrize("layer", ["seccomp", "limits"])
def test_no_program_runs_as_root_in_a_layer_that_does_not_hide_files(layer: str) -> None:
    said = chosen_without_strong_layers(layer, (layer,), more="layers._users = lambda: iter([None])")
    assert said.startswith("missing:")
    assert "programs would run as root" in said
    assert "run as an ordinary user" in said


def test_a_python_below_home_makes_a_layer_no_weaker() -> None:
    interpreter = replace(find_interpreter(), shown=("/usr/lib", "/home/user/.pyenv/versions/3.12/lib"))
    assert _homes_shown(Setup("namespaces", interpreter)) == {"user"}
    assert _homes_shown(Setup("namespaces", replace(interpreter, shown=("/usr/lib",)))) == set()


def test_a_demand_is_looked_at_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RewardSettings(scorers=(ScorerSettings(kind="math"), ScorerSettings(kind="code")))
    assert layers_here().chosen not in ("namespaces", "landlock") or list(sandbox_problems(settings)) == []
    asked = []

    def refuse(*arguments: object) -> str:
        asked.append(arguments)
        return "landlock: this kernel has no Landlock"

    monkeypatch.setattr(demands, "sandbox_problem", refuse)
    ((key, what, remedy),) = sandbox_problems(settings)
    assert key == "scorers.1.options.require"
    assert what == (
        "no sandbox layer as strong as `landlock` works on this machine: landlock: this kernel has no Landlock"
    )
    assert "apt install bubblewrap" in remedy
    assert asked == [("landlock", None, "")]
    elsewhere = settings.model_copy(update={"addresses": ("tcp://127.0.0.1:1",)})
    assert list(sandbox_problems(elsewhere)) == [], "services that run already have chosen"


def test_a_trial_of_one_layer_says_why_it_cannot_be_had() -> None:
    assert sandbox_problem("namespaces", "limits") == "namespaces is not among limits"


@pytest.mark.skipif(not shutil.which("bwrap"), reason="no bubblewrap")
def test_a_python_that_an_empty_tmp_would_hide_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        problem = sandbox_problem("namespaces", "namespaces", f"{folder}/bin/python")
    assert "empty /tmp" in problem
    assert folder in problem
