"""`areal-like init`: every combination of answers is a valid config, and nothing is overwritten."""

from __future__ import annotations

import importlib.util
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.cli.arguments import make_parser
from controller.cli.init import MAX_SMALL_BYTES, _write, init
from controller.cli.main import main
from controller.cli.new_job import ANSWER_KINDS, HARDWARE, TINY, TRACKERS, NewJob
from controller.config.loading import load_config
from controller.config.validation.pool_sizes import gpus_of_run
from controller.preflight.found import Preflight

MODELS = (TINY, "Qwen/Qwen3-1.7B")
COMBINATIONS = [
    (*one, "none") for one in itertools.product(ANSWER_KINDS, MODELS, HARDWARE) if one[1] != TINY or one[2] == "cpu"
] + [("math", TINY, "cpu", tracker) for tracker in TRACKERS if tracker != "none"]
"""The tracker is independent of the other answers."""


class Terminal(io.StringIO):
    """Standard input that a person sits at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "The capital of France?", "answer": "Paris"}\n')
    Path("heldout.jsonl").write_text('{"prompt": "The capital of Italy?", "answer": "Rome"}\n')


@pytest.mark.parametrize(("answer", "model", "hardware", "tracker"), COMBINATIONS)
@pytest.mark.parametrize("data", ["train.jsonl", "train.jsonl,heldout.jsonl"])
def test_every_combination_of_answers_is_a_config_without_contradiction(
    data: str, answer: str, model: str, hardware: str, tracker: str
) -> None:
    job = NewJob(Path("mine.yaml"), data, answer, model, hardware, tracker)
    for path, text in job.files().items():
        path.write_text(text)
    config = load_config("mine.yaml").config
    assert config.name == "mine"
    assert (config.data.eval is None) == (data == "train.jsonl")
    assert config.model.path == (None if model == TINY else model)
    if hardware != "cpu":
        assert gpus_of_run(config) == int(hardware.removesuffix("gpu"))
    trackers = {name: getattr(config.metrics, name) for name in TRACKERS if name != "none"}
    assert [name for name, settings in trackers.items() if settings] == ([] if tracker == "none" else [tracker])


def test_a_job_for_a_cluster_says_what_its_nodes_must_have() -> None:
    job = NewJob(Path("mine.yaml"), "train.jsonl", "math", MODELS[1], "64gpu", "none")
    (note,) = job.notes
    assert "runs_dir must be a folder that all nodes share" in note
    (text,) = job.files().values()
    assert "kind: ray" in text


def test_flags_write_a_job_that_validate_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.yaml", "--data", "train.jsonl,heldout.jsonl", "--no-probe"]) == 0
    said = capsys.readouterr().out
    assert "wrote mine.yaml" in said
    assert "validate mine.yaml found no errors" in said
    assert said.splitlines()[-1] == "next step: areal-like train mine.yaml"


@pytest.mark.processes
def test_own_scorer_is_written_with_a_test_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)
    assert main(["init", "my-job.yaml", "--data", "train.jsonl", "--answer", "text", "--no-probe"]) == 0
    assert load_config("my-job.yaml").config.reward.scorers[0].kind == "my_job_reward:score"
    monkeypatch.syspath_prepend(str(Path.cwd()))
    spec = importlib.util.spec_from_file_location("written", "test_my_job_reward.py")
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    sys.modules.pop("my_job_reward")
    tests = [value for name, value in vars(written).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.processes
def test_commands_work_from_the_current_folder_wherever_the_config_lies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AREAL_LIKE_USER_PATH", raising=False)
    Path("my jobs").mkdir()
    assert main(["init", "my jobs/mine.yaml", "--data", "train.jsonl", "--answer", "text", "--no-probe"]) == 0
    said = capsys.readouterr().out
    assert "next step: areal-like train 'my jobs/mine.yaml'" in said
    assert "areal-like probe 'my jobs/mine.yaml'  " in Path("my jobs/mine.yaml").read_text()
    assert Path("mine_reward.py").is_file()
    assert Path("test_mine_reward.py").is_file()
    assert main(["validate", "my jobs/mine.yaml"]) == 0


@pytest.mark.parametrize(
    ("stem", "module"), [("8b math", "job_8b_math_reward"), ("модель", "job_reward"), ("a.b-c", "a_b_c_reward")]
)
def test_name_that_no_module_may_have_becomes_one_and_is_said(
    stem: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("controller.cli.init.look", lambda config, purpose: Preflight())
    assert main(["init", f"{stem}.yaml", "--data", "train.jsonl", "--answer", "text", "--no-probe"]) == 0
    assert load_config(f"{stem}.yaml").config.reward.scorers[0].kind == f"{module}:score"
    assert f"from {module} import" in Path(f"test_{module}.py").read_text()
    assert f"note: the scorer is named {module}, because `{stem}_reward` cannot be" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".yaml", " mine.yaml", "a\nb.yaml"])
def test_name_that_no_run_may_have_is_refused_before_anything_is_written(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name, "--data", "train.jsonl", "--answer", "text"]) == 2
    assert "is not a valid folder name" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_name_with_quotes_is_written_into_a_scorer_that_python_reads() -> None:
    job = NewJob(Path('say "hi" \\x.yaml'), "train.jsonl", "text", TINY, "cpu", "none")
    for path, text in job.files().items():
        if path.suffix == ".py":
            compile(text, str(path), "exec")


def test_where_one_file_cannot_be_written_none_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    job = NewJob(Path("mine.yaml"), "train.jsonl", "text", TINY, "cpu", "none")
    with pytest.raises(UserError, match=r"nowhere.*cannot be written"):
        _write({**job.files(), Path("nowhere/more.py"): ""})
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in Path().iterdir()) == ["heldout.jsonl", "train.jsonl"]


@pytest.mark.parametrize(("end", "status"), [(EOFError, 2), (KeyboardInterrupt, 130)])
def test_questions_that_are_left_end_in_one_sentence_with_the_flags(
    end: type[BaseException], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: Iterator[str] = iter(["train.jsonl"])

    def left(question: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise end from None

    monkeypatch.setattr("builtins.input", left)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["init", "my job.yaml"]) == status
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "no file was written" in said
    assert "areal-like init 'my job.yaml' --data train.jsonl --answer math|code|text" in said
    assert not Path("my job.yaml").exists()


def test_closed_input_is_the_same_as_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of `areal-like init <&-`
    assert main(["init", "mine.yaml"]) == 2
    assert "--data: no data file was specified" in capsys.readouterr().err


class Commands(list[list[str]]):
    """Commands that were run; all end with one exit status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __call__(self, words: Sequence[str]) -> int:
        self.append(list(words))
        return self.status


