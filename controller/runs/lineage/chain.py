"""Batches, versions and checkpoints of a run: which version was trained on which batches.

A version is named by its step and by the lineage that trained it: after a restart from version k, a new lineage trains
step k + 1 again. Versions up to k belong to both. A lineage is replaced from version k + 1 on once a later one starts
at k.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from controller.ledger.schema import decode_groups, has_column


class Version(NamedTuple):
    """A version of the policy. lineage: the one that trained its step; empty for version 0."""

    step: int
    lineage: str


class Member(NamedTuple):
    """A sample, by group and index."""

    group: int
    sample: int


@dataclass(frozen=True)
class Batch:
    """What one step was trained on. `reused`: groups of earlier steps (`replay_buffer`)."""

    members: tuple[Member, ...]
    reused: tuple[Member, ...]
    is_replay: bool


@dataclass(frozen=True)
class Saved:
    """A checkpoint that the ledger or the disk has. path: empty if its folder is not known."""

    version: Version
    path: str
    digest: str
    """SHA-256 of its manifest; empty: not recorded."""


class Chain:
    """The training of a run, from its ledger. db: a read-only connection; lineages and batches are read at once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        rows = db.execute("SELECT lineage, checkpoint_version FROM lineages ORDER BY seq").fetchall()
        self.lineages: list[str] = [name for name, _ in rows]
        self._starts: list[int] = [start for _, start in rows]
        self._numbers = {name: number for number, name in enumerate(self.lineages)}
        self.batches: dict[Version, Batch] = {}
        reused_column = "reused" if has_column(db, "batches", "reused") else "NULL"
        query = f"SELECT step, lineage, groups, {reused_column}, is_replay FROM batches ORDER BY seq"
        for step, lineage, groups, reused, is_replay in db.execute(query):
            members, again = _members(groups), _members(reused) if reused else ()
            self.batches[Version(step, lineage)] = Batch(members, again, bool(is_replay))
        self.last_step = max((one.step for one in self.batches), default=0)
        self._users: dict[int, list[Version]] = {}
        self._next: dict[Version, list[Version]] = {}
        for version in sorted(self.batches, key=self._order):
            self._next.setdefault(self.before(version), []).append(version)
        for version, batch in self.batches.items():
            for group in dict.fromkeys(one.group for one in (*batch.members, *batch.reused)):
                self._users.setdefault(group, []).append(version)

    def steps_of_group(self, group: int) -> list[Version]:
        """Batches with samples of a group, also reused ones, in the order in which they were recorded."""
        return self._users.get(group, [])

    def version(self, step: int, lineage: str = "") -> Version | None:
        """The version after a step, in a lineage (empty: the last one); None if it was not trained."""
        if step == 0:
            return Version(0, "")
        number = self._numbers.get(lineage, len(self.lineages) - 1)
        for earlier in range(number, -1, -1):
            if step > self._starts[earlier]:
                found = Version(step, self.lineages[earlier])
                return found if found in self.batches else None
        return None

    def before(self, version: Version) -> Version:
        """The version that a step started from."""
        if version.step <= 1:
            return Version(0, "")
        found = self.version(version.step - 1, version.lineage)
        return found or Version(0, "")

    def after(self, version: Version) -> list[Version]:
        """The versions that started from this one: several after a restart."""
        return self._next.get(version, [])

    def history(self, version: Version) -> Iterator[Version]:
        """The versions that led to this one, itself included, newest first, without version 0."""
        while version.step > 0:
            yield version
            version = self.before(version)

    def descendants(self, version: Version) -> list[Version]:
        """All versions that contain the training of this one, itself included, in order of lineage and step."""
        if version.step == 0:
            return [Version(0, ""), *sorted(self.batches, key=self._order)]
        first = self._numbers.get(version.lineage, 0)
        found, is_kept = [], True
        for number in range(first, len(self.lineages)):
            is_kept = is_kept and (number == first or version.step <= self._starts[number])
            if not is_kept:
                break
            name = self.lineages[number]
            found += [one for one in self.batches if one.lineage == name and one.step >= version.step]
        return sorted(found, key=self._order)

    def is_replaced(self, version: Version) -> bool:
        """Whether a restart trained this step again, so that the last version does not contain it."""
        return version.step > 0 and self.version(version.step) != version

    def _order(self, version: Version) -> tuple[int, int]:
        return self._numbers.get(version.lineage, 0), version.step


def _members(blob: bytes) -> tuple[Member, ...]:
    return tuple(Member(group.group_id, index) for group in decode_groups(blob) for index in group.sample_indices)


def saved_checkpoints(db: sqlite3.Connection, chain: Chain) -> list[Saved]:
    """Checkpoints that the ledger has, oldest first, with those that a restart replaced."""
    content = "NULL"
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'digests'").fetchone() is not None:
        content = "(SELECT content FROM digests WHERE digests.seq = checkpoints.seq)"
    found = []
    for step, lineage, path, digest in db.execute(
        f"SELECT version, lineage, path, {content} FROM checkpoints ORDER BY seq"
    ):
        version = chain.version(step, lineage) or Version(step, lineage)
        found.append(Saved(version, path, digest.hex() if isinstance(digest, bytes) else ""))
    return found
