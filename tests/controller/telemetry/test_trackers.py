"""What the trackers are asked for, by modules that record their calls; MLflow and Trackio themselves are not run."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.telemetry import mlflow_process, trackio_process, wandb_process
from controller.telemetry.answers_table import answers_table, as_markdown
from controller.telemetry.tracker_process import flat, serve
from controller.telemetry.tracker_sink import MlflowSink, TrackioSink

EVAL = {
    "kind": "eval", "time_s": 7.5, "version": 3, "accuracy": 0.5,
    "answers": [{"row": 0, "prompt": "1|1", "answer": "a\nb", "value": 0.25}],
}  # fmt: skip
ROWS = [
    {"row": {"step": 3, "_timestamp": 5.25, "train/reward_mean": 0.5}},
    {"row": {"wall_s": 12.5, "_timestamp": 6.0, "run/running": 1}},
    {"table": answers_table(EVAL)},
]


class Recorder:
    """Records calls of any of its methods."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **facts: Any) -> Any:
            self.calls.append((name, *args, facts))
            return self._answers.get(name)

        return call


def served(process: Any, start: dict[str, Any]) -> list[dict[str, Any]]:
    lines = StringIO("".join(json.dumps(message) + "\n" for message in [{"start": start}, *ROWS]))
    answers = StringIO()
    serve(lines, answers, process.begin)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.mark.processes
def test_what_a_package_prints_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text(
        "import os, types\n"
        "from controller.telemetry.tracker_process import run_process\n"
        "def begin(start):\n"
        "    print('* Trackio project initialized')\n"
        "    os.write(1, b'from a library\\n')\n"
        "    return types.SimpleNamespace(log=print, finish=lambda: print('done'))\n"
        "run_process(begin)\n"
    )
    lines = "".join(json.dumps(message) + "\n" for message in ({"start": {}}, ROWS[0]))
    ended = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "prints.py")], input=lines, capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"done": 1}, {"done": 2}]
    assert "Trackio project initialized" in ended.stderr
    assert "from a library" in ended.stderr


