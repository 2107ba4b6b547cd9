"""An exported folder says which checkpoint it was made from, and which of its files were changed since."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_run import save_checkpoint
from safetensors.numpy import load_file, save_file

from areal_like.errors import WeightError
from trainer.checkpoints.checkpoint import manifest_digest
from trainer.checkpoints.compare_export import other_tensor
from trainer.checkpoints.convert import export_checkpoint
from trainer.checkpoints.provenance import PROVENANCE, changed_files, read_provenance


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and its export."""
    saved = save_checkpoint(tmp_path, 4, "l1")
    export_checkpoint(saved, tmp_path / "out", dtype="bfloat16")
    return saved, tmp_path / "out"


def test_an_export_names_its_checkpoint_and_all_of_its_files(folders: tuple[Path, Path]) -> None:
    saved, out = folders
    found = read_provenance(out)
    assert found is not None
    assert (found.run_id, found.lineage, found.version) == ("r", "l1", 4)
    assert found.checkpoint == manifest_digest(saved)
    assert len(found.checkpoint) == 64
    assert {*found.files, PROVENANCE} == {path.name for path in out.iterdir()}
    assert changed_files(out, found) == []
    assert other_tensor(out, saved) is None


def test_changed_removed_and_added_files_are_named(folders: tuple[Path, Path]) -> None:
    _, out = folders
    found = read_provenance(out)
    assert found is not None
    (out / "model.safetensors").write_bytes(b"other")
    (out / "config.json").unlink()
    (out / "new.txt").write_text("new")
    config, model, new = changed_files(out, found)
    assert config == f"{out / 'config.json'} cannot be read (No such file or directory)"
    assert model == f"{out / 'model.safetensors'} differs from its digest in provenance.json"
    assert new == f"{out / 'new.txt'} is not in provenance.json"


def test_another_tensor_is_named(folders: tuple[Path, Path]) -> None:
    saved, out = folders
    weights = load_file(saved / "model.safetensors")
    save_file({"w": weights["w"], "extra": weights["w"]}, saved / "model.safetensors")
    assert other_tensor(out, saved) == "extra (only in the checkpoint)"
    save_file({"w": weights["w"] * 2}, saved / "model.safetensors")
    assert other_tensor(out, saved) == "w"


def test_a_missing_file_is_none_and_a_damaged_one_an_error(folders: tuple[Path, Path]) -> None:
    saved, out = folders
    assert read_provenance(saved) is None
    (out / PROVENANCE).write_text("{")
    with pytest.raises(WeightError, match=r"provenance\.json cannot be read"):
        read_provenance(out)
    assert manifest_digest(out) == ""