def initialised(*flags: str, status: int = 0) -> tuple[int, Commands]:
    """Exit status of the command, and the commands it ran."""
    run = Commands(status)
    return init(make_parser(lambda _: 2).parse_args(["init", "mine.yaml", "--data", "train.jsonl", *flags]), run), run


def small_model(size: int) -> str:
    """A folder whose weights have that many bytes, with no content."""
    folder = Path(f"model-{size}")
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return str(folder)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of rows and model, which other tests make."""
    monkeypatch.setattr("controller.cli.init.look", lambda config, purpose: Preflight())


@pytest.mark.usefixtures("unchecked")
def test_small_model_of_this_machine_is_probed_and_others_only_if_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    probed = [["probe", "mine.yaml"]]
    small, large = small_model(MAX_SMALL_BYTES), small_model(MAX_SMALL_BYTES + 1)
    cases: list[tuple[list[str], list[list[str]]]] = [
        ([], probed), (["--no-probe"], []), (["--model", small], probed), (["--model", large], []),
        (["--model", large, "--probe"], probed), (["--model", "Qwen/Qwen3-1.7B"], []),
        (["--model", small, "--hardware", "1gpu"], []),
    ]  # fmt: skip
    for flags, commands in cases:
        assert initialised(*flags) == (0, commands), flags
        said = capsys.readouterr().out
        is_left_to_the_user = "--no-probe" not in flags and not commands
        assert ("next steps: areal-like probe mine.yaml, then areal-like train" in said) == is_left_to_the_user, flags
        Path("mine.yaml").unlink()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("flags", "status", "expected"), [([], 1, 0), (["--probe"], 1, 1), ([], 2, 2), (["--probe"], 2, 2)]
)
def test_findings_fail_the_command_only_if_the_probe_was_asked_for(
    flags: list[str], status: int, expected: int
) -> None:
    assert initialised(*flags, status=status)[0] == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("reply", "commands"), [("y", [["probe", "mine.yaml"]]), ("", []), (None, [])])
def test_probe_of_a_large_model_is_offered_on_a_terminal(reply: str | None, commands: list[list[str]]) -> None:
    answers: Iterator[str] = iter(["", "", "Qwen/Qwen3-1.7B", "", "", *([] if reply is None else [reply])])

    def left(question: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    run = Commands(5)
    arguments = make_parser(lambda _: 2).parse_args(["init", "mine.yaml"])
    assert init(arguments, run, left) == (5 if commands else 0)
    assert run == commands


def test_nothing_is_overwritten_and_nothing_else_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("test_mine_reward.py").write_text("mine")
    assert main(["init", "mine.yaml", "--data", "train.jsonl", "--answer", "text"]) == 2
    assert "test_mine_reward.py: the file already exists and will not be overwritten" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["heldout.jsonl", "test_mine_reward.py", "train.jsonl"]


def test_mistake_in_the_answers_is_one_error_and_the_config_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.yaml", "--data", "none.jsonl"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert Path("mine.yaml").is_file()


def test_tiny_model_on_a_gpu_and_rows_without_a_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.yaml", "--data", "train.jsonl", "--hardware", "8gpu"]) == 2
    assert main(["init", "mine.yaml", "--model", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "the tiny model can only be used on a CPU" in said
    assert "no data file was specified" in said
    assert not Path("mine.yaml").exists()


def test_questions_are_asked_again_until_the_answer_is_one() -> None:
    answers: Iterator[str] = iter(["", "poem", "math", "", "", "tensorboard"])
    commands: list[list[str]] = []
    arguments = make_parser(lambda _: 2).parse_args(["init", "asked.yaml"])
    status = init(arguments, lambda words: commands.append(list(words)) or 5, lambda _: next(answers))
    assert status == 5
    assert commands == [["probe", "asked.yaml"]]
    assert load_config("asked.yaml").config.metrics.tensorboard is True