def fake_mlflow(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Recorder:
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    client = Recorder(**{"create_experiment": "e1", "search_runs": [], "create_run": run, **answers})
    package, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    package.MlflowClient = lambda **facts: client.calls.append(("client", facts)) or client  # type: ignore[attr-defined]
    entities.Metric = lambda *args: ("metric", *args)  # type: ignore[attr-defined]
    entities.Param = lambda *args: ("param", *args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


MLFLOW = {
    "name": "job", "id": "abc", "config": {"num_steps": 9, "eval": {"every_steps": 2}, "tags": []}, "tags": ["lr"],
    "notes": "first", "uri": "sqlite:////x/mlflow.db", "artifacts": "file:///x/mlflow", "experiment": "mine",
}  # fmt: skip


def test_mlflow_gets_a_run_with_parameters_metrics_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake_mlflow(monkeypatch)
    assert served(mlflow_process, MLFLOW) == [{"done": number} for number in range(1, 5)]
    tags = {"areal_like.run_id": "abc", "lr": "true", "mlflow.note.content": "first"}
    params = [("param", "num_steps", "9"), ("param", "eval.every_steps", "2"), ("param", "tags", "[]")]
    columns = {"version": [3], "row": [0], "prompt": ["1|1"], "answer": ["a\nb"], "value": [0.25]}
    assert client.calls == [
        ("client", {"tracking_uri": "sqlite:////x/mlflow.db"}),
        ("get_experiment_by_name", "mine", {}),
        ("create_experiment", "mine", {"artifact_location": "file:///x/mlflow"}),
        ("search_runs", ["e1"], {"filter_string": "tags.`areal_like.run_id` = 'abc'"}),
        ("create_run", "e1", {"tags": tags, "run_name": "job"}),
        ("log_batch", "r1", {"params": params}),
        ("log_batch", "r1", {"metrics": [("metric", "train/reward_mean", 0.5, 5250, 3)]}),
        ("log_batch", "r1", {"metrics": [("metric", "run/running", 1.0, 6000, 12)]}),
        ("log_table", "r1", {"data": columns, "artifact_file": "eval/answers.json"}),
        ("set_terminated", "r1", {}),
    ]


def test_a_resumed_run_goes_on_in_its_own_run_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    known = types.SimpleNamespace(info=types.SimpleNamespace(run_id="old"))
    experiment = types.SimpleNamespace(experiment_id="e7")
    client = fake_mlflow(monkeypatch, get_experiment_by_name=experiment, search_runs=[known])
    served(mlflow_process, MLFLOW)
    names = [name for name, *_ in client.calls]
    assert "create_run" not in names
    assert "create_experiment" not in names
    assert client.calls[-1] == ("set_terminated", "old", {})


def test_more_parameters_than_a_request_takes_are_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake_mlflow(monkeypatch)
    served(mlflow_process, {**MLFLOW, "config": {f"k{one}": "x" * 600 for one in range(250)}})
    sent = [facts["params"] for name, *_, facts in client.calls if name == "log_batch" and "params" in facts]
    assert [len(params) for params in sent] == [100, 100, 50]
    assert {len(value) for params in sent for _, _, value in params} == {500}


def test_trackio_gets_a_run_its_numbers_and_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    package = Recorder()
    package.Table = lambda dataframe: ("table", dataframe.to_dict("list"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", package)  # type: ignore[arg-type]
    monkeypatch.setenv("TRACKIO_DIR", "mine")
    start = {"project": "p", "name": "job", "config": {"num_steps": 9}, "dir": str(tmp_path), "space": None}
    assert served(trackio_process, start) == [{"done": number} for number in range(1, 5)]
    columns = {"version": [3], "row": [0], "prompt": ["1|1"], "answer": ["a\nb"], "value": [0.25]}
    assert package.calls == [
        ("init", {"project": "p", "name": "job", "config": {"num_steps": 9}, "resume": "allow"}),
        ("log", {"train/reward_mean": 0.5}, {"step": 3}),
        ("log", {"wall_s": 12.5, "run/running": 1}, {"step": 12}),
        ("log", {"eval/answers": ("table", columns)}, {"step": 3}),
        ("finish", {}),
    ]


def test_wandb_gets_the_answers_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorder()
    package = Recorder(init=run)
    package.Table = lambda columns, data: (columns, data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)  # type: ignore[arg-type]
    start = dict.fromkeys(("project", "entity", "group", "mode", "name", "id", "dir")) | {"tags": [], "config": {}}
    served(wandb_process, start)
    table = ROWS[2]["table"]
    assert table is not None
    assert ("log", {"version": 3, "eval/answers": (table["columns"], table["data"])}, {}) in run.calls
    assert run.calls[-1] == ("finish", {})


def test_a_tracker_that_cannot_begin_is_an_error_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fake_mlflow(monkeypatch)
    client.get_experiment_by_name = lambda name: 1 / 0
    (answer,) = served(mlflow_process, MLFLOW)
    assert answer == {"error": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(("sink", "name"), [(MlflowSink, "mlflow"), (TrackioSink, "trackio")])
def test_an_absent_package_is_named_with_its_extra(sink: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.telemetry.tracker_sink.is_installed", lambda package: False)
    with pytest.raises(UserError, match=f"metrics.{name}: the package {name} is not installed"):
        sink({}, Path("x"), remedy="")


def test_a_row_without_answers_has_no_table_and_markdown_is_harmless() -> None:
    assert answers_table({**EVAL, "answers": []}) is None
    assert answers_table({"kind": "step", "answers": [1]}) is None
    table = answers_table(EVAL)
    assert table is not None
    assert as_markdown(table).splitlines() == [
        "| version | row | prompt | answer | value |", "| --- | --- | --- | --- | --- |",
        "| 3 | 0 | 1\\|1 | a<br>b | 0.25 |",
    ]  # fmt: skip


def test_a_configuration_is_flat_with_empty_sections() -> None:
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
