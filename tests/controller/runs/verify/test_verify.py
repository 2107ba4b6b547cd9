"""`verify` finds every change of a recorded run and names it; an unchanged run, or one of an earlier schema, passes."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ledger_entries import admit, checkpoint, finished, lineage, shipped
from old_ledger import make_old
from recorded_run import (
    UNSEALED,
    copy_run,
    edit_metrics,
    edit_segment,
    edit_token,
    flip_byte,
    forge,
    remove_sample,
    reorder_batch,
    replace_weights,
    swap_checkpoints,
    swap_rewards,
)

from controller.cli.main import main
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE
from controller.runs.verify.verify import verify

NUM_KINDS = len(UNSEALED) + 1
NUM_FORGERIES = 15 * NUM_KINDS


def findings(folder: RunFolder) -> str:
    return "\n".join(verify(folder).findings)


def test_an_unchanged_run_passes_and_says_what_was_compared(run: RunFolder) -> None:
    found = verify(run)
    assert found.findings == []
    assert found.notes == []
    assert len(found.policy_digest) == len(found.last_digest) == 64
    assert "3 checkpoints, 1 exported models" in found.counts[0]
    assert "in flight" in found.counts[1]


@pytest.mark.parametrize("kind", range(NUM_KINDS))
def test_every_forgery_is_found(run: RunFolder, tmp_path: Path, kind: int) -> None:
    for seed in range(kind, NUM_FORGERIES, NUM_KINDS):
        folder = copy_run(run, tmp_path / str(seed))
        name, what = forge(folder, seed)
        assert verify(folder).findings, f"seed {seed}: {name}: {what} was not found"
        shutil.rmtree(folder.root)


# ---------------------------------------------------------------- what a finding names


@pytest.mark.parametrize(
    ("forgery", "words"),
    [
        (swap_rewards, "recorded-chain: group {0} sample {1} differs from its digest"),
        (edit_token, "recorded-chain: group {0} sample {1}: the tokens, log-probs or versions in "),
        (edit_segment, "recorded-chain: group "),
        (reorder_batch, "the samples or their order differ from the policy digest"),
        (replace_weights, "is not the checkpoint of version "),
        (swap_checkpoints, "is a checkpoint of version "),
        (edit_metrics, "metrics.jsonl: "),
    ],
)
def test_a_finding_names_what_was_changed(copy: RunFolder, forgery: Any, words: str) -> None:
    what = forgery(copy, random.Random(5))
    name = what.partition(":")[0].rpartition(" ")[2].removeprefix("g").split(".")
    assert words.format(*name, "") in findings(copy), (what, findings(copy))


def test_the_first_difference_comes_first(copy: RunFolder) -> None:
    with closing(sqlite3.connect(copy.ledger)) as db:
        db.execute("UPDATE samples SET worker = 'x' WHERE group_id IN (0, 1, 2) AND sample_index = 1")
        db.commit()
    seqs = sqlite3.connect(copy.ledger).execute(
        "SELECT group_id FROM samples WHERE group_id IN (0, 1, 2) AND sample_index = 1 ORDER BY seq"
    )
    named = [line.split()[2] for line in verify(copy).findings]
    assert named == [str(group_id) for (group_id,) in seqs]


def test_a_removed_sample_is_named_by_its_number_or_by_the_batch_that_used_it(copy: RunFolder) -> None:
    what = remove_sample(copy, random.Random(1))
    assert "without" in what
    assert "is missing, because it was removed" in findings(copy)


def test_a_fact_without_a_digest_and_two_facts_with_one_number_are_found(copy: RunFolder) -> None:
    with closing(sqlite3.connect(copy.ledger)) as db:
        db.execute("INSERT INTO incidents VALUES (100000, 'incident', 'made up')")
        db.execute(
            "INSERT INTO incidents SELECT seq, 'incident', 'the same number' FROM batches WHERE step = 2 LIMIT 1"
        )
        db.commit()
    assert "the incident 'made up' has no digest" in findings(copy)
    assert "is also the number of another fact" in findings(copy)


def test_the_end_of_the_ledger_cannot_be_cut_off(copy: RunFolder) -> None:
    with closing(sqlite3.connect(copy.ledger)) as db:
        db.execute("DELETE FROM incidents")
        db.execute("DELETE FROM digests WHERE seq NOT IN (SELECT seq FROM digests ORDER BY seq LIMIT 20)")
        db.commit()
    assert findings(copy)
    with Ledger(copy.root) as ledger:
        ledger.apply([admit(ledger.load().num_drawn)])
    assert findings(copy)


# ---------------------------------------------------------------- every value, every byte


def values(path: Path) -> Iterator[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if db.execute(f"SELECT 1 FROM {table}").fetchone():
                yield from ((table, row[1]) for row in db.execute(f"PRAGMA table_info({table})").fetchall())


def changed(value: Any) -> Any:
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    return 7 if value is None else value + 1


def test_every_value_of_the_ledger_is_covered(run: RunFolder, tmp_path: Path) -> None:
    chance, seen = random.Random(0), set()
    for table, column in values(run.ledger):
        if table == "partials":  # unfinished answers have checksums only
            continue
        folder = copy_run(run, tmp_path / f"{table}-{column}")
        (folder.root / SEAL_FILE).unlink()
        with closing(sqlite3.connect(folder.ledger, isolation_level=None)) as db:
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})").fetchall()]
            row = chance.choice(db.execute(f"SELECT * FROM {table}").fetchall())
            same = " AND ".join(f'"{name}" IS ?' for name in names)
            with contextlib.suppress(sqlite3.IntegrityError):  # then nothing is changed
                db.execute(f'UPDATE {table} SET "{column}" = ? WHERE {same}', (changed(row[names.index(column)]), *row))
                assert verify(folder).findings, f"{column} of {row} in {table} was changed and not found"
                seen.add(table)
        shutil.rmtree(folder.root)
    assert seen == {
        "meta", "lineages", "groups", "cut_samples", "samples", "batches", "checkpoints", "trainer_restarts", "evals",
        "skipped_draws", "incidents", "digests",
    }  # fmt: skip


def test_a_byte_of_any_sealed_file_is_found(run: RunFolder, tmp_path: Path) -> None:
    folder = copy_run(run, tmp_path / "sealed")
    names = sorted(json.loads((folder.root / SEAL_FILE).read_text())["files"])
    assert {"config.yaml", "metrics.jsonl", "summary.json", "ledger.sqlite", "final/provenance.json"} <= set(names)
    for seed, name in enumerate(names):
        path = folder.root / name
        before = path.read_bytes()
        flip_byte(path, random.Random(seed))
        assert name in findings(folder)
        path.write_bytes(before)
    (folder.root / "segments" / "999999.seg").write_bytes(b"new")
    assert "999999.seg is not in seal.json, because it was added later" in findings(folder)


def test_a_sample_cannot_be_declared_purged(copy: RunFolder) -> None:
    with closing(sqlite3.connect(copy.ledger)) as db:
        db.execute("UPDATE samples SET file = NULL WHERE group_id = 1 AND sample_index = 0")
        db.commit()
    assert "group 1 sample 0 is recorded as removed, but " in findings(copy)


# ---------------------------------------------------------------- what is no difference


def test_digests_remain_when_tokens_are_purged(copy: RunFolder) -> None:
    before = verify(copy)
    with Ledger(copy.root, segment_bytes=2000, keep_bytes=0) as ledger:
        assert ledger.purge(covered_step=6).num_samples > 0
    after = verify(copy)
    assert after.findings == []
    assert after.policy_digest == before.policy_digest
    assert "(0 removed)" in before.counts[0]
    assert "(0 removed)" not in after.counts[0]
    with closing(sqlite3.connect(copy.ledger)) as db:
        db.execute("UPDATE samples SET value = 0.125 WHERE file IS NULL AND group_id = 1")
        db.commit()
    assert "group 1 sample 0 differs from its digest" in findings(copy)


def test_a_ledger_without_digests_is_recounted_and_says_so(copy: RunFolder) -> None:
    make_old(copy.ledger)
    found = verify(copy)
    assert found.findings == []
    assert "the ledger has schema version 1, which does not record digests" in found.notes
    assert "7 steps" not in found.counts[1]


def test_a_migrated_ledger_has_digests_from_then_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "old")
    with Ledger(folder.root, run_id="r") as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0]), shipped(1, 0), checkpoint(1), admit(1), finished(1, [0])])
    make_old(folder.ledger)
    with Ledger(folder.root) as ledger:
        ledger.apply([shipped(2, 1), admit(2), finished(2, [1])])
    folder.config.write_text("num_steps: 4\ngroups_per_step: 1\ngroup_size: 1\n")
    found = verify(folder)
    assert found.findings == []
    assert (
        "facts 1 to 7 have no digests, because an earlier version of areal_like recorded them; they were only recounted"
        in found.notes
    )
    with closing(sqlite3.connect(folder.ledger)) as db:
        db.execute("UPDATE samples SET value = 0.5 WHERE group_id = 2")
        db.commit()
    assert "group 2 sample 0 differs from its digest" in findings(folder)


def test_a_step_that_is_trained_again_has_the_same_policy_digest(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), admit(1), finished(0, [0]), finished(1, [0]), shipped(1, 0), checkpoint(1)])
        ledger.apply([shipped(2, 1), lineage("l1", 1), shipped(2, 1, "l1", is_replay=True)])
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as db:
        first, second, again = (
            content for (content,) in db.execute("SELECT content FROM batches JOIN digests USING (seq) ORDER BY seq")
        )
    assert first != second == again


def test_an_open_ledger_is_verified_as_of_its_last_commit(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "now")
    folder.write_state("running", run_id="r")
    folder.config.write_text("num_steps: 4\ngroups_per_step: 1\ngroup_size: 1\n")
    with Ledger(folder.root, run_id="r") as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0]), shipped(1, 0)])
        found = verify(folder)
        assert found.findings == []
        assert any("there is no seal.json" in note for note in found.notes)
        ledger.apply([admit(1)])
        assert verify(folder).last_digest != found.last_digest


# ---------------------------------------------------------------- the command


def test_exit_status_and_output(run: RunFolder, copy: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.root)]) == 0
    shown = capsys.readouterr().out
    assert "all checks passed" in shown
    assert f"policy digest: {verify(run).policy_digest}" in shown
    swap_rewards(copy, random.Random(0))
    assert main(["verify", str(copy.root)]) == 1
    assert capsys.readouterr().out.count("first difference: recorded-chain: group ") == 1
    assert main(["verify", str(copy.root), "--invariant", "exactly-once"]) == 0
    assert main(["verify", str(copy.root), "--invariant", "recorded-chain", "--json"]) == 1
    assert main(["verify", str(copy.root / "none")]) == 2
    with pytest.raises(SystemExit) as wrong:
        main(["verify", str(copy.root), "--invariant", "exactly-twice"])
    assert wrong.value.code == 2


def test_the_final_model_finds_its_run(
    run: RunFolder, copy: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run.final)]) == 0
    moved = tmp_path / "moved"
    shutil.copytree(run.final, moved)
    assert main(["verify", str(moved)]) == 2
    assert "specify the run with --run RUN" in capsys.readouterr().err
    assert main(["verify", str(moved), "--run", str(run.root)]) == 0
    flip_byte(moved / "model.safetensors", random.Random(0))
    assert main(["verify", str(moved), "--run", str(run.root)]) == 1
    assert f"{moved / 'model.safetensors'} differs from its digest in provenance.json" in capsys.readouterr().out


def test_a_final_model_with_other_weights_and_a_provenance_that_fits_is_found(copy: RunFolder) -> None:
    from trainer.checkpoints.provenance import PROVENANCE, write_provenance

    (copy.final / PROVENANCE).unlink()
    data = bytearray((copy.final / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy.final / "model.safetensors").write_bytes(data)
    write_provenance(copy.final, copy.checkpoints / "step_000006")
    assert f"{copy.final}: the tensor w differs from the one in checkpoint step_000006" in findings(copy)


def test_a_damaged_ledger_file_is_a_finding(copy: RunFolder) -> None:
    (copy.root / LEDGER_FILE).write_bytes(b"no database" * 100)
    assert "ledger.sqlite cannot be read" in findings(copy)
