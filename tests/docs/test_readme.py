"""The README's commands work in a folder with nothing but the user's own rows."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_zoo as zoo

from areal_like.import_check import USER_PATH
from controller.cli.arguments import make_parser
from controller.cli.main import main
from controller.config.loading import load_config
from controller.preflight import preflight
from controller.preflight.found import Preflight
from controller.python_api import controller_process

ROOT = Path(__file__).resolve().parents[2]
README, CONFIGURING = ROOT / "README.md", ROOT / "docs" / "configuring.md"


def own_job() -> list[list[str]]:
    """The commands of the section about a user's own job, without `areal-like`."""
    text = block(README, "## Your own job", "")
    return [words[1:] for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def block(page: Path, title: str, language: str) -> str:
    """The first fenced block of this language in a section."""
    section = page.read_text().partition(title)[2]
    return next(text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S) if name == language)


def refuse(text: str) -> int:
    pytest.fail(text)


def test_every_command_is_one() -> None:
    commands = own_job()
    assert {words[0] for words in commands} >= {"init", "validate", "probe", "train", "resume", "eval", "simulate"}
    for words in commands:
        make_parser(refuse).parse_args(words)


@pytest.mark.processes
@pytest.mark.parametrize("purpose", ["validate", "train"])
def test_a_job_on_own_rows_is_refused_for_nothing_but_the_machine(
    purpose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"question": "What is 2 + 2?", "answer": "2 + 2 = 4\n#### 4"})
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text(f"{row}\n" * 80)
    assert main([*own_job()[0], "--data", "train.jsonl,test.jsonl", "--no-probe"]) == 0
    arguments = next(make_parser(refuse).parse_args(words) for words in own_job() if words[0] == purpose)
    loaded = load_config(arguments.config, arguments.overrides)
    found = preflight.look(loaded.config, purpose)  # type: ignore[arg-type]
    assert [str(problem) for problem in found.problems] == []


def test_the_configuration_shown_is_refused_for_nothing_but_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "What is 2 + 2?", "answer": "4"})
    for name in ("train.jsonl", "heldout.jsonl"):
        Path(name).write_text(f"{row}\n" * 40)
    Path("mine.yaml").write_text(block(CONFIGURING, "## Your first config", "yaml"))
    found = preflight.look(load_config("mine.yaml", []).config, "validate")
    assert [str(problem) for problem in found.problems] == []


@pytest.mark.processes
def test_rows_for_evaluation_that_are_not_there_say_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "#### 4"}) + "\n")
    missing = load_config("gsm8k_tiny", ["data.train.path=train.jsonl"]).config
    (problem,) = preflight.look(missing, "validate").problems
    assert problem.keys == ("data.eval",)
    assert "data.eval=null" in problem.remedy
    without = load_config("gsm8k_tiny", ["data.train.path=train.jsonl", "data.eval=null"]).config
    assert preflight.look(without, "validate").problems == []


def test_the_program_shown_starts_the_job_with_its_own_scorer_and_prints_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child process is replaced by a finished run; the config and the overrides are checked as in any other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(USER_PATH, raising=False)
    monkeypatch.setattr("controller.cli.init.look", lambda config, purpose: Preflight())
    assert main([*own_job()[0], "--data", "train.jsonl", "--no-probe"]) == 0
    capsys.readouterr()
    folder, started = zoo.make_run(tmp_path / "runs"), list[list[str]]()
    folder.final.mkdir()
    (folder.final / "config.json").write_text("{}")

    def start(arguments: list[str], *, config_text: str | None = None) -> SimpleNamespace:
        started.append(arguments)
        return SimpleNamespace(folder=folder, is_alive=False, wait=lambda timeout_s: True)

    monkeypatch.setattr(controller_process, "start", start)
    Path("my_job.py").write_text(block(README, "The same from Python", "python"))
    names = runpy.run_path("my_job.py", run_name="__main__")
    assert started == [["train", "mine.yaml", "num_steps=50", 'reward={"scorers": [{"kind": "my_job:score"}]}']]
    *steps, model = capsys.readouterr().out.splitlines()
    rewards = [json.loads(line).get("reward_mean") for line in folder.metrics.read_text().splitlines()[:3]]
    assert steps == [f"{step} {reward}" for step, reward in enumerate(rewards, start=1)]
    assert model == str(folder.final)
    assert [names["score"]({"answer": "4"}, said, finish_reason="stop") for said in ("so 4", "5")] == [1.0, 0.0]
