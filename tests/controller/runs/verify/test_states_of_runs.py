"""`verify` raises no false alarm in any state of a run, finds what is missing, and reads damaged values."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from old_ledger import make_old
from recorded_run import edit_weights, flip_byte, replace_weights, save_checkpoint

from controller.cli.main import main
from controller.ledger.ledger import Ledger
from controller.ledger.segment_store import Location, SegmentStore
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import write_seal
from controller.runs.verify import run_files, weights
from controller.runs.verify.verify import verify


def findings(folder: RunFolder) -> str:
    return "\n".join(verify(folder).findings)


def notes(folder: RunFolder) -> str:
    return "\n".join(verify(folder).notes)


def execute(folder: RunFolder, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder.ledger, isolation_level=None)) as db:
        db.execute(statement, values)


# ---------------------------------------------------------------- no false alarms


def test_a_step_that_ends_during_the_verification_is_no_difference(copy: RunFolder) -> None:
    with copy.metrics.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 7}) + "\n")
    assert "contains step 7, but the ledger has 6 steps" in findings(copy)
    copy.write_state("running")
    assert findings(copy) == ""
    assert "contains step 7, but the ledger has 6 steps; a step ended after the ledger was read" in notes(copy)


def test_steps_that_a_killed_session_never_reported_are_a_note_before_the_checkpoint_that_follows(
    copy: RunFolder,
) -> None:
    """The trainer completed the checkpoint of version 4 after the controller had died in step 2."""
    rows = [row for row in copy.metrics.read_text().splitlines() if json.loads(row).get("step") not in (3, 4)]
    copy.metrics.write_text("\n".join(rows) + "\n")
    assert "some steps are missing: [3, 4]" in findings(copy)
    said: list[str] = []
    assert list(run_files._metrics(copy, 6, "finished", {0, 4}, said)) == []
    assert "no rows for steps 3 to 4; the session ended before they were reported" in said[0]
    assert len(list(run_files._metrics(copy, 6, "finished", {0, 3}, said))) == 1, "step 4 was not in that checkpoint"


def test_a_seal_that_is_written_during_the_verification_is_not_compared(
    run: RunFolder, copy: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        write_seal(copy, run_id="r", last_digest="00")

    monkeypatch.setattr("controller.runs.verify.verify.check_weights", ends)
    assert findings(copy) == ""
    assert "the last fact of the ledger is not the last fact of the run" in findings(copy)


@pytest.mark.parametrize("invariant", ["recorded-chain", "exactly-once"])
def test_tokens_that_are_purged_during_the_verification_are_no_difference(
    copy: RunFolder, monkeypatch: pytest.MonkeyPatch, invariant: str
) -> None:
    copy.write_state("running")
    read = SegmentStore.read
    with Ledger(copy.root, keep_bytes=0) as ledger:

        def purging(store: SegmentStore, location: Location) -> bytes:
            monkeypatch.setattr(SegmentStore, "read", read)
            assert ledger.purge(covered_step=6).num_samples > 1
            return read(store, location)

        monkeypatch.setattr(SegmentStore, "read", purging)
        assert verify(copy, invariant=invariant).findings == []
    assert not (copy.root / "segments" / "000001.seg").exists()


def test_tokens_that_are_missing_are_a_difference_of_a_running_run_too(copy: RunFolder) -> None:
    copy.write_state("running")
    (copy.root / "segments" / "000001.seg").unlink()
    assert "000001.seg at byte 0: [Errno 2]" in findings(copy)


def test_a_checkpoint_that_is_removed_during_the_verification_is_no_difference(
    copy: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = weights.checkpoints_on_disk(copy.root)
    monkeypatch.setattr(weights, "checkpoints_on_disk", lambda _: listed)
    shutil.rmtree(listed[0][1])
    for status, host in (("running", ""), ("running", "elsewhere")):
        copy.write_state(status, host=host)  # type: ignore[arg-type]
        assert findings(copy) == ""
    copy.write_state("finished")
    assert "manifest.json is missing or damaged" in findings(copy)


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_checkpoints_from_before_digests_are_no_difference(copy: RunFolder, status: str) -> None:
    make_old(copy.ledger)
    Ledger(copy.root).close()
    copy.write_state(status)  # type: ignore[arg-type]
    found = verify(copy)
    assert found.findings == []
    assert f"{copy.checkpoints / 'step_000006'}: the digest is not in the ledger" in found.notes


def test_a_session_that_ends_before_its_first_fact_is_no_difference(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "failed")
    folder.write_state("failed", run_id="r")
    folder.config.write_text("num_steps: 4\ngroups_per_step: 1\ngroup_size: 1\n")
    with Ledger(folder.root, run_id="r") as ledger:
        pass
    write_seal(folder, run_id="r", last_digest=ledger.last_digest.hex())
    assert findings(folder) == ""


def test_a_checkpoint_that_was_not_reported_is_a_difference_of_a_finished_run_only(copy: RunFolder) -> None:
    with closing(sqlite3.connect(copy.ledger)) as db:
        (lineage,) = db.execute("SELECT lineage FROM lineages ORDER BY seq DESC LIMIT 1").fetchone()
    save_checkpoint(copy.root, 7, lineage)
    assert "the ledger has no checkpoint of version 7" in findings(copy)
    copy.write_state("stopped")
    assert findings(copy) == ""
    assert "the ledger has no checkpoint of version 7" in notes(copy)


# ---------------------------------------------------------------- what is missing or was added


def test_a_final_model_that_is_missing_or_not_whole_is_found(copy: RunFolder) -> None:
    (copy.final / "config.json").unlink()
    assert f"{copy.final} has no config.json" in findings(copy)
    shutil.rmtree(copy.final)
    assert f"{copy.final} is missing, although the run is finished" in findings(copy)
    copy.write_state("stopped")
    assert findings(copy) == ""


def test_a_checkpoint_without_manifest_or_with_more_files_is_found(copy: RunFolder) -> None:
    first, second = sorted(copy.checkpoints.glob("step_*"))[:2]
    (first / "manifest.json").unlink()
    (second / "modeling_other.py").write_text("")
    assert f"{first} has no manifest.json" in findings(copy)
    assert f"{second / 'modeling_other.py'} is not in manifest.json, because it was added later" in findings(copy)


def test_a_copy_of_a_checkpoint_is_checked_with_its_run(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(run.checkpoints / "step_000006", tmp_path / "elsewhere")
    assert main(["verify", str(copied), "--run", str(run.root)]) == 0
    assert "4 checkpoints" in capsys.readouterr().out
    assert main(["verify", str(run.checkpoints / "step_000006")]) == 0
    assert "3 checkpoints" in capsys.readouterr().out
    flip_byte(copied / "model.safetensors", random.Random(0))
    assert main(["verify", str(copied), "--run", str(run.root)]) == 1
    assert f"{copied / 'model.safetensors'} is damaged" in capsys.readouterr().out


# ---------------------------------------------------------------- damaged values


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE samples SET size = 1 << 50 WHERE group_id = 0", "the file is truncated"),
        ("UPDATE samples SET size = -5 WHERE group_id = 0", "group 0 sample 0"),
        ("UPDATE samples SET file = 'x' WHERE group_id = 0", "group 0 sample 0"),
        ("UPDATE digests SET digest = 'text'", "differs from its digest"),
        ("UPDATE digests SET content = 'text'", "differs from its digest"),
        ("UPDATE digests SET file = 'text'", "differs from its digest"),
    ],
)
def test_values_of_another_type_or_size_are_differences(copy: RunFolder, statement: str, words: str) -> None:
    execute(copy, statement)
    assert words in findings(copy)


def test_an_error_names_its_file_and_hides_no_other_difference(copy: RunFolder) -> None:
    what = replace_weights(copy, random.Random(1))
    copy.config.write_text("num_steps: abc\ngroups_per_step: 2\ngroup_size: 2\n")
    other = next(path for path in sorted(copy.checkpoints.glob("step_*")) if path.name not in what)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"] = dict.fromkeys(manifest["files"], 7)
    (other / "manifest.json").write_text(json.dumps(manifest))
    found = findings(copy)
    assert f"{copy.config} cannot be read" in found
    assert "is not the checkpoint of version" in found
    assert f"{other}/" in found
    assert f"{copy.ledger} cannot be read" not in found


def test_an_error_of_the_spot_checks_does_not_hide_what_was_found(
    copy: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    what = edit_weights(copy, random.Random(0))
    copy.config.write_text("num_steps: [")
    assert main(["verify", str(copy.root), "--spot", "1"]) == 2
    assert what.rpartition(" ")[2] in capsys.readouterr().out
