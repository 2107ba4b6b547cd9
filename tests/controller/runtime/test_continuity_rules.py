"""Which files of a run agree, at the borders: steps, facts and lineages of ledger, metrics and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ledger_entries import admit, checkpoint, finished, lineage, shipped

from areal_like.errors import UserError
from areal_like.metrics import read_jsonl
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.run_folder.run_folder import RunFolder
from controller.runtime.continuity import check_continuity, has_progress, last_step, refuse_absent_ledger


class Case:
    """A run folder with a ledger of so many steps."""

    def __init__(self, root: Path, steps: int = 4, run_id: str = "r") -> None:
        self.folder = RunFolder(root)
        self.ledger = Ledger(root, run_id=run_id)
        self.ledger.apply([lineage()])
        for step in range(1, steps + 1):
            self.ledger.apply([admit(step - 1), finished(step - 1, [0]), shipped(step, step - 1)])

    def measured(self, *steps: int) -> Case:
        with self.folder.metrics.open("a") as file:
            file.writelines(json.dumps({"kind": "step", "step": step}, separators=(",", ":")) + "\n" for step in steps)
        return self

    def saved(self, version: int, ledger_seq: int = 0, **facts: Any) -> Path:
        path = self.folder.checkpoints / f"step_{version:06d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps({"format": 2, "files": {}}))
        state = {
            "version": version,
            "lineage": "l0",
            "run_id": "r",
            "config_digest": "",
            "position": {"ledger_seq": ledger_seq},
        }
        (path / "state.json").write_text(json.dumps(state | facts))
        return path

    def check(self, *, accept_loss: bool = False, is_mirror: bool = False) -> list[str]:
        """What is said of an accepted loss. Raises UserError."""
        said: list[str] = []
        try:
            check_continuity(
                self.folder, self.ledger, "r", accept_loss=accept_loss, is_mirror=is_mirror, say=said.append
            )
        finally:
            self.ledger.close()
        return said

    def refusal(self, **options: bool) -> str:
        with pytest.raises(UserError) as caught:
            self.check(**options)
        return f"{caught.value.what} -> {caught.value.remedy}"


@pytest.mark.parametrize(
    ("steps", "words"), [((4,), ""), ((5,), "metrics.jsonl has step 5, but ledger.sqlite ends at step 4")]
)
def test_metrics_are_never_ahead_of_the_ledger(tmp_path: Path, steps: tuple[int, ...], words: str) -> None:
    case = Case(tmp_path).measured(*steps)
    if not words:
        assert case.check() == []
        assert [row["kind"] for row in read_jsonl(case.folder.metrics)] == ["step"], "nothing was lost"
    else:
        assert case.refusal().startswith(f"the files of this run are inconsistent: {words} -> ")


@pytest.mark.parametrize(("trained", "is_refused"), [(2, False), (1, True)])
def test_metrics_lag_two_steps_behind_a_checkpoint_at_most(tmp_path: Path, trained: int, is_refused: bool) -> None:
    case = Case(tmp_path).measured(trained)
    case.saved(4)
    if is_refused:
        assert "checkpoint 4 is recorded, but metrics.jsonl ends at step 1" in case.refusal()
    else:
        assert case.check() == []


def test_a_checkpoint_that_the_ledger_records_counts_though_it_is_not_on_disk(tmp_path: Path) -> None:
    case = Case(tmp_path).measured(1)
    case.ledger.apply([checkpoint(4)])
    case.saved(1)
    assert "checkpoint 4 is recorded, but metrics.jsonl ends at step 1" in case.refusal()


@pytest.mark.parametrize(
    ("version", "facts", "words"),
    [
        (4, {}, ""),
        (5, {}, "checkpoint step_000005 is of step 5, but ledger.sqlite ends at step 4"),
        (
            4,
            {"ledger_seq": 1_000_000},
            "was written when the ledger contained 1000000 facts, but the ledger contains only",
        ),
        (4, {"lineage": "l7"}, "is of lineage l7, which is not in ledger.sqlite"),
    ],
)
def test_a_checkpoint_that_the_ledger_does_not_lead_to_is_a_loss_and_set_aside_once_that_is_accepted(
    tmp_path: Path, version: int, facts: dict[str, Any], words: str
) -> None:
    for name, accept in (("asked", False), ("accepted", True)):
        (tmp_path / name).mkdir()
        case = Case(tmp_path / name).measured(4)
        case.saved(2)
        path = case.saved(version, **facts)
        if not words:
            assert case.check(accept_loss=accept) == []
            continue
        if not accept:
            assert words in case.refusal()
            assert path.exists()
            continue
        said = case.check(accept_loss=True)
        assert words in said[0]
        assert said[1].startswith(f"checkpoint {path.name} was moved to ")
        assert [one.name for one in sorted(case.folder.checkpoints.iterdir())] == ["set_aside", "step_000002"]
        (row,) = [row for row in read_jsonl(case.folder.metrics) if row["kind"] == "loss_accepted"]
        assert row["step"] == 4
        assert words in row["text"]


def test_what_a_copy_of_the_ledger_lacks_is_accepted_by_itself(tmp_path: Path) -> None:
    said = Case(tmp_path).measured(5).check(is_mirror=True)
    assert said == ["accepted: metrics.jsonl has step 5, but ledger.sqlite ends at step 4"]


def test_checkpoints_are_set_aside_alongside_those_of_an_earlier_loss(tmp_path: Path) -> None:
    case = Case(tmp_path).measured(4)
    case.saved(2)
    case.saved(9)
    (case.folder.checkpoints / "set_aside" / "step_000009.1").mkdir(parents=True)
    case.check(accept_loss=True)
    assert len(list((case.folder.checkpoints / "set_aside").iterdir())) == 2


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    case = Case(tmp_path).measured(4)
    case.saved(2)
    (case.saved(9) / "state.json").write_text("{")
    assert case.check() == []


def test_a_ledger_may_hold_as_many_facts_as_when_the_checkpoint_was_made(tmp_path: Path) -> None:
    case = Case(tmp_path).measured(4)
    case.saved(4, ledger_seq=case.ledger.seq)
    assert case.check() == []


@pytest.mark.parametrize(("run_id", "is_refused"), [("r", False), ("", False), ("other", True)])
def test_a_checkpoint_of_another_run_is_never_continued_from(tmp_path: Path, run_id: str, is_refused: bool) -> None:
    case = Case(tmp_path).measured(4)
    case.saved(4, run_id=run_id)
    if is_refused:
        assert "belongs to run other, not to r" in case.refusal(accept_loss=True)
    else:
        assert case.check() == []


def test_a_ledger_of_another_run_is_never_continued_and_only_copies_help(tmp_path: Path) -> None:
    said = Case(tmp_path, run_id="other").refusal(accept_loss=True)
    assert "ledger.sqlite belongs to run other, but state.json belongs to run r" in said
    assert "--accept-loss" not in said
    assert (
        "--accept-loss" in Case(tmp_path / "x" if (tmp_path / "x").mkdir() is None else tmp_path).measured(9).refusal()
    )


def test_without_any_matching_checkpoint_nothing_is_continued_except_before_the_first_one(tmp_path: Path) -> None:
    case = Case(tmp_path, steps=1).measured(1)
    case.saved(2)
    case.saved(3)
    assert "no checkpoint matches the ledger" in case.refusal(accept_loss=True)


def test_before_its_first_checkpoint_a_copy_of_the_ledger_is_continued_where_no_step_is_sampled_again(
    tmp_path: Path,
) -> None:
    """A mirror that ends before the checkpoint was recorded, with its steps or without."""
    for name, version, accepted in (("with", 1, True), ("without", 2, False)):
        (tmp_path / name).mkdir()
        case = Case(tmp_path / name, steps=1).measured(1)
        case.saved(version, ledger_seq=1_000_000)
        if accepted:
            assert any(
                "training would start again from the first step" in words for words in case.check(is_mirror=True)
            )
        else:
            assert "training would start again from the first step" in case.refusal(is_mirror=True)


def test_an_empty_ledger_is_a_loss_where_the_run_has_made_progress(tmp_path: Path) -> None:
    case = Case(tmp_path, steps=0)
    assert case.check() == []
    (tmp_path / "other").mkdir()
    empty = Ledger(tmp_path / "other", run_id="r")
    other = Case.__new__(Case)
    other.folder, other.ledger = RunFolder(tmp_path / "other"), empty
    other.measured(1)
    assert "ledger.sqlite is empty" in other.refusal()


def test_recorded_checkpoints_of_which_none_is_there_are_a_loss(tmp_path: Path) -> None:
    case = Case(tmp_path).measured(4)
    case.ledger.apply([checkpoint(4)])
    assert "records checkpoints up to version 4, but checkpoints/ contains none" in case.refusal()


def test_only_traces_of_work_make_a_ledger_necessary(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ledger = tmp_path / LEDGER_FILE
    assert has_progress(folder) is False
    refuse_absent_ledger(folder, ledger, accept_loss=False)
    (tmp_path / "segments").mkdir()
    assert has_progress(folder) is False
    (tmp_path / "segments" / "000001.seg").touch()
    assert has_progress(folder) is True
    with pytest.raises(UserError, match=f"there is no {LEDGER_FILE}"):
        refuse_absent_ledger(folder, ledger, accept_loss=False)
    refuse_absent_ledger(folder, ledger, accept_loss=True)
    case = Case.__new__(Case)
    case.folder = folder
    case.saved(2)
    with pytest.raises(
        UserError, match="there are checkpoints, but a run cannot be resumed from them without the ledger"
    ):
        refuse_absent_ledger(folder, ledger, accept_loss=True)
    ledger.touch()
    refuse_absent_ledger(folder, ledger, accept_loss=False)


def test_the_last_step_is_the_highest_since_a_loss_was_accepted(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == 0
    metrics.touch()
    assert last_step(metrics) == 0
    rows: list[bytes] = []
    for row, last in (
        (b'{"kind":"step","step":3}', 3), (b'{"kind":"step","step":2}', 3), (b'{"kind":"eval","step":9}', 3),
        (b'{"kind":"step","step":true}', 3), (b'{"kind":"step","step":"8"}', 3),
        (b'{"kind":"loss_accepted","step":1}', 1),
        (b'{"kind":"step","step":2}', 2), (b'{"kind":"step","st', 2),
    ):  # fmt: skip
        rows.append(row)
        metrics.write_bytes(b"\n".join(rows))
        assert last_step(metrics) == last, row
