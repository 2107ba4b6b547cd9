"""An engine of a user's, named by import path, generates a whole job: nothing of ours was edited for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "toy_engine"
TOY = "rollout.engine.kind=toy_engine.descriptor:TOY"
SMALL = [
    "warm_start=null", "num_steps=3", "groups_per_step=4", "group_size=4", "rollout.num_workers=2",
    "rollout.engine.num_slots=8", "sampling.max_new_tokens=6", "data.train.limit=64", "data.eval.limit=8",
    "eval.every_steps=0", "metrics.report=false", "metrics.display=plain",
]  # fmt: skip


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """The current folder of the command (the fixture `areal` starts it there)."""
    shutil.copytree(FOLDER, tmp_path / "toy_engine")
    return tmp_path / "toy_engine"


@pytest.mark.usefixtures("user_folder")
def test_an_engine_by_import_path_generates_a_whole_job(areal, quickstart):
    run = areal("train", quickstart, *SMALL, TOY, "rollout.engine.options={num_tokens: 5}")
    assert run.wait() == 0, run.output
    assert (run.summary["audit"], run.summary["steps"]) == ("clean", 3)
    last = run.metrics("pulse")[-1]["processes"]
    counters = [process["counters"] for name, process in last.items() if name.startswith("rollout")]
    assert len(counters) == 2
    assert sum(each["toy_tokens"] for each in counters) >= 3 * 4 * 4
    assert max(row["version"] for row in run.metrics("swap")) > 0


def test_an_engine_that_its_workers_could_not_import_is_found_before_the_start(areal, quickstart, user_folder):
    (user_folder / "engine.py").write_text("import a_package_that_is_missing\n")
    run = areal("train", quickstart, *SMALL, TOY)
    assert run.wait() != 0
    assert "rollout.engine.kind" in run.output
    assert "No module named 'a_package_that_is_missing'" in run.output
    with pytest.raises(AssertionError, match="no run folder"):
        _ = run.folder
