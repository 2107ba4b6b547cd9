"""The command line: what a person reads, and the exit status."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from areal_like import __version__
from areal_like.config import dump_yaml
from areal_like.errors import DeadlineExceeded, UserError
from controller.cli import main as command_line
from controller.cli.main import main
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.doctor.supported_versions import python_fault, torch_fault

TINY = """\
name: tiny
model: {init: {model_type: qwen3}, tokenizer: bytes}
data: {train: {generator: running_sum, limit: 20}}
"""


class FakeJob(types.ModuleType):
    """Stands in for controller.cli.jobs: notes calls, and raises what it is given."""

    def __init__(self) -> None:
        super().__init__("controller.cli.jobs")
        self.calls: list[tuple[str, Any]] = []
        self.status = 0
        self.raises: BaseException | None = None

    def _called(self, name: str, value: Any) -> int:
        self.calls.append((name, value))
        if self.raises is not None:
            raise self.raises
        return self.status

    def train(self, config: RunConfig, *, source: str, tables: object, cleaned: object) -> int:
        return self._called("train", (config, source))

    def sft(self, config: RunConfig) -> int:
        return self._called("sft", config)

    def evaluate(self, config: RunConfig, *, tables: object) -> int:
        return self._called("evaluate", config)

    def resume(self, run: Path, *, accept_loss: bool = False) -> int:
        return self._called("resume", run)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeJob:
    import controller.cli

    fake = FakeJob()
    monkeypatch.setitem(sys.modules, "controller.cli.jobs", fake)
    monkeypatch.setattr(controller.cli, "jobs", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return fake


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text.splitlines()


def test_train_hands_the_resolved_config_and_its_source_over(job: FakeJob) -> None:
    assert main(["train", "tiny.yaml", "num_steps=3", "trainer.optimizer.lr=1e-3"]) == 0
    ((name, (config, source)),) = job.calls
    assert (name, source) == ("train", "tiny.yaml")
    assert (config.num_steps, config.trainer.optimizer.lr) == (3, 1e-3)


def test_overrides_may_have_dashes_and_stand_anywhere(job: FakeJob) -> None:
    assert main(["train", "tiny.yaml", "num_steps=3", "--group_size=4", "seed=7"]) == 0
    config = job.calls[0][1][0]
    assert (config.num_steps, config.group_size, config.seed) == (3, 4, 7)


def test_the_jobs_status_is_the_exit_status(job: FakeJob) -> None:
    job.status = 1
    assert main(["train", "tiny.yaml"]) == 1


def test_sft_and_eval_call_their_own(job: FakeJob) -> None:
    assert main(["sft", "tiny.yaml", "warm_start.data.generator=running_sum", "out=here"]) == 0
    assert main(["eval", "tiny.yaml", "data.eval={generator: running_sum, limit: 5}"]) == 0
    assert [name for name, _ in job.calls] == ["sft", "evaluate"]
    assert job.calls[0][1].out == "here"


def test_eval_with_slices_takes_those_of_the_configuration_else_all(job: FakeJob) -> None:
    rows = "data.eval={generator: running_sum, limit: 5}"
    assert main(["eval", "--slices", "tiny.yaml", rows]) == 0
    assert main(["eval", "tiny.yaml", rows, "eval.slices=[terms]", "--slices"]) == 0
    assert main(["eval", "tiny.yaml", rows]) == 0
    assert [config.eval.slices for _, config in job.calls] == [("auto",), ("terms",), ()]


@pytest.mark.usefixtures("job")
class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["train", "tiny.yaml", "num_stps=3"], "num_steps"),
            (["train", "tiny.yml"], "did you mean tiny.yaml"),
            (["train", "tiny.yaml", "data.train.path=rows.jsonl"], "no such file"),
            (["train", "tiny.yaml", "model.path=./no_model"], "no such folder"),
            (["train", "tiny.yaml", "staleness.max_staleness=-3"], "at least 0"),
            (["train", "tiny.yaml", "group_size=1"], "group_size to 2"),
            (["train", "tiny.yaml", "runs_dir=tiny.yaml/runs"], "is a file"),
            (["train", "tiny.yaml", "num_steps"], "key.path=value"),
            (["eval", "tiny.yaml"], "data.eval"),
            (["eval", "tiny.yaml", "data.eval={generator: running_sum, limit: 5}", "eval.slices=[term]"], "terms"),
            (["train", "tiny.yaml", "eval.slices=[auto]"], "eval.slices: this key requires evaluation rows"),
            (["train", "tiny.yaml", "rollout.safety=[{kind: word}]"], "there is no safety stage `word`"),
            (
                ["train", "tiny.yaml", "rollout.safety=[{kind: words, options: {file: no}}]"],
                "rollout.safety.0: no cannot",
            ),
            (["sft", "tiny.yaml"], "warm_start"),
            (["resume", "no_such_run"], "no_such_run"),
            (["validate", "tiny.yaml", "mode=asnyc"], "did you mean `async`"),
        ],
    )
    def test_is_one_line_and_status_2(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        assert main(arguments) == 2
        lines = [line for line in error_lines(capsys) if not line.startswith("note:")]
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert words in lines[0]

    def test_several_are_all_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["validate", "tiny.yaml", "num_steps=x", "grop_size=2", "seed=-1"]) == 2
        assert len(error_lines(capsys)) == 3

    @pytest.mark.parametrize("arguments", [[], ["trane", "x"], ["train"], ["resume"]])
    def test_in_the_command_itself_are_reported_without_usage_noise(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        (line,) = error_lines(capsys)
        assert line.startswith("error: ")

    def test_a_misspelt_command_gets_the_nearest_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["trian", "x"])
        assert error_lines(capsys) == [
            "error: argument COMMAND: invalid choice: 'trian'; did you mean train? (see areal-like --help)"
        ]

    def test_validate_touches_nothing(self, job: FakeJob) -> None:
        assert main(["validate", "tiny.yaml"]) == 0
        assert job.calls == []
        assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


class TestEnds:
    def test_users_mistake_found_later_is_status_2(self, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
        job.raises = UserError("no room", where="disk", remedy="make some")
        assert main(["train", "tiny.yaml"]) == 2
        assert error_lines(capsys) == ["error: disk: no room -> make some"]

    def test_failure_of_the_run_is_status_1(self, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
        job.raises = DeadlineExceeded("a batch", "the trainer", 5.0)
        assert main(["train", "tiny.yaml"]) == 1
        assert error_lines(capsys) == ["error: waited 5 s for a batch (expected from the trainer)"]

    def test_ctrl_c_is_status_130(self, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
        job.raises = KeyboardInterrupt()
        assert main(["train", "tiny.yaml"]) == 130
        assert error_lines(capsys) == ["interrupted"]

    def test_a_defect_of_ours_is_not_hidden(self, job: FakeJob) -> None:
        job.raises = AssertionError("ours")
        with pytest.raises(AssertionError):
            main(["train", "tiny.yaml"])


class TestValidate:
    def test_prints_a_config_that_resolves_to_itself(self, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["validate", "tiny.yaml", "mode=sync", "name=other"]) == 0
        page = capsys.readouterr().out
        Path("again.yaml").write_text(page)
        config = load_config("again.yaml").config
        assert (config.name, config.mode, config.staleness.max_staleness) == ("other", "sync", 0)
        assert dump_yaml(config) in page
        assert job.calls == []

    def test_prints_derived_numbers_and_remarks(self, job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["validate", "tiny.yaml", "staleness.max_staleness=1"]) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert "samples in flight <= 512 = (max_staleness + 1) x groups_per_step x group_size" in page
        assert "rows 20 = data.train" in page
        assert "the summary has no accuracy" in page
        assert "tiny.yaml is valid" in page


class TestInstallation:
    @pytest.mark.parametrize(
        ("version", "is_fine"), [((3, 10), 0), ((3, 11), 1), ((3, 13), 1), ((3, 14), 0), ((4, 0), 0)]
    )
    def test_python_out_of_range_is_a_sentence(self, version: tuple[int, int], is_fine: int) -> None:
        fault = python_fault(version)
        assert (fault == "") == bool(is_fine)
        assert is_fine or "3.11 to 3.13" in fault

    @pytest.mark.parametrize(
        ("version", "is_fine"),
        [
            ("2.11.0", 1),
            ("2.13.0+cpu", 1),
            ("2.15.1+cu130", 1),
            ("2.10.1", 0),
            ("2.16.0.dev20261101", 0),
            ("3.0", 0),
            ("master", 0),
            (None, 0),
        ],
    )
    def test_torch_out_of_range_is_a_sentence(self, version: str | None, is_fine: int) -> None:
        fault = torch_fault(version)
        assert (fault == "") == bool(is_fine)
        assert is_fine or "2.11 to 2.15" in fault

    def test_torch_out_of_range_stops_every_command(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command_line, "_installed", lambda package: "2.9.0")
        assert main(["reference"]) == 2
        assert error_lines(capsys)[0].startswith("error: areal_like runs on torch 2.11 to 2.15")

    @pytest.mark.processes
    def test_module_and_version(self) -> None:
        command = [sys.executable, "-m", "controller", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
        assert done.stdout.strip() == f"areal-like {__version__}"

    @pytest.mark.processes
    def test_validate_imports_no_torch(self) -> None:
        code = (
            "import sys; from controller.cli.main import main; status = main(['validate', 'quickstart']); "
            "sys.exit(7 if 'torch' in sys.modules else status)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=300, cwd=Path(__file__).parents[3]
        )
        assert done.returncode == 0, done.stderr

    def test_a_file_here_under_the_name_of_a_package_is_no_fault(self, job: FakeJob, tmp_path: Path) -> None:
        (tmp_path / "trainer.py").write_text("raise SystemExit('mine')")
        assert main(["train", "tiny.yaml"]) == 0
        assert len(job.calls) == 1
