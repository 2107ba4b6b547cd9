"""Which sender a trainer process has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from trainer.config import TrainerSettings
from trainer.weights.choice import sender_of
from trainer.weights.sender import WeightSender


@pytest.mark.parametrize(
    ("kind", "is_there", "has_rounds"),
    [("shm", False, False), ("disk", False, False), ("stream", True, False), ("distributed", True, True)],
)
def test_versions_in_files_need_no_sender_and_others_have_theirs_with_the_settings(
    tmp_path: Path, kind: Any, is_there: bool, has_rounds: bool
) -> None:
    settings = TrainerSettings.model_validate({"weights": {"kind": kind, "fan_out": 3, "chunk_kb": 64}})
    spec = ProcessSpec(
        role="trainer", name="trainer", run_id="t", run_dir=str(tmp_path), hub_address="tcp://127.0.0.1:1",
        parent_pid=1, seed=1, model=ModelSettings(path=str(tmp_path)), sampling=SamplingSettings(),
        staleness=StalenessSettings(), groups_per_step=1, group_size=1, num_steps=1,
        weight_dir=str(tmp_path / "weights"), settings={},
    )  # fmt: skip
    sender = sender_of(spec, settings)
    assert isinstance(sender, WeightSender) is is_there
    if isinstance(sender, WeightSender):
        assert (sender._chunk_bytes, sender._fan_out) == (64 * 1024, 3)
        assert (sender._rounds is not None) is has_rounds
        assert ("weights_group_rounds" in sender.counters) is has_rounds
