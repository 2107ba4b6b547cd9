"""A sample of several trajectories in the ledger: stored whole, read back the same, and recounted by the audit."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ledger_entries import admit, finished, lineage, shipped
from real_ledger import segment_of, trajectory_of

from areal_like.trajectory import Trajectory
from areal_like.verdict import Verdict
from areal_like.wire.messages import SampleFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger, LedgerEntry
from controller.ledger.migrations import SCHEMA_VERSION
from controller.ledger.segment_store import pack_sample, unpack_sample


def fork(versions: list[int], *ids: int) -> Trajectory:
    """A trajectory whose answers have these numbers and equal lengths."""
    ends = np.linspace(0, len(versions), len(ids) + 1)[1:].astype(np.int32)
    return msgspec.structs.replace(
        trajectory_of(versions), answer_ends_A=ends, answer_ids_A=np.array(ids, np.int32), finish_reason="length"
    )


def entry(group_id: int, *trajectories: Trajectory) -> LedgerEntry:
    """As the controller makes it, without the check that a message passes."""
    plain = finished(group_id, [0])
    outcome = msgspec.structs.replace(
        plain.effect.outcome,  # type: ignore[union-attr]
        num_tokens=sum(one.num_sampled for one in trajectories),
        first_version=min(one.first_version for one in trajectories),
        last_version=max(one.last_version for one in trajectories),
    )
    effect = msgspec.structs.replace(plain.effect, outcome=outcome)
    return msgspec.structs.replace(plain, effect=effect, trajectories=trajectories)


SAMPLE = (fork([0, 0, 0], 0), fork([0, 0], 1, 2), fork([0], 3))


def filled(folder: Path, *samples: tuple[Trajectory, ...], cache_bytes: int = 1 << 20) -> Path:
    with Ledger(folder, cache_bytes=cache_bytes) as ledger:
        ledger.apply([lineage(), *(admit(number) for number in range(len(samples)))])
        ledger.apply([entry(number, *trajectories) for number, trajectories in enumerate(samples)])
        ledger.apply([shipped(1, 0)])
    return folder


def same(one: Trajectory, other: Trajectory) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_all_trajectories_of_a_sample_come_back_in_their_order(tmp_path: Path, cache_bytes: int) -> None:
    with Ledger(tmp_path, cache_bytes=cache_bytes) as ledger:
        ledger.apply([lineage(), admit(0), entry(0, *SAMPLE)])
        [sample] = ledger.batch_samples([BatchGroup(group_id=0, first_version=0, sample_indices=(0,))])
    assert all(same(one, other) for one, other in zip(sample.trajectories, SAMPLE, strict=True))
    assert sample.trajectory.finish_reason == "length"
    assert sample.reward == 1.0


def test_a_record_of_an_older_run_is_a_sample_of_one_trajectory() -> None:
    fields = msgspec.msgpack.decode(pack_sample((trajectory_of([0, 1]),), "text"))
    trajectories, text = unpack_sample(msgspec.msgpack.encode(fields[:-3]))
    assert (len(trajectories), text) == (1, "text")
    assert trajectories[0].answer_ids_A is None


def test_a_ledger_of_the_schema_before_goes_on_and_its_samples_are_read(tmp_path: Path) -> None:
    filled(tmp_path, (trajectory_of([0, 0]),))
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    db.execute("ALTER TABLE lineages DROP COLUMN passes_per_batch")
    for column in ("least_groups", "replay_groups", "replay_max_age", "replay_max_reuses"):
        db.execute(f"ALTER TABLE lineages DROP COLUMN {column}")
    db.execute("ALTER TABLE batches DROP COLUMN reused")
    db.execute("ALTER TABLE groups DROP COLUMN draw")
    db.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")
    db.commit()
    db.close()
    with Ledger(tmp_path, must_exist=True) as ledger:
        assert len(ledger.trajectories(0, 0)) == 1
        ledger.apply([admit(1), entry(1, *SAMPLE)])
        assert len(ledger.trajectories(1, 0)) == 3
    (schema,) = (
        sqlite3.connect(tmp_path / LEDGER_FILE).execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    )
    assert int(schema) == SCHEMA_VERSION >= 3
    assert audit(tmp_path).is_clean


def test_each_sampled_token_is_recounted_once(tmp_path: Path) -> None:
    report = audit(filled(tmp_path, SAMPLE))
    assert report.is_clean, report.lines()
    assert report.num_payloads == 1


def test_a_token_that_is_trained_on_twice_is_found(tmp_path: Path) -> None:
    report = audit(filled(tmp_path, (fork([0, 0, 0], 0), fork([0, 0, 0, 0], 0, 1))))
    assert report.findings == ("exactly-once: group 0 sample 0 has the tokens of answer 0 twice",)


def test_a_trajectory_that_is_missing_is_found(tmp_path: Path) -> None:
    filled(tmp_path, SAMPLE)
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    facts = msgspec.json.decode(db.execute("SELECT facts FROM samples").fetchone()[0])
    assert (facts["trajectories"], facts["turns"]) == (3, 4)
    db.execute("UPDATE samples SET facts = ?", (msgspec.json.encode(facts | {"trajectories": 4}),))
    db.commit()
    db.close()
    assert "exactly-once: group 0 sample 0 has 3 trajectories, but 4 in its record" in audit(tmp_path).findings


def test_staleness_counts_from_the_oldest_token_of_any_trajectory() -> None:
    trajectories = (fork([3, 4], 0), fork([2, 2], 1), fork([5], 2))
    message = SampleFinished(
        lease_id=1, group_id=0, sample_index=0, trajectory=trajectories[0], others=trajectories[1:],
        verdict=Verdict(kind="scored", value=1.0),
    )  # fmt: skip
    outcome = SampleOutcome.from_message(message, is_eval=False)
    assert (outcome.first_version, outcome.last_version, outcome.num_tokens) == (2, 5, 5)


def test_samples_of_one_turn_have_the_same_facts_as_ever(tmp_path: Path) -> None:
    filled(tmp_path, (Trajectory.from_prompt(np.arange(2, dtype=np.int32), segment_of([0, 0]), "stop"),))
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    facts = msgspec.json.decode(db.execute("SELECT facts FROM samples").fetchone()[0])
    assert sorted(facts) == ["components", "finish_reason", "reason", "scorer", "timings"]


def test_two_answers_of_one_trajectory_are_two_turns(tmp_path: Path) -> None:
    filled(tmp_path, (fork([0, 0, 1, 1], 0, 1),))
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    facts = msgspec.json.decode(db.execute("SELECT facts FROM samples").fetchone()[0])
    assert (facts["trajectories"], facts["turns"]) == (1, 2)
