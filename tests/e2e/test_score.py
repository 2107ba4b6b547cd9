"""`areal-like score` as a person uses it: real files, real scoring processes, interruptions, nothing left behind."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

Start = Callable[..., Any]
PATIENCE_S = 120.0
MY_SCORER = """\
import os, subprocess, time

def score(row, response, **info):
    print("a scorer may print")
    do = row.get("do", "")
    if do == "hang":
        time.sleep(3600)
    if do == "die":
        os._exit(3)
    if do == "raise":
        raise ValueError("no")
    if do == "leave":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    while do == "hold" and os.path.exists("hold"):
        time.sleep(0.01)
    return {"nan": float("nan"), "text": "high"}.get(do, len(response))
"""


@pytest.fixture
def score(run_class: type, tmp_path: Path) -> Iterator[Start]:
    """score("math", ROWS, *more) starts the command on rows in a file of the test's own folder."""
    started = []

    def start(scorer: str, lines: list[bytes | dict[str, Any]] | None = None, *more: str) -> Any:
        if lines is not None:
            whole = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
            (tmp_path / "in.jsonl").write_bytes(b"\n".join(whole) + b"\n")
        run = run_class(
            ["score", "--scorer", scorer, "--input", "in.jsonl", "--output", "out.jsonl", *more], tmp_path, tmp_path
        )
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.destroy()


def verdicts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def kinds(folder: Path) -> list[tuple[Any, str, float | None]]:
    return [(row["id"], row["verdict"], row["value"]) for row in verdicts(folder)]


@pytest.mark.e2e
def test_every_line_gets_its_verdict_in_order_whatever_it_holds(score: Start, tmp_path: Path) -> None:
    lines: list[bytes | dict[str, Any]] = [
        {"id": "a", "response": "so \\boxed{42}", "gold": "42", "answer": "41"},
        {"response": "\\boxed{41}", "gold": 42},
        b"{broken",
        b"",
        b'{"id": "c", "response": "\xff", "gold": "42"}',
        {"id": "d", "response": "\\boxed{42}"},
        {"id": "e", "gold": "42"},
        {"id": "f", "response": "9" * 20_000_000, "gold": "42"},
        {"id": "g", "response": "\\boxed{9**9**9}", "gold": "42"},
        {"id": "h", "response": "\\boxed{\\frac{84}{2}}", "gold": 42.0},
    ]
    run = score("math", lines, "--timeout", "500")
    assert run.wait() == 0, run.output
    assert kinds(tmp_path) == [
        ("a", "scored", 1.0), (2, "scored", 0.0), (3, "invalid", None), (4, "invalid", None), ("c", "invalid", None),
        ("d", "invalid", None), ("e", "invalid", None), ("f", "invalid", None), ("g", "scored", 0.0),
        ("h", "scored", 1.0),
    ]  # fmt: skip
    assert all(row["reason"] for row in verdicts(tmp_path) if row["verdict"] == "invalid")
    assert all(row["wall_s"] >= 0 for row in verdicts(tmp_path))
    assert "10 of 10 rows have a verdict" in run.output
    assert sorted(path.name for path in tmp_path.glob("*.jsonl*")) == ["in.jsonl", "out.jsonl"]


