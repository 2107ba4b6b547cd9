"""Spot checks compare recorded log-probs with those of the checkpoint of exactly the stamped version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import copy_run, make_recorded_run

from areal_like.errors import UserError
from areal_like.spot_files import SpotSpec
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.spot_check import EXACT_NATS, HALF_NATS, spot_check


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make_recorded_run(tmp_path_factory.mktemp("runs"))
    configure(folder, "float32")
    return folder


def configure(folder: RunFolder, dtype: str) -> None:
    folder.config.write_text(
        f"name: recorded\nmodel: {{init: {{model_type: qwen3}}, tokenizer: bytes, dtype: {dtype}}}\n"
        "data: {train: {generator: running_sum, limit: 20}}\nnum_steps: 6\ngroups_per_step: 2\ngroup_size: 2\n"
        "trainer: {device: cpu}\nrollout: {engine: {device: cpu}}\n"
    )


def exact(spec: SpotSpec) -> list[list[float]]:
    """The recorded log-probs are -0.5."""
    return [[-0.5] * sum(is_sampled) for _, is_sampled in spec.sequences]


def test_equal_log_probs_pass_and_the_others_are_counted_by_reason(run: RunFolder) -> None:
    asked: list[SpotSpec] = []

    def compute(spec: SpotSpec) -> list[list[float]]:
        asked.append(spec)
        return exact(spec)

    found = spot_check(run, 3, 0, compute)
    assert found.findings == []
    assert sum(len(spec.sequences) for spec in asked) == 3
    assert {Path(spec.model_dir).parent for spec in asked} == {run.checkpoints}
    assert found.lines[0].startswith("spot checks: 3 samples with ")
    assert any("their version has no checkpoint" in line for line in found.lines)
    assert any("they were sampled by several versions" in line for line in found.lines)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", EXACT_NATS), ("bfloat16", HALF_NATS)])
def test_a_difference_beyond_the_tolerance_is_named(run: RunFolder, dtype: str, bound: float) -> None:
    def off(by: float) -> list[str]:
        def compute(spec: SpotSpec) -> list[list[float]]:
            return [[-0.5, -0.5 + by, *row[2:]] for row in exact(spec)]

        return spot_check(run, 1, 0, compute).findings

    configure(run, dtype)
    try:
        assert off(0.9 * bound) == []
        assert len(off(-1.1 * bound)) == 1
        assert "the recorded log-prob of sampled token 2 is -0.5000" in off(1.1 * bound)[0]
        assert off(float("nan")) != []
    finally:
        configure(run, "float32")


def test_version_0_is_the_starting_model_while_it_exists(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (run.processes / "trainer.json").write_text(json.dumps({"model": {"path": str(tmp_path)}}))
    asked: list[SpotSpec] = []
    try:
        spot_check(run, 100, 0, lambda spec: (asked.append(spec), exact(spec))[1])
    finally:
        (run.processes / "trainer.json").unlink()
    assert str(tmp_path) == asked[0].model_dir


def test_a_relative_starting_model_is_found_where_the_run_was_started(run: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path / "copy")
    (tmp_path / "home" / "model").mkdir(parents=True)
    (tmp_path / "home" / "model" / "config.json").write_text("{}")
    copy.processes.mkdir(exist_ok=True)
    (copy.processes / "trainer.json").write_text(json.dumps({"model": {"path": "model"}}))
    copy.write_state("finished", started_in=str(tmp_path / "home"))
    asked: list[SpotSpec] = []
    spot_check(copy, 100, 0, lambda spec: (asked.append(spec), exact(spec))[1])
    assert str(tmp_path / "home" / "model") == asked[0].model_dir


def test_the_choice_depends_on_the_seed_only(run: RunFolder) -> None:
    def chosen(seed: int) -> list[SpotSpec]:
        asked: list[SpotSpec] = []
        spot_check(run, 2, seed, lambda spec: (asked.append(spec), exact(spec))[1])
        return asked

    assert chosen(1) == chosen(1)
    assert any(chosen(1) != chosen(seed) for seed in range(2, 9))


def test_a_damaged_segment_is_the_users_to_restore(run: RunFolder, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path / "copy")
    for path in (copy.root / "segments").glob("*.seg"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="verify without --spot to see what is damaged"):
        spot_check(copy, 1, 0, exact)
