"""Claims about what a run from files is started with, and about rows that are looked at before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.config.offline_config import OfflineConfig
from controller.run_folder.run_folder import RunFolder
from controller.wiring.offline import check_rows, offline_spec, refuse_other_rows

ROW = {"prompt": "1", "completion": "2"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfflineConfig:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROW) + "\n")
    return OfflineConfig.model_validate(
        {"model": {"init": {"model_type": "qwen3"}}, "data": {"train": "train.jsonl", "eval": "eval.jsonl"}}
    )


def test_the_process_gets_absolute_paths_and_its_threads(config: OfflineConfig, tmp_path: Path) -> None:
    spec = offline_spec(config, RunFolder(tmp_path / "run"), "sft", "id")
    assert (spec.data.train, spec.data.eval) == (str(tmp_path / "train.jsonl"), str(tmp_path / "eval.jsonl"))
    assert spec.num_threads >= 1
    two = config.model_copy(update={"trainer": config.trainer.model_copy(update={"threads": 2})})
    assert offline_spec(two, RunFolder(tmp_path), "sft", "id").num_threads == 2


def test_ranks_share_the_cores_and_have_names(config: OfflineConfig, tmp_path: Path) -> None:
    two = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})})
    specs = [offline_spec(two, RunFolder(tmp_path), "sft", "id", rank=rank, address="file:///m") for rank in (0, 1)]
    assert [(one.name, one.rank, one.num_ranks, one.ranks_address) for one in specs] == [
        ("trainer", 0, 2, "file:///m"), ("trainer-1", 1, 2, "file:///m")
    ]  # fmt: skip
    assert specs[0].num_threads == max(1, offline_spec(config, RunFolder(tmp_path), "sft", "id").num_threads // 2)


def test_a_row_that_cannot_be_used_is_refused_before_the_run(config: OfflineConfig, tmp_path: Path) -> None:
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write('{"prompt": "1"}\n')
    with pytest.raises(UserError, match=r"eval.jsonl:2: the row has no `completion`"):
        check_rows(config, "sft")


def test_a_resumed_run_refuses_other_rows(config: OfflineConfig, tmp_path: Path) -> None:
    recorded = check_rows(config, "sft")
    refuse_other_rows(config, recorded, "sft")
    (tmp_path / "train.jsonl").write_text(json.dumps({**ROW, "completion": "3"}))
    with pytest.raises(UserError, match=r"data.train: the rows differ"):
        refuse_other_rows(config, recorded, "sft")
    with pytest.raises(UserError, match=r"data.train, data.eval: the rows differ"):
        refuse_other_rows(config, None, "sft")
