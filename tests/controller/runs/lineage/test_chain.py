"""Versions, their batches and what restarts replaced, compared with a simulation that copies sets."""

from __future__ import annotations

import random
import sqlite3

import pytest

from controller.coordinator.snapshot import BatchGroup
from controller.ledger.schema import SCHEMA, encode_groups
from controller.runs.lineage.chain import Chain, Member, Version, saved_checkpoints


def simulated(seed: int) -> tuple[sqlite3.Connection, dict[Version, frozenset[Version]], list[Version]]:
    """A ledger of steps and restarts; the batches in each version; and the path to the last version."""
    chance = random.Random(seed)
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    contents: dict[Version, frozenset[Version]] = {Version(0, ""): frozenset()}
    path = [Version(0, "")]
    seq = group = 0
    for number in range(chance.randint(1, 6)):
        start = chance.randint(0, len(path) - 1)
        del path[start + 1 :]
        seq += 1
        db.execute("INSERT INTO lineages VALUES (?, ?, ?, 1, 2, 2, 'wait', 1, NULL, NULL, NULL, NULL)",
                   (seq, f"l{number}", start))  # fmt: skip
        for _ in range(chance.randint(0, 5)):
            seq, group = seq + 1, group + 1
            made = Version(len(path), f"l{number}")
            blob = encode_groups((BatchGroup(group_id=group, sample_indices=(0, 1), first_version=0),))
            db.execute("INSERT INTO batches VALUES (?, ?, ?, 0, ?, NULL)", (seq, made.step, made.lineage, blob))
            contents[made] = contents[path[-1]] | {made}
            path.append(made)
    return db, contents, path


@pytest.mark.parametrize("seed", range(60))
def test_every_version_has_the_batches_it_was_trained_on(seed: int) -> None:
    db, contents, path = simulated(seed)
    chain = Chain(db)
    for version, batches in contents.items():
        assert frozenset(chain.history(version)) == batches
        users = {one for one, inside in contents.items() if version in inside or version.step == 0}
        assert set(chain.descendants(version)) == users
        assert chain.is_replaced(version) == (version not in path)
        assert set(chain.after(version)) == {one for one in contents if one.step and chain.before(one) == version}
    assert chain.version(len(path) - 1) == path[-1]
    for group in range(1, len(contents)):
        assert [len(chain.batches[one].members) for one in chain.steps_of_group(group)] == [2]


def test_reused_groups_belong_to_the_step_that_reused_them() -> None:
    db, _, _ = simulated(3)
    db.execute("DELETE FROM batches")
    blobs = [encode_groups((BatchGroup(group_id=n, sample_indices=(0,), first_version=0),)) for n in range(2)]
    lineage = Chain(db).lineages[-1]
    db.execute("DELETE FROM lineages WHERE lineage != ?", (lineage,))
    db.execute("UPDATE lineages SET checkpoint_version = 0")
    db.execute("INSERT INTO batches VALUES (901, 1, ?, 0, ?, NULL)", (lineage, blobs[0]))
    db.execute("INSERT INTO batches VALUES (902, 2, ?, 0, ?, ?)", (lineage, blobs[1], blobs[0]))
    chain = Chain(db)
    assert chain.steps_of_group(0) == [Version(1, lineage), Version(2, lineage)]
    assert chain.batches[Version(2, lineage)].reused == (Member(0, 0),)


def test_a_checkpoint_of_a_restarted_lineage_holds_the_version_it_started_from() -> None:
    db, _, _ = simulated(0)
    db.execute("DELETE FROM batches")
    db.execute("DELETE FROM lineages")
    blob = encode_groups((BatchGroup(group_id=0, sample_indices=(0,), first_version=0),))
    for seq, name, start in ((1, "l0", 0), (4, "l1", 1)):
        db.execute("INSERT INTO lineages VALUES (?, ?, ?, 1, 2, 2, 'wait', 1, NULL, NULL, NULL, NULL)",
                   (seq, name, start))  # fmt: skip
    db.execute("INSERT INTO batches VALUES (2, 1, 'l0', 0, ?, NULL)", (blob,))
    db.execute("INSERT INTO checkpoints VALUES (5, 1, 'l1', 'checkpoints/step_000001')")
    (saved,) = saved_checkpoints(db, Chain(db))
    assert saved.version == Version(1, "l0")
