"""`areal-like drain` and `areal-like add`: what is asked, what is said, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_zoo as zoo

from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.checkpoint import checkpoint
from controller.runs.crew import add, drain
from controller.runs.sample_rows import Choice
from controller.runs.samples import samples
from controller.runtime.control_requests import Requests


class Controller:
    """Answers requests and rewrites status.json whenever the command sleeps; its clock is the sleeping."""

    def __init__(self, folder: RunFolder, *, grants: bool = True, after: int = 2) -> None:
        self.folder, self.grants, self.after = folder, grants, after
        self.desk = Requests(folder.requests)
        self.now_s, self.asked = 0.0, []
        self.workers = {"rollout-0", "rollout-1"}
        self.show()

    def show(self) -> None:
        rows = {name: {"role": "rollout", "state": "generate", "incarnation": "i"} for name in self.workers}
        status = {"format": 1, "time_s": 0.0, "status": "running", "processes": rows}
        self.folder.status.write_text(json.dumps(status))

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for request in self.desk.take():
            self.asked.append((request.wish, request.worker))
            name = request.worker or "rollout-2"
            self.desk.answer(request.key, name if self.grants else "it stays", is_granted=self.grants)
        if self.asked and self.grants:
            self.after -= 1
            if self.after == 0:
                wish, worker = self.asked[-1]
                self.workers = self.workers - {worker} if wish == "drain" else self.workers | {"rollout-2"}
                self.show()


def run(tmp_path: Path, **manner: Any) -> tuple[RunFolder, Controller, dict[str, Any]]:
    folder = zoo.make_run(tmp_path, "running")
    controller = Controller(folder, **manner)
    return folder, controller, {"sleep": controller.sleep, "clock": controller.clock}


def test_drain_waits_until_the_worker_has_left(tmp_path, capsys):
    folder, controller, time = run(tmp_path)
    assert drain(folder, "rollout-1", **time) == 0
    assert controller.asked == [("drain", "rollout-1")]
    assert "rollout-1 has left" in capsys.readouterr().out
    assert not list(folder.requests.iterdir())


def test_add_waits_until_the_worker_has_joined(tmp_path, capsys):
    folder, controller, time = run(tmp_path)
    assert add(folder, **time) == 0
    assert controller.asked == [("add", "")]
    assert "rollout-2 has joined" in capsys.readouterr().out


def test_refusal_is_reported_with_status_1(tmp_path, capsys):
    folder, _, time = run(tmp_path, grants=False)
    assert drain(folder, "rollout-0", **time) == 1
    assert "it stays" in capsys.readouterr().err


def test_worker_that_stays_too_long_is_status_1(tmp_path, capsys):
    folder, _, time = run(tmp_path, after=10**9)
    assert drain(folder, "rollout-0", timeout_s=5.0, **time) == 1
    assert "has not left the run within 5 s" in capsys.readouterr().err


def test_controller_that_does_not_answer_is_status_1_and_the_request_is_withdrawn(tmp_path, capsys):
    folder = zoo.make_run(tmp_path, "running")
    seconds = iter(range(1000))
    assert drain(folder, "rollout-0", sleep=lambda _: None, clock=lambda: float(next(seconds))) == 1
    assert "did not reply" in capsys.readouterr().err
    assert not list(folder.requests.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["finished", "crashed", "failed"])
def test_run_that_does_not_go_on_is_a_users_mistake(tmp_path, kind):
    folder = zoo.make_run(tmp_path, kind)
    with pytest.raises(UserError, match="specify a run that is in progress"):
        drain(folder, "rollout-0")


@pytest.mark.parametrize("command", [add, checkpoint])
def test_a_run_from_files_refuses_requests_with_its_reason(tmp_path, command):
    folder, controller, time = run(tmp_path)
    state = json.loads(folder.state.read_text())
    folder.state.write_text(json.dumps({**state, "objective": "sft"}))
    with pytest.raises(UserError, match="the run trains from files and accepts no requests"):
        command(folder, **time)
    assert not controller.asked


def test_a_run_from_files_has_no_samples(tmp_path):
    folder = zoo.make_run(tmp_path, "finished")
    state = json.loads(folder.state.read_text())
    folder.state.write_text(json.dumps({**state, "objective": "sft"}))
    with pytest.raises(UserError, match="it generates no samples"):
        samples(folder, Choice())
