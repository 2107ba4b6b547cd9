"""The doctor's runner, its window on the machine, and how findings are shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from controller.doctor import command, machine, page
from controller.doctor.catalogue import all_checks
from controller.doctor.finding import Check, Finding, Line, absent, ok, problem, size, warning
from controller.doctor.machine import Machine
from controller.doctor.remedies import remedy
from controller.doctor.runner import run_checks

# ---------------------------------------------------------------- runner


def test_lines_come_in_the_order_of_the_checks_whatever_ends_first() -> None:
    second_done = threading.Event()

    def slow(machine: Machine) -> Finding:
        second_done.wait(300.0)
        return ok("slow")

    def fast(machine: Machine) -> Finding:
        second_done.set()
        return ok("fast")

    lines = run_checks([Check("t", "a", slow), Check("t", "b", fast)], Machine())
    assert [line.finding.found for line in lines] == ["slow", "fast"]


@pytest.mark.parametrize(("is_needed", "verdict"), [(True, "problem"), (False, "warning")])
@pytest.mark.parametrize("error", [RuntimeError("boom\nsecond line"), SystemExit(3), KeyError("key")])
def test_check_that_raises_is_reported_with_its_place(error: BaseException, is_needed: bool, verdict: str) -> None:
    def look(machine: Machine) -> Finding:
        raise error

    (line,) = run_checks([Check("t", "n", look, is_needed=is_needed)], Machine())
    assert line.finding.verdict == verdict
    assert type(error).__name__ in line.finding.found
    assert "test_runner.py:" in line.finding.found
    assert "\n" not in line.finding.found


def test_check_that_hangs_is_reported_and_the_others_are_not_held_up() -> None:
    release = threading.Event()

    def hang(machine: Machine) -> Finding:
        release.wait(300.0)
        return ok("too late")

    checks = [
        Check("t", "hangs", hang, deadline_s=0.05, is_needed=True),
        Check("t", "fine", lambda machine: ok("fine")),
    ]
    hung, fine = run_checks(checks, Machine())
    release.set()
    assert (hung.finding.verdict, fine.finding.verdict) == ("problem", "ok")
    assert "the check returned no result within 0.05 s" in hung.finding.found


def test_check_without_anything_to_say_has_no_line() -> None:
    assert run_checks([Check("t", "n", lambda machine: None)], Machine()) == []


def test_progress_names_the_checks_under_way() -> None:
    said: list[list[str]] = []
    run_checks([Check("t", "one", lambda machine: ok(""))], Machine(), lambda names: said.append(list(names)))
    assert said == [["one"]]


# ---------------------------------------------------------------- programs


@pytest.mark.processes
@pytest.mark.parametrize("is_own_session", [False, True])
def test_program_past_its_deadline_is_killed_with_all_it_started(tmp_path: Path, is_own_session: bool) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        f"start_new_session={is_own_session});"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    box: list[machine.Ran] = []
    here = Machine()
    thread = threading.Thread(target=lambda: box.append(here.run([sys.executable, "-c", code], deadline_s=600)))
    thread.start()
    until_s = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < until_s:
        time.sleep(0.01)
    here.end()
    thread.join(300.0)
    assert not thread.is_alive()
    assert box[0].fault == "ended by SIGKILL"
    grandchild = Path(f"/proc/{pid_file.read_text()}")
    while grandchild.exists() and "Z" not in _state(grandchild) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not grandchild.exists() or "Z" in _state(grandchild)


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.processes
def test_overdue_program_says_so() -> None:
    assert Machine().run(["sleep", "60"], deadline_s=0.05).fault == "no result within 0.05 s"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["/no/such/program"], "cannot be started (No such file or directory)"),
        ([sys.executable, "-c", "raise ValueError('bad')"], "ValueError: bad"),
        ([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"], "ended by SIGILL"),
        ([sys.executable, "-c", "import sys; sys.exit(3)"], "ended with status 3"),
    ],
)
def test_bad_ends_are_reported_in_words(argv: list[str], fault: str) -> None:
    assert Machine().run(argv, deadline_s=60).fault == fault


@pytest.mark.processes
def test_probe_is_run_once_and_its_answer_found_among_other_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "noisy.py").write_text(
        f"import pathlib\nprint('hello')\nprint('areal_like-doctor {{\"a\": 1}}')\nprint('bye')\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('x')\n"
    )
    monkeypatch.setattr(machine, "PROBES", tmp_path)
    here = Machine()
    answers: list[machine.Answer] = []
    threads = [threading.Thread(target=lambda: answers.append(here.probe("noisy"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)
    assert [answer.data for answer in answers] == [{"a": 1}] * 3
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.processes
def test_probe_that_says_nothing_or_breaks_off_has_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("")
    (tmp_path / "broken.py").write_text("print('areal_like-doctor {\"a\": ')")
    monkeypatch.setattr(machine, "PROBES", tmp_path)
    assert Machine().probe("silent").fault == Machine().probe("broken").fault == "printed nothing"


def test_this_machine_answers_every_question() -> None:
    here = Machine()
    assert here.version("pyzmq")
    assert here.version("no-such-package") == here.which("no-such-program") == here.text("/no/such") == ""
    assert here.names("/no/such") == []
    assert here.package_folder("no_such_package") == ""
    assert here.package_folder("zmq").endswith("zmq")
    assert here.limit("RLIMIT_NOFILE")[0] > 0
    assert here.num_cores()[0] >= 1
    assert here.load() >= 0
    assert here.memory().total > here.swap().used
    assert any(mount.point == "/" for mount in here.mounts())
    assert here.num_own_threads() >= 0


def test_remedies_go_by_the_last_words() -> None:
    assert "torchvision" in remedy("operator torchvision::nms does not exist", "other")
    assert remedy("unknown", "other") == "other"


# ---------------------------------------------------------------- the page


LINES = [
    Line("Python", "Python", ok("3.11.7", version="3.11.7"), 0.1),
    Line("torch", "devices", warning("CUDA does not respond", "restart the driver"), 0.2),
    Line("Sandbox", "bubblewrap", absent("not installed", "apt install bubblewrap"), 0.0),
]
BAD = Line("Disk", "runs folder", problem("cannot be written " + "x" * 200, "name another", limit=float("inf")), 0.0)


def shown(lines: list[Line], width: int) -> str:
    stream = io.StringIO()
    page.show(lines, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160, 400])
def test_table_keeps_within_its_width_and_loses_nothing(width: int) -> None:
    text = shown([*LINES, BAD], width)
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(text.split())
    for line in (*LINES, BAD):
        assert "".join(line.finding.found.split()) in joined
        assert "".join(line.finding.advice.split()) in joined


def test_last_words_say_whether_the_quickstart_can_run_and_what_stops_it() -> None:
    assert page.exit_status(LINES) == 0
    assert page.closing_words(LINES)[0].startswith("Everything the quickstart needs is available")
    assert page.closing_words(LINES)[1] == "0 problems, 1 warning, 1 absent (optional), 1 ok."
    assert page.exit_status([*LINES, BAD]) == 1
    assert page.closing_words([*LINES, BAD])[0] == "The quickstart cannot run here yet: runs folder."


def test_json_is_strict_and_complete() -> None:
    whole = json.loads(page.as_json([*LINES, BAD]), parse_constant=lambda name: pytest.fail(name))
    assert (whole["format"], whole["exit_status"]) == (page.FORMAT, 1)
    assert whole["findings"][0]["data"] == {"version": "3.11.7"}
    assert whole["findings"][3]["data"] == {"limit": None}
    assert {entry["verdict"] for entry in whole["findings"]} == {"ok", "warning", "absent", "problem"}


def test_without_rich_the_lines_are_printed_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    page.show(LINES)
    text = capsys.readouterr().out
    assert "warning  torch, devices: CUDA does not respond -> restart the driver" in text


def test_sizes_are_readable() -> None:
    assert [size(value) for value in (12, 64e6, 25.3e9, 4e12)] == ["12 B", "64 MB", "25.3 GB", "4 TB"]


# ---------------------------------------------------------------- the command


def test_command_prints_json_alone_and_returns_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    good = Check("t", "n", lambda machine: ok("fine"))
    bad = Check("t", "m", lambda machine: problem("missing", "get it"))
    assert command.doctor(bench=False, as_json=True, checks=[good]) == 0
    assert [entry["found"] for entry in json.loads(capsys.readouterr().out)["findings"]] == ["fine"]
    assert command.doctor(bench=False, as_json=False, checks=[good, bad]) == 1
    assert "The quickstart cannot run here yet: m." in capsys.readouterr().out


def test_names_of_checks_are_unique_and_deadlines_finite() -> None:
    names = [check.name for check in all_checks()]
    assert len(set(names)) == len(names)
    assert all(0 < check.deadline_s <= 180 for check in all_checks())


@pytest.mark.processes
def test_doctor_imports_neither_torch_nor_pydantic_to_begin_with() -> None:
    code = (
        "import sys; import controller.doctor.command;"
        "print(sorted({'torch', 'transformers', 'pydantic', 'rich', 'zmq', 'psutil'} & set(sys.modules)))"
    )
    home = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(home)}, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", [[], pytest.param(["--bench", "--json"], marks=pytest.mark.thorough)])
def test_real_command_finds_all_that_the_quickstart_needs(arguments: list[str], tmp_path: Path) -> None:
    home = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "controller", "doctor", *arguments],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={"PYTHONPATH": str(home), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "80"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
    if arguments:
        findings = json.loads(done.stdout)["findings"]
        assert {entry["verdict"] for entry in findings} <= {"ok", "warning", "absent"}
        failed = [entry for entry in findings if "the check itself failed" in entry["found"]]
        late = [entry for entry in failed if "no result within" in entry["found"]]  # a busy machine is a warning
        assert failed == late
        figures = {
            entry["data"]["key"] for entry in findings if entry["topic"] == "Benchmark" and "key" in entry["data"]
        }
        assert late or {"product_1", "messages", "write", "start"} <= figures
        assert {"torch", "ZeroMQ", "runs folder"} <= {entry["name"] for entry in findings if entry["verdict"] == "ok"}
    else:
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "Everything the quickstart needs is available" in done.stdout
