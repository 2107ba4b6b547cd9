"""The settings of the runs whose steps become capsules, and changed bytes; no run is started."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capsules
from benchmarks.tables import TABLES
from controller.config.loading import load_config
from controller.runs.replay.capsule_file import read_archive, write_archive

ROW: dict[str, Any] = {
    "run": "KL", "capsules": 4, "updates": 4, "tensors": 144, "equal": 4, "found": 4, "mb": 7.3,
}  # fmt: skip


@pytest.mark.parametrize("variant", capsules.VARIANTS)
def test_every_run_is_a_configuration_that_keeps_all_checkpoints(variant: str) -> None:
    config = load_config("quickstart", capsules.overrides_of(variant, 7)).config
    assert (config.trainer.checkpoint.every_steps, config.trainer.checkpoint.keep, config.num_steps) == (1, 7, 7)


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_byte_is_found_in_whatever_entry_it_is(seed: int, tmp_path: Path) -> None:
    capsule, dice = tmp_path / "c", random.Random(seed)
    entries = {f"part/{number}": dice.randbytes(50) for number in range(4)}
    write_archive(capsule, {**entries, "empty": b""}, {"step": 1})
    (tmp_path / "whole").mkdir()
    read_archive(capsule, tmp_path / "whole")
    assert capsules.is_found(capsule, dice)


def test_a_capsule_that_differs_or_a_change_that_is_missed_is_not_good() -> None:
    assert capsules.is_good(ROW)
    assert not capsules.is_good({**ROW, "equal": 3})
    assert not capsules.is_good({**ROW, "found": 3})
    text = TABLES["capsules"]({"runs": [ROW], "cpu_s": 90.0, "wall_s": 120.0})
    assert "4 of 4" in text
    assert "1.5 minutes of processor time" in text
