"""Claims about the process that draws answers again: an end before its first answer is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import OperationError
from areal_like.regenerate_files import RegenerateSpec
from controller.runs.replay import engine_process
from controller.runs.replay.engine_process import open_engine


@pytest.mark.processes
def test_process_that_ends_at_once_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "REGENERATE", "rollout.no_such_module")
    worker = ProcessSpec(
        role="rollout", name="rollout-0", run_id="run", run_dir=str(tmp_path), hub_address="", parent_pid=1, seed=1,
        model=ModelSettings(path="/nowhere"), sampling=SamplingSettings(), staleness=StalenessSettings(),
        groups_per_step=1, group_size=1, num_steps=1, weight_dir="", settings={},
    )  # fmt: skip
    spec = RegenerateSpec(run_id="run", parent_pid=1, seed=1, worker=worker)
    with pytest.raises(OperationError, match="ended with"), open_engine(spec, tmp_path, tmp_path):
        pass
