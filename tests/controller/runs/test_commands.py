"""The commands as typed: exit status, words, and no traceback whatever the folder contains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_zoo as zoo

from controller.cli.arguments import RUN_COMMANDS
from controller.cli.main import main
from controller.report.finding import Finding
from controller.runs.commands import _COMMANDS

REPOSITORY = Path(__file__).resolve().parents[3]
LOOKING = (["status"], ["status", "--json"], ["logs"], ["samples"], ["samples", "--format", "jsonl"])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    found = capsys.readouterr()
    assert "Traceback" not in found.err + found.out
    return code, found.out, found.err


@pytest.mark.processes
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_command_works_on_every_kind_of_run(tmp_path, capsys, kind):
    zoo.make_sampled_run(tmp_path / "runs", kind, "job")
    expected = {"failed": 1, "crashed": 1, "foreign": 3}.get(kind, 0)
    assert typed(capsys, "status", "job")[0] == expected
    code, out, _ = typed(capsys, "status", "job", "--json")
    assert (code, json.loads(out)["kind"]) == (expected, kind)
    assert typed(capsys, "logs", "job", "--tail", "2")[0] == 0
    assert typed(capsys, "samples", "job", "--worst", "--limit", "2")[0] == 0
    assert typed(capsys, "samples", "job", "--format", "html")[0] == 0
    assert typed(capsys, "ps", "--all")[0] == 0
    if kind != "running":
        assert typed(capsys, "stop", "job")[0] == (3 if kind == "foreign" else 0)


DAMAGE = {
    "state.json is empty": lambda folder: folder.state.write_text(""),
    "state.json is half": lambda folder: folder.state.write_text('{"format": 1, "sta'),
    "state.json is gone": lambda folder: folder.state.unlink(),
    "layout is newer": lambda folder: zoo.edit_state(folder, format=2),
}


UNREADABLE = [name for name in DAMAGE if name.endswith(("empty", "half"))]
BEYOND = [name for name in DAMAGE if name not in UNREADABLE]


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize(
    "command", [*(one for one in LOOKING if one != ["logs"]), ["logs", "--tail", "2"]], ids=" ".join
)
def test_damaged_state_is_said_and_hides_nothing_else(tmp_path, capsys, command, damage):
    folder = zoo.make_sampled_run(tmp_path / "runs", "finished", "job")
    _, whole, _ = typed(capsys, command[0], "job", *command[1:])
    DAMAGE[damage](folder)
    code, out, err = typed(capsys, command[0], "job", *command[1:])
    assert "state.json: the run's status file is damaged" in err
    assert "error:" not in err
    if command[0] == "status":
        assert code == 3, "whether it goes on cannot be known"
        assert "not known whether the run is in progress" in out
    else:
        assert (code, out) == (0, whole)


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize("command", ["stop", "resume"])
def test_run_with_a_damaged_state_is_neither_stopped_nor_resumed(tmp_path, capsys, command, damage):
    folder = zoo.make_sampled_run(tmp_path / "runs", "finished", "job")
    DAMAGE[damage](folder)
    code, out, err = typed(capsys, command, "job")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "state.json" in line


@pytest.mark.parametrize("damage", BEYOND)
@pytest.mark.parametrize("command", [*LOOKING, ["stop"], ["report"], ["compare"], ["resume"]], ids=" ".join)
def test_folder_that_is_no_run_any_more_is_one_error(tmp_path, capsys, command, damage):
    folder = zoo.make_sampled_run(tmp_path / "runs", "finished", "job")
    DAMAGE[damage](folder)
    code, out, err = typed(capsys, command[0], "job", *command[1:])
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "job" in line


@pytest.mark.parametrize("command", [*LOOKING, ["stop"], ["report"], ["compare"]], ids=" ".join)
def test_run_that_is_not_there_is_one_error_that_names_the_nearest(tmp_path, capsys, command):
    zoo.make_run(tmp_path / "runs", "finished", "quickstart")
    code, _, err = typed(capsys, command[0], "quikstart", *command[1:])
    assert code == 2
    assert err.splitlines() == [
        line for line in err.splitlines() if "quickstart" in line and line.startswith("error: ")
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status"], "RUN"),
        (["logs", "job", "--tail", "-3"], "neither `all` nor a whole number"),
        (["logs", "job", "--tail", "many"], "neither `all` nor a whole number"),
        (["logs", "job", "-p", "nobody"], "processes with a log: controller, rollout-0, trainer"),
        (["stop", "job", "--timeout", "0"], "a number of seconds greater than 0"),
        (["stop", "job", "--timeout", "nan"], "a number of seconds greater than 0"),
        (["samples", "job", "--step", "first"], "not a whole number"),
        (["samples", "job", "--step", "99"], "there is no step 99"),
        (["samples", "job", "--worst", "--best"], "not allowed with"),
        (["samples", "job", "--format", "pdf"], "invalid choice"),
        (["samples", "job", "--out", "no/where"], "--out FILE"),
        (["ps", "--runs-dir", "nowhere"], "no such folder"),
        (["status", "job", "--interval", "x"], "a number of seconds greater than 0"),
        (["compare"], "RUN"),
    ],
)
def test_mistake_in_the_command_is_one_error(tmp_path, capsys, arguments, words):
    zoo.make_sampled_run(tmp_path / "runs", "finished", "job")
    code, _, err = typed(capsys, *arguments)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_every_command_on_a_run_is_dispatched_as_one():
    assert set(RUN_COMMANDS) == set(_COMMANDS)


@pytest.mark.parametrize("command", [*RUN_COMMANDS, "train", "resume"])
def test_help_of_every_command_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = typed(capsys, command, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 84, "examples may stand out a little"
    assert len(out.split("\n\n")[1]) >= 10


@pytest.mark.processes
def test_report_compare_and_doctor_are_called_with_what_was_typed(tmp_path, capsys, monkeypatch):
    called: list[object] = []

    def doctor(*, bench: bool, as_json: bool) -> int:
        called.append((bench, as_json))
        return 7

    died = Finding("crashed", "bad", "The run crashed")
    monkeypatch.setattr(
        "controller.report.page.draw_report", lambda folder, *_: called.append(folder.name) or ("page", [died])
    )
    monkeypatch.setattr("controller.report.compare.compare", lambda folders, out: called.append((len(folders), out)))
    monkeypatch.setattr("controller.doctor.command.doctor", doctor)
    zoo.make_run(tmp_path / "runs", "crashed", "job")
    assert typed(capsys, "report", "job")[:2] == (0, "bad: The run crashed\nreport: page\n")
    assert typed(capsys, "compare", "job", "job", "--out", "there")[0] == 0
    assert typed(capsys, "doctor", "--bench")[0] == 7
    assert called == ["job", (2, Path("there")), (True, False)]


def test_top_help_names_every_command(capsys):
    out = typed(capsys, "--help")[1]
    for command in RUN_COMMANDS:
        assert f"\n    {command} " in out
    assert "exit status" in out


@pytest.mark.processes
def test_looking_at_runs_imports_neither_torch_nor_transformers(tmp_path):
    folder = zoo.make_sampled_run(tmp_path)
    code = (
        "import sys; from controller.cli.main import main\n"
        "for words in (['status'], ['samples'], ['samples', '--format', 'html'], ['logs']):\n"
        f"    main([*words, {str(folder.root)!r}])\n"
        "main(['ps'])\n"
        "heavy = {'torch', 'transformers', 'plotly', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_commands_that_only_read_files_import_neither_settings_nor_arrays(tmp_path):
    """These take most of the half second of processor time that a command with a configuration starts with."""
    folder = zoo.make_sampled_run(tmp_path)
    code = (
        "import sys; from controller.cli.main import main\n"
        f"main(['status', {str(folder.root)!r}]); main(['logs', {str(folder.root)!r}]); main(['ps'])\n"
        "heavy = {'pydantic', 'numpy', 'asyncio', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_looking_works_where_torch_does_not(tmp_path, capsys, monkeypatch):
    from controller.cli import main

    monkeypatch.setattr(main, "_installed", lambda package: None)
    zoo.make_run(tmp_path / "runs", "finished", "job")
    assert typed(capsys, "status", "job")[0] == 0
    assert typed(capsys, "reference")[0] == 2


@pytest.mark.processes
def test_broken_pipe_is_no_traceback(tmp_path):
    folder = zoo.make_sampled_run(tmp_path)
    command = f"{sys.executable} -m controller samples {folder.root} --limit all --full | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("finished: 6")
