"""Claims about the look at the user's scorers: every mistake is found, in words, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import controller
from controller.config.loading import load_config
from controller.config.problems import Problem
from controller.preflight import preflight, user_code
from controller.wiring.process_specs import SCORER_CHECK
from services.processes.process_tree import living

pytestmark = pytest.mark.processes

PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def look(source: str, name: str = "mine:score", timeout_s: float = PATIENCE_S, **options: object) -> list[Problem]:
    Path("mine.py").write_text(source)
    return list(user_code.problems_of(SCORER_CHECK, {"reward.scorers.0.kind": (name, options)}, timeout_s))


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        ("import no_such_thing", "mine:score", "module mine cannot be imported (ModuleNotFoundError"),
        ("def score(row): ...", "mine:score", "cannot be called with the required arguments"),
        ("", "json:nope", "module json has no attribute nope"),
        ("score = 3", "mine:score", "is not callable"),
        ("import os; os._exit(3)", "mine:score", "ended the process with status 3"),
        ("raise SystemExit('away')", "mine:score", "SystemExit: away"),
    ],
)
def test_mistake_in_a_scorer_is_found_before_anything_starts(source: str, name: str, words: str) -> None:
    (problem,) = look(source, name)
    assert problem.keys == ("reward.scorers.0.kind",)
    assert words in problem.what
    assert "mine" not in sys.modules, "the controller imports nothing of the user's"


def test_scorer_that_can_be_called_is_no_problem_whatever_its_module_prints() -> None:
    assert look("print('hello')\ndef score(row, response, *, level, **info): return 1.0", level=3) == []


def test_import_that_hangs_is_given_up_and_killed_with_what_it_started() -> None:
    source = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('pids.tmp', 'pids')\n"
        "time.sleep(600)\n"
    )
    (problem,) = look(source, timeout_s=5.0)
    assert "takes more than 5 s" in problem.what
    if Path("pids").exists():  # a busy machine may not have come so far
        pids = [int(pid) for pid in Path("pids").read_text().split()]
        deadline = time.monotonic() + PATIENCE_S  # the kernel takes the killed away in its own time
        while (left := living(pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left


def test_import_that_hangs_is_killed_with_what_it_started_in_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('pids.tmp', 'pids')\n"
        "time.sleep(600)\n"
    )

    def wait_for_family(*_: object) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not Path("pids").exists():
            assert time.monotonic() < deadline_s, "the module was not imported"
            time.sleep(0.01)

    monkeypatch.setattr(user_code, "SLOW_S", 0.01)
    monkeypatch.setattr(user_code, "print_slow", wait_for_family)
    (problem,) = look(source, timeout_s=0.02)
    assert "takes more than 0.02 s" in problem.what
    assert not living([int(pid) for pid in Path("pids").read_text().split()])


def test_preflight_tries_a_loss_of_the_users() -> None:
    os.environ.pop("AREAL_LIKE_USER_PATH", None)
    Path("mine.py").write_text("def loss(logprobs_N, tokens): return logprobs_N.mean()")
    config = load_config("quickstart", ["trainer.loss.kind=mine:loss"]).config
    (problem,) = [one for one in preflight.look(config, "train").problems if "trainer.loss.kind" in one.keys]
    assert "returned a tensor of shape [] for 4 tokens" in problem.what


def test_preflight_looks_at_the_functions_that_the_run_itself_will_call() -> None:
    os.environ.pop("AREAL_LIKE_USER_PATH", None)
    Path("mine.py").write_text("def score(row): ...")
    config = load_config("quickstart", ['reward.scorers=[{kind: "mine:score"}]']).config
    words = [problem.what for problem in preflight.look(config, "train").problems]
    assert any("cannot be called with the required arguments" in what for what in words), words


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def score(row, response, **info): return float(response == row['target'])", "(KeyError: 'target')"),
        ("def score(row, response, **info): return None", "must be a number, not NoneType"),
        ("def score(row, response, **info): return float('####' in response and response.split()[1] == 'x')", None),
    ],
)
def test_scorer_is_tried_on_the_first_rows_with_their_gold_answers(source: str, words: str | None) -> None:
    os.environ.pop("AREAL_LIKE_USER_PATH", None)
    Path("mine.py").write_text(source)
    config = load_config("quickstart", ['reward.scorers=[{kind: "mine:score"}]']).config
    found = [problem for problem in preflight.look(config, "train").problems if "reward" in problem.keys[0]]
    assert len(found) == (words is not None)
    assert all(
        words in problem.what and "the columns of the row are prompt, answer" in problem.remedy
        for problem in found
        if words
    )


def test_scorer_that_hangs_when_it_is_tried_is_left_to_the_runs_deadlines() -> None:
    os.environ.pop("AREAL_LIKE_USER_PATH", None)
    Path("mine.py").write_text(
        "import threading\n"
        "def hangs(row, response, **info): open('called', 'w'); threading.Event().wait()\n"
        "def wrong(row, response, **info): return None\n"
    )
    scorers = 'reward.scorers=[{kind: "mine:wrong"}, {kind: "mine:hangs"}]'
    config = load_config("quickstart", [scorers, "reward.timeout_s=0.5"]).config
    found = [problem for problem in preflight.look(config, "train").problems if "reward" in problem.keys[0]]
    assert [problem.keys[0] for problem in found] == ["reward.scorers.0.kind"]
    assert Path("called").exists()


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("def score(prompts, completions, **kw): return [0.0]", "prompts=[row['prompt']], completions=[response]"),
        ("def score(completions, answer, **kw): return [0.0]", "prompts=[row['prompt']], completions=[response]"),
        ("def score(data_source, solution_str, ground_truth, extra_info=None): return 0.0", "solution_str=response"),
    ],
)
def test_function_written_for_another_system_is_refused_with_the_call_that_uses_it(source: str, call: str) -> None:
    (problem,) = look(source)
    assert "def score(row, response, **info)" in problem.remedy
    assert call in problem.remedy


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_thing", "module mine cannot be imported (ModuleNotFoundError"),
        ("class Turns: ...", "must define `is_resumable` and `async run(task, tools)`"),
        ("class Turns:\n    is_resumable = False\n    async def run(self, task, tools): ...", None),
    ],
)
def test_mistake_in_a_workflow_is_found_before_anything_starts(source: str, words: str | None) -> None:
    Path("mine.py").write_text(source)
    config = load_config("quickstart", ["rollout.workflow=mine:Turns"]).config
    found = [p.what for p in preflight.look(config, "train").problems if p.keys == ("rollout.workflow",)]
    assert len(found) == (words is not None)
    assert all(words in what for what in found if words)


@pytest.mark.parametrize(
    ("options", "words"),
    [("{}", "missing: depth"), ("{depth: 2, width: 3}", "unknown: width"), ("{depth: 2}", None)],
)
def test_options_that_a_workflow_does_not_take_are_found_before_anything_starts(
    options: str, words: str | None
) -> None:
    Path("mine.py").write_text(
        "class Turns:\n    is_resumable = False\n    def __init__(self, depth): ...\n"
        "    async def run(self, task, tools): ..."
    )
    overrides = ["rollout.workflow=mine:Turns", f"rollout.workflow_options={options}"]
    problems = preflight.look(load_config("quickstart", overrides).config, "train").problems
    found = [problem for problem in problems if problem.keys == ("rollout.workflow_options",)]
    assert [problem.what for problem in found] == (
        [f"`mine:Turns`: the options of mine:Turns are not valid ({words})"] if words else []
    )
    assert all(problem.remedy == "use these options: depth" for problem in found)


@pytest.mark.parametrize(
    ("source", "options", "key", "words"),
    [
        ("import not_there\nclass Maze: ...", "{}", "reward.environment.kind", "not_there"),
        ("class Maze:\n    def reset(self, row, seed): ...", "{}", "reward.environment.kind", "no method `step`"),
        (
            "class Maze:\n    def reset(self, row, seed): ...\n    def step(self, action): ...",
            "{depth: 2}",
            "reward.environment.options",
            "unknown: depth",
        ),
    ],
)
def test_mistake_in_an_environment_is_found_before_anything_starts(
    source: str, options: str, key: str, words: str
) -> None:
    Path("mine.py").write_text(source)
    overrides = [
        "rollout.workflow=environment",
        "reward.scorers=[]",
        f"reward.environment={{kind: 'mine:Maze', options: {options}}}",
    ]
    problems = preflight.look(load_config("quickstart", overrides).config, "train").problems
    assert [problem.keys for problem in problems] == [(key,)]
    assert words in problems[0].what


CHECKING = """
import sys
sys.path.insert(0, {home!r})
from controller.preflight import user_code
from controller.wiring.process_specs import {checker}
list(user_code.problems_of({checker}, {{"reward.scorers.0.kind": ("mine:score", {given})}}, 600.0))
"""


@pytest.mark.parametrize(
    ("checker", "given"), [("SCORER_CHECK", {}), ("WORKFLOW_CHECK", {"options": {}, "models": []})]
)
def test_look_dies_with_a_command_that_is_killed_while_a_module_hangs_in_its_import(
    tmp_path: Path, checker: str, given: dict[str, object]
) -> None:
    Path("mine.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('pids.tmp', 'pids')\n"
        "time.sleep(600)\n"
    )
    home = str(Path(controller.__path__[0]).parent)
    command = subprocess.Popen([sys.executable, "-c", CHECKING.format(home=home, checker=checker, given=given)])
    deadline = time.monotonic() + PATIENCE_S
    while not Path("pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    command.kill()
    command.wait()
    while (left := living(pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_slow_import_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_code, "SLOW_S", 0.1)
    assert look("import time; time.sleep(1)\ndef score(row, response, **info): return 1.0") == []
    said = capsys.readouterr().err
    assert said == "importing mine:score has taken 0.1 s so far; it is abandoned after 120 s\n"
