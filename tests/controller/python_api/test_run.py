"""`Run` shows what the run's files say, ends with it, and raises how it ended."""

from __future__ import annotations

import json

import pytest
import run_zoo as zoo

import areal_like
from areal_like.errors import DeadlineExceeded, RunFailed, UserError
from controller.python_api import run as run_module
from controller.python_api.run import Run


class FakeProcess:
    """A controller that writes a step at each wait, and has ended after the last."""

    def __init__(self, folder, num_steps=3, failure=None) -> None:
        self.folder, self.failure = folder, failure
        self._rows = [{"kind": "step", "step": step, "loss": 0.1} for step in range(1, num_steps + 1)]
        folder.metrics.unlink(missing_ok=True)
        folder.status.unlink(missing_ok=True)
        self.output = "printed"

    @property
    def is_alive(self) -> bool:
        return bool(self._rows)

    def wait(self, timeout_s=None) -> bool:
        if self._rows:
            with self.folder.metrics.open("a") as file:
                file.write(json.dumps(self._rows.pop(0)) + "\n")
        return not self._rows

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


def test_run_that_exists_is_opened_by_folder_and_by_name(tmp_path, monkeypatch):
    folder = zoo.make_run(tmp_path / "runs", "finished", "first")
    monkeypatch.chdir(tmp_path)
    for run in (areal_like.Run("first"), areal_like.Run(folder.root)):
        assert (run.name, run.folder) == ("first", folder.root)
        assert run.wait() is run
    with pytest.raises(UserError, match="there is no run"):
        Run("second")


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["running", "finished", "stopped", "failed", "crashed", "foreign"])
def test_status_is_what_the_command_shows(tmp_path, kind):
    status = Run(zoo.make_run(tmp_path, kind).root).status
    assert status.state == kind
    assert kind in status.message or kind == "foreign"
    assert (status.step, status.num_steps) == (3, 6)
    assert status.accuracy == {0: 0.235, 3: 0.61}


def test_metrics_are_rows_of_one_kind_or_of_all(tmp_path):
    run = Run(zoo.make_run(tmp_path).root)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert {row["kind"] for row in run.metrics("")} > {"step"}
    assert {row["kind"] for row in run.metrics("pulse")} == {"pulse"}


def test_samples_are_those_of_the_command(tmp_path):
    run = Run(zoo.make_sampled_run(tmp_path).root)
    best = run.samples(group=0, order="best", limit=1)
    assert [(sample.answer, sample.reward) for sample in best] == [("four", 1.0)]
    assert {sample.step for sample in run.samples(step=1)} == {1}
    with pytest.raises(UserError, match="no ledger"):
        Run(zoo.make_run(tmp_path, name="empty").root).samples()


def test_final_model_is_there_only_when_the_run_is_finished(tmp_path):
    for kind, is_there in (("finished", True), ("stopped", False)):
        folder = zoo.make_run(tmp_path, kind)
        run = Run(folder.root)
        assert run.final_model is None
        folder.final.mkdir(exist_ok=True)
        (folder.final / "config.json").write_text("{}")
        assert run.final_model == (folder.final if is_there else None)


def test_iteration_yields_every_step_once_and_ends_with_the_run(tmp_path):
    run = Run._started(FakeProcess(zoo.make_run(tmp_path), num_steps=3))
    assert [row["step"] for row in run] == [1, 2, 3]
    assert [row["step"] for row in run] == [1, 2, 3]


def test_iteration_reads_all_when_more_than_the_tail_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "TAIL_BYTES", 50)
    folder = zoo.make_run(tmp_path)
    process = FakeProcess(folder, num_steps=9)
    run = Run._started(process)
    steps = iter(run)
    seen = [next(steps)["step"]]
    while not process.wait():  # everything is written before the next look
        pass
    seen += [row["step"] for row in steps]
    assert seen == list(range(1, 10))


def test_wait_returns_the_finished_run(tmp_path):
    run = Run._started(FakeProcess(zoo.make_run(tmp_path)))
    assert run.status.state == "running"
    assert run.wait() is run
    assert run.status.state == "finished"
    assert run.output == "printed"


@pytest.mark.parametrize("failure", [RunFailed("failed", "trainer: disk full"), UserError("no gold answer")])
def test_wait_and_iteration_raise_what_the_command_printed(tmp_path, failure):
    folder = zoo.make_run(tmp_path, "failed")
    with pytest.raises(type(failure), match=str(failure)):
        Run._started(FakeProcess(folder, failure=failure)).wait()
    with pytest.raises(type(failure), match=str(failure)):
        list(Run._started(FakeProcess(folder, failure=failure)))


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "words"), [("failed", "disk full"), ("crashed", "crashed")])
def test_waiting_for_an_opened_run_that_failed_raises(tmp_path, kind, words):
    with pytest.raises(RunFailed, match=words):
        Run(zoo.make_run(tmp_path, kind).root).wait()


def test_wait_has_a_deadline(tmp_path):
    with pytest.raises(DeadlineExceeded, match="the end of running"):
        Run(zoo.make_run(tmp_path, "running").root).wait(timeout_s=0.0)


def test_stop_of_an_ended_run_returns_its_status(tmp_path):
    assert Run(zoo.make_run(tmp_path, "stopped").root).stop().state == "stopped"


def test_a_final_adapter_is_the_final_model(tmp_path):
    folder = zoo.make_run(tmp_path / "runs")
    (folder.final / "config.json").unlink(missing_ok=True)
    folder.final.mkdir(exist_ok=True)
    assert Run(folder.root).final_model is None
    (folder.final / "adapter_config.json").write_text("{}")
    assert Run(folder.root).final_model == folder.final
