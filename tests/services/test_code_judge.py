"""What a row supplies runs confined: its tests and prompt see no environment, no files and no service."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from code_harness import CodeBench, layers_here
from hostile_programs import ADD, ADD_TESTS

from services.reward.judging.exchange import Over
from services.reward.judging.judge import _read_findings
from services.reward.judging.problem import Findings, Unjudgeable

pytestmark = pytest.mark.processes

SECRET = "AREAL_LIKE_TEST_SECRET"
CONFINING = ("namespaces", "landlock")


@pytest.fixture(scope="module", params=CONFINING)
def confined(request: pytest.FixtureRequest) -> Iterator[CodeBench]:
    """A scorer in each layer that hides files, started with a secret in its environment."""
    if not layers_here().parts[request.param].startswith("works"):
        pytest.skip(layers_here().parts[request.param])
    os.environ[SECRET] = "token-of-the-user"
    try:
        bench = CodeBench(layer=request.param)
    finally:
        del os.environ[SECRET]
    yield bench
    bench.close()


def seen_by_tests(bench: CodeBench, expression: str) -> str:
    """What an expression gives in the process of tests, by way of a failed test's words."""
    outcome = bench.score(ADD, [f"import os\nraise KeyError({expression})"])
    assert outcome.value == 0.0
    return outcome.reason.partition("KeyError: ")[2]


def test_tests_of_a_row_do_not_see_the_environment(confined: CodeBench) -> None:
    assert seen_by_tests(confined, f"os.environ.get({SECRET!r})") == "None"
    known = {"HOME", "LANG", "PATH", "PWD", "PYTHONHASHSEED", "TMPDIR", "LC_CTYPE"}
    assert seen_by_tests(confined, f"sorted(set(os.environ) - {known!r})") == "[]"


def test_tests_of_a_row_can_read_and_write_no_file_of_the_user(confined: CodeBench, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    tmp_path.chmod(0o755)
    reads = (
        "def read(path):\n    try:\n        return open(path).read(20)\n"
        "    except OSError as error:\n        return type(error).__name__\n"
        f"raise KeyError([read(path) for path in ({str(secret)!r}, '/etc/passwd', '/proc/self/environ')])"
    )
    reason = confined.score(ADD, [reads]).reason
    assert "PRIVATE" not in reason
    assert "root:" not in reason
    assert reason.count("Error'") == 3, reason
    target = tmp_path / "written"
    confined.score(ADD, [f"open({str(target)!r}, 'w').write('x')"])
    assert not target.exists()


@pytest.mark.parametrize("column", ["test_setup_code", "prompt", "tests"])
def test_code_of_any_column_runs_in_the_sandbox(confined: CodeBench, tmp_path: Path, column: str) -> None:
    target = tmp_path / "pwned"
    payload = f"import os\nopen({str(target)!r}, 'w').write(str(os.environ))\n"
    rows: dict[str, dict[str, Any]] = {
        "test_setup_code": {"test_list": ["assert add(2, 3) == 5"], "test_setup_code": payload},
        "prompt": {
            "prompt": payload + "def add(a, b):\n", "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        },
        "tests": {"tests": [payload]},
    }  # fmt: skip
    confined.answer({"program": ADD, **rows[column]}, "")
    assert not target.exists()


def test_tests_of_a_row_reach_no_socket_and_no_other_process(confined: CodeBench) -> None:
    connects = (
        "import socket\n"
        "def made(family):\n"
        "    try:\n        return socket.socket(family, socket.SOCK_STREAM).connect(('127.0.0.1', 9)) or 'connected'\n"
        "    except OSError as error:\n        return error.errno\n"
        "raise KeyError(made(socket.AF_INET))"
    )
    assert confined.score(ADD, [connects]).reason.partition("KeyError: ")[2] in ("1", "13", "97")
    kills = f"import os\nos.kill({os.getpid()}, 0)"
    assert "Error" in confined.score(ADD, [kills]).reason


def test_tests_and_program_are_apart_from_each_other(confined: CodeBench) -> None:
    program = "import os\ndef pid(): return os.getpid()\ndef files(): return os.listdir('/tmp')\n"
    shares = "import os\nopen('/tmp/expected', 'w').write('5')\nassert files() == []"
    reason = confined.score(program, [shares]).reason
    assert reason == "" or "Read-only" in reason or "PermissionError" in reason, reason


def test_one_rows_tests_leave_nothing_for_the_next_rows(confined: CodeBench) -> None:
    path = f"/tmp/left-{uuid4().hex}"
    leaves = f"import builtins\nbuiltins.left = 1\ntry:\n    open({path!r}, 'w').close()\nexcept OSError: pass\n"
    assert confined.score(ADD, [leaves + ADD_TESTS[0]]).value == 1.0
    looks = f"import os, builtins\nassert not hasattr(builtins, 'left') and not os.path.exists({path!r})\n"
    assert confined.score(ADD, [looks + ADD_TESTS[0]]).value == 1.0


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("import os\nos._exit(0)", "did not run to their end"),
        ("import os, json\nbody = b'f' + b'{\"num_tests\": 1}'\n"
         "os.write(3, len(body).to_bytes(4, 'big') + body)\nos._exit(0)", "reported no findings"),
        ("import os\nos.write(3, b'\\0\\0\\0\\1q')\nimport time; time.sleep(60)", "broke the protocol"),
    ],
)  # fmt: skip
def test_tests_that_break_off_judge_nobody(bench: CodeBench, test: str, words: str) -> None:
    outcome = bench.score(ADD, [test])
    assert (outcome.kind, outcome.value) == ("invalid", None)
    assert words in outcome.reason
    assert bench.score(ADD, ADD_TESTS).value == 1.0, "the next row is judged as ever"
    assert bench.processes_left() == []


def test_tests_that_never_end_cost_their_program_its_point_and_no_more(bench: CodeBench) -> None:
    outcome = bench.score(ADD, ["while add(1, 2) == 3: pass"], time_limit_s=0.5)
    assert outcome.value == 0.0
    assert bench.score(ADD, ADD_TESTS).value == 1.0


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"[" * 100_000, json.dumps({"num_tests": -1, "num_passed": 0, "failures": [], "weaker": []}).encode(),
     json.dumps({"num_tests": 1, "num_passed": 1, "failures": ["x" * 2000], "weaker": []}).encode(),
     json.dumps({**Findings().as_dict(), "uses_helpers": "yes"}).encode()],
)  # fmt: skip
def test_forged_findings_are_refused(body: bytes) -> None:
    with pytest.raises(Over):
        _read_findings(body)
    with pytest.raises(Unjudgeable, match="why"):
        _read_findings(b'{"unjudgeable": "why"}')


def test_findings_arrive_as_the_tests_reported_them() -> None:
    findings = Findings(num_tests=2, num_passed=1, failures=["test 2: no"], weaker={"Odd"}, uses_helpers=True).as_dict()
    assert _read_findings(json.dumps(findings).encode()) == findings
