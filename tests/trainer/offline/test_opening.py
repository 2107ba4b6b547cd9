"""Which folder a run from files starts from, and which checkpoint it goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_offline import digits, make_spec, write_rows

from areal_like.config import ModelSettings
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.offline import opening
from trainer.offline.opening import newest_checkpoint


def saved(run_dir: Path, version: int) -> Path:
    state = CheckpointState(version=version, lineage="l0", run_id="t", config_digest="d")
    folder, _ = checkpoint.save(
        run_dir, state, lambda folder: (folder / "model.safetensors").write_text("payload") and None, Retention(keep=9)
    )
    return folder


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], found[1].version) == (second, 2)
    (second / "model.safetensors").write_text("damaged")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found[0], found[1].version) == (first, 1)


def test_a_checkpoint_whose_replacement_was_cut_off_is_put_back(tmp_path: Path) -> None:
    folder = saved(tmp_path, 2)
    folder.rename(folder.with_name(f".{folder.name}.1.replaced"))
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == folder


@pytest.mark.parametrize(("tokenizer", "is_own"), [("from_model", True), ("bytes", False)])
def test_a_model_with_its_own_tokenizer_is_used_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, is_own: bool
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    prepared: list[Path] = []
    monkeypatch.setattr(opening, "prepare", lambda spec, *rest, **more: prepared.append(Path(spec.out_dir)))
    spec = make_spec(tmp_path, data={"train": write_rows(tmp_path / "rows.jsonl", digits(3))}).model_copy(
        update={"model": ModelSettings(path=str(model), tokenizer=tokenizer)}
    )
    found = opening.starting_folder(spec)
    assert (found == model) == is_own
    assert prepared == ([] if is_own else [found])
