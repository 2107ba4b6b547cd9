"""Which checkpoints a command may use, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import UserError, WeightError
from controller.wiring import checkpoints

FOLDER = Path("checkpoints/v3")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A whole checkpoint of run r, lineage l2, made at fact 40; what is asked of it, in order."""
    state = SimpleNamespace(damage="", unreadable="", done=[])

    def verify(folder: Path) -> None:
        state.done.append(("verify", folder))
        if state.damage:
            raise WeightError(state.damage)

    def read_state(folder: Path) -> Any:
        state.done.append(("read", folder))
        if state.unreadable:
            raise WeightError(state.unreadable)
        return SimpleNamespace(run_id="r", lineage="l2", position=SimpleNamespace(ledger_seq=40))

    monkeypatch.setattr(checkpoints, "verify", verify)
    monkeypatch.setattr(checkpoints, "read_state", read_state)
    return state


@pytest.mark.parametrize("ledger_seq", [None, 40, 41])
def test_whole_checkpoint_that_the_ledger_covers_has_no_problem(saved: SimpleNamespace, ledger_seq: int | None) -> None:
    assert checkpoints.checkpoint_problem(FOLDER, ledger_seq) is None
    assert saved.done == [("verify", FOLDER), ("read", FOLDER)], "every byte is read first"


@pytest.mark.parametrize("ledger_seq", [0, 39])
def test_checkpoint_that_is_newer_than_the_ledger_is_not_used(saved: SimpleNamespace, ledger_seq: int) -> None:
    assert checkpoints.checkpoint_problem(FOLDER, ledger_seq) == (
        f"the checkpoint was written when the ledger contained 40 facts, but the ledger contains only {ledger_seq}"
    )


def test_damage_is_the_problem_whatever_the_ledger_holds(saved: SimpleNamespace) -> None:
    saved.damage = "a file is missing"
    assert checkpoints.checkpoint_problem(FOLDER, 99) == "a file is missing"
    saved.damage, saved.unreadable = "", "its state is cut"
    assert checkpoints.checkpoint_problem(FOLDER) == "its state is cut"


def test_origin_is_run_lineage_and_facts_and_nothing_where_it_cannot_be_read(saved: SimpleNamespace) -> None:
    assert checkpoints.checkpoint_origin(FOLDER) == ("r", "l2", 40)
    saved.unreadable = "cut"
    assert checkpoints.checkpoint_origin(FOLDER) is None


def test_folder_looks_like_a_checkpoint_with_both_of_its_files(tmp_path: Path) -> None:
    assert not checkpoints.is_checkpoint(tmp_path)
    (tmp_path / checkpoints.MANIFEST).touch()
    assert not checkpoints.is_checkpoint(tmp_path)
    (tmp_path / checkpoints.STATE).touch()
    assert checkpoints.is_checkpoint(tmp_path)
    (tmp_path / checkpoints.MANIFEST).unlink()
    assert not checkpoints.is_checkpoint(tmp_path)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How checkpoints are exported; those in a folder `adapter` hold one."""
    done: list[Any] = []
    monkeypatch.setattr(checkpoints.adapter_export, "holds_adapter", lambda folder: folder.name == "adapter")
    monkeypatch.setattr(
        checkpoints.adapter_export, "export_adapter",
        lambda folder, out, *, form, dtype, is_decrypted: done.append((folder, out, form, dtype)) or "float32",
    )  # fmt: skip
    monkeypatch.setattr(
        checkpoints.convert,
        "export_checkpoint",
        lambda folder, out, *, dtype, is_decrypted: done.append((folder, out, dtype)) or "bf16",
    )
    return done


def test_adapter_is_exported_merged_unless_it_is_asked_for_alone(exported: list[Any]) -> None:
    folder, out = Path("adapter"), Path("out")
    assert checkpoints.export_checkpoint(folder, out, None, None) == "float32"
    checkpoints.export_checkpoint(folder, out, "bfloat16", "adapter")
    assert exported == [(folder, out, "merged", None), (folder, out, "adapter", "bfloat16")]


def test_whole_model_is_exported_as_it_is_and_has_no_adapter(exported: list[Any]) -> None:
    folder, out = Path("whole"), Path("out")
    assert checkpoints.export_checkpoint(folder, out, "bfloat16", None) == "bf16"
    assert exported == [(folder, out, "bfloat16")]
    with pytest.raises(UserError, match="the checkpoint contains a full model") as raised:
        checkpoints.export_checkpoint(folder, out, None, "merged")
    assert (raised.value.where, raised.value.remedy) == ("--lora", "remove the option --lora")
    assert len(exported) == 1


def test_what_the_trainer_says_of_its_folders_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    repaired: list[Path] = []
    monkeypatch.setattr(checkpoints, "all_checkpoints", lambda run_dir: [(3, run_dir / "v3")])
    monkeypatch.setattr(checkpoints, "repair", repaired.append)
    monkeypatch.setattr(checkpoints.convert, "import_folder", lambda source, out: (7, f"{source} {out}"))
    assert checkpoints.checkpoints_on_disk(Path("run")) == [(3, Path("run/v3"))]
    checkpoints.repair_checkpoints(Path("run"))
    assert repaired == [Path("run")]
    assert checkpoints.import_folder(Path("a"), Path("b")) == (7, "a b")
