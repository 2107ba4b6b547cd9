"""The best checkpoint outlives the trainer's retention, and a metric that gets no better ends the run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal_like.metric_settings import BestSettings
from controller.config.early_stop_settings import EarlyStopSettings
from controller.runtime.evaluation_watch import EvaluationWatch, read_best


def checkpoint(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / f"step_{version:06d}"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "part").write_text(f"weights of {version}")
    (folder / "state.json").write_text("{}")
    return folder


def watch_of(run: Path, said: list[str], **changes: object) -> EvaluationWatch:
    return EvaluationWatch(run, **{"best": BestSettings(), "say": said.append, **changes})  # type: ignore[arg-type]


def test_a_metric_has_a_name_of_at_least_one_character() -> None:
    assert BestSettings(metric="f").metric == "f"
    with pytest.raises(ValidationError):
        BestSettings(metric="")


def test_the_best_checkpoint_stays_when_the_trainer_removes_it(tmp_path: Path) -> None:
    said: list[str] = []
    watch = watch_of(tmp_path, said)
    for version, value in ((20, 0.4), (40, 0.6), (60, 0.5)):
        path = checkpoint(tmp_path, version)
        if version == 40:  # an evaluation may end before the checkpoint of its version is there
            watch.evaluated(version, {"accuracy": value})
            watch.saved(version, path)
        else:
            watch.saved(version, path)
            watch.evaluated(version, {"accuracy": value})
    shutil.rmtree(tmp_path / "checkpoints")
    best = tmp_path / "best" / "step_000040"
    assert (best / "weights" / "part").read_text() == "weights of 40"
    assert sorted(os.listdir(tmp_path / "best")) == ["best.json", "step_000040"]
    facts = {"version": 40, "metric": "accuracy", "value": 0.6, "path": str(best)}
    assert watch.facts() == {"best": facts}
    assert read_best(tmp_path / "best") == facts
    assert said == [
        "version 20 is the best so far (accuracy 0.4); its checkpoint is kept",
        "version 40 is the best so far (accuracy 0.6); its checkpoint is kept",
    ]


def test_a_checkpoint_that_is_gone_is_reported_and_the_one_before_stays(tmp_path: Path) -> None:
    said: list[str] = []
    watch = watch_of(tmp_path, said)
    watch.saved(20, checkpoint(tmp_path, 20))
    watch.evaluated(20, {"accuracy": 0.4})
    gone = checkpoint(tmp_path, 40)
    watch.saved(40, gone)
    shutil.rmtree(gone)
    watch.evaluated(40, {"accuracy": 0.9})
    assert watch.facts()["best"]["version"] == 20
    assert "version 40, which is the best so far, cannot be kept" in said[-1]


def test_a_resumed_run_goes_on_from_what_is_kept_of_its_own_history(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, [])
    watch.saved(20, checkpoint(tmp_path, 20))
    watch.evaluated(20, {"accuracy": 0.4})
    again = watch_of(tmp_path, [])
    again.restore({0: {"accuracy": 0.1}, 20: {"accuracy": 0.4}})
    again.saved(40, checkpoint(tmp_path, 40))
    again.evaluated(40, {"accuracy": 0.3})
    assert again.facts()["best"]["version"] == 20
    rolled_back = watch_of(tmp_path, [])
    rolled_back.restore({0: {"accuracy": 0.1}})
    assert rolled_back.facts() == {}
    assert read_best(tmp_path / "best") == {}


def test_an_early_stop_is_said_once_and_counts_earlier_sessions(tmp_path: Path) -> None:
    watch = EvaluationWatch(tmp_path, early_stop=EarlyStopSettings(patience=2))
    watch.restore({20: {"accuracy": 0.5}, 40: {"accuracy": 0.5}})
    assert watch.take_stop() == ""
    watch.evaluated(60, {"accuracy": 0.4})
    reason = "early stop: accuracy was not better than 0.5 (version 20) in 2 evaluations"
    assert (watch.take_stop(), watch.take_stop()) == (reason, "")
    watch.evaluated(80, {"accuracy": 0.4})
    assert watch.take_stop() == ""
    assert watch.facts() == {"early_stop": reason}


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(json.dumps({"version": 3}))
    assert read_best(tmp_path) == {}