@pytest.mark.e2e
def test_failing_functions_are_verdicts_and_leave_nothing(score: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_SCORER)
    todo = ["", "hang", "", "die", "raise", "nan", "text", "leave", ""]
    rows = [{"response": "abc", "do": do} for do in todo]
    before = set(psutil.pids())
    run = score("mine:score", rows, "--timeout", "8", "--workers", "2")
    assert run.wait() == 0, run.output
    assert [row["verdict"] for row in verdicts(tmp_path)] == [
        "scored", "timed_out", "scored", "crashed", "crashed", "invalid", "invalid", "scored", "scored",
    ]  # fmt: skip
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert ["sleep", "3600"] not in [process.info["cmdline"] for process in left]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_an_interrupted_command_goes_on_where_it_was(
    score: Start, run_class: Any, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "mine.py").write_text(MY_SCORER)
    rows: list[bytes | dict[str, Any]] = [
        {"id": n, "response": "x" * n, "do": "hold" if n == 60 else ""} for n in range(120)
    ]
    out = tmp_path / "out.jsonl"
    (tmp_path / "hold").touch()  # the command cannot end before it is interrupted
    run = score("mine:score", rows, "--workers", "2", "--timeout", "500")
    run.wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 20, "20 verdicts")
    family = run.family()
    run.process.send_signal(number)
    assert run.wait() == (130 if number == signal.SIGINT else -9)
    assert run_class.survivors(family, PATIENCE_S) == []
    first = out.read_bytes()
    assert 20 < first.count(b"\n") <= 60
    (tmp_path / "hold").unlink()
    out.write_bytes(first + b'{"id": 99, "verd')
    again = score("mine:score", None, "--workers", "2", "--timeout", "500")
    assert again.wait() == 0, again.output
    assert out.read_bytes().startswith(first)
    assert kinds(tmp_path) == [(n, "scored", float(n)) for n in range(120)]
    assert f"({first.count(10)} of them from an earlier invocation)" in again.output


@pytest.mark.e2e
def test_a_changed_input_and_a_changed_scorer_are_refused(score: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_SCORER)
    assert score("mine:score", [{"response": "a"}, {"response": "b"}]).wait() == 0
    changed = score("mine:score", [{"response": "a"}, {"response": "c"}])
    assert changed.wait() == 2
    assert "line 2 does not match line 2 of the input" in changed.output
    (tmp_path / "mine.py").write_text(MY_SCORER + "\n# another version\n")
    other = score("mine:score", [{"response": "a"}, {"response": "b"}])
    assert other.wait() == 2
    assert "was scored by mine:score@" in other.output
    assert score("mine:score", None, "--overwrite").wait() == 0


@pytest.mark.e2e
def test_what_cannot_be_scored_at_all_is_one_sentence(score: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    for scorer, more, words in (
        ("maths", [], "did you mean math?"),
        ("mine:score", [], "No module named 'no_such_module'"),
        ("math", ["float_digit=3"], "float_digit"),
        ("code", ["total_limit_s=30", "--timeout", "10"], "is more than reward.timeout_s 10 allows"),
    ):
        run = score(scorer, [{"response": "a"}], *more)
        assert run.wait() == 2, run.output
        assert words in run.output.strip().splitlines()[-1]
        assert run.output.count("error: ") == 1


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_programs_are_judged_and_hostile_ones_leave_nothing(score: Start, tmp_path: Path) -> None:
    asserts = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]
    pairs = [{"input": "2 3\n", "output": "5\n"}]
    limits = {"time_limit_s": 1, "memory_limit_mb": 128}
    programs = [
        ("def add(a, b):\n    return a + b\n", asserts, 1.0),
        ("def add(a, b):\n    return a - b\n", asserts, 0.0),
        ("print(sum(map(int, input().split())))", pairs, 1.0),
        ("import os\nwhile True: os.fork()", asserts, 0.0),
        ("import os\nos._exit(0)", asserts, 0.0),
        ("x = [0] * 10**9", asserts, 0.0),
        ("import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(3600)\n"
         "def add(a, b):\n    return a + b\n", asserts, 1.0),
        ("```python\nprint(5)\n```", pairs, 0.0),
        ("def add(a, b):\n    return a + b\n", asserts, 1.0),
    ]  # fmt: skip
    rows: list[bytes | dict[str, Any]] = [
        {"id": f"p{n}", "program": program, "tests": tests, **limits} for n, (program, tests, _) in enumerate(programs)
    ]
    run = score("code", [*rows, {"program": "x = 1", "tests": []}, {"tests": asserts}])
    family: dict[int, psutil.Process] = {}
    while run.process.poll() is None:
        family |= {process.pid: process for process in run.family()}
        time.sleep(0.02)
    assert run.wait() == 0, run.output
    if "layer namespaces" not in run.output:  # without a user of its own a program may not fork
        programs[6] = (*programs[6][:2], 0.0)
    assert [row["value"] for row in verdicts(tmp_path)] == [wanted for _, _, wanted in programs] + [None, None]
    assert run.survivors(list(family.values()), PATIENCE_S) == []
