"""An in-memory ledger for the coordinator's tests: the same effects, with tokens represented by their versions.

Stores what `controller.ledger.ledger.Ledger` would store, and checks the invariants that need no history of events.
Every record of the coordinator is checked against the earlier ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from controller.coordinator.effects import (
    DropGroup,
    Effect,
    FilterGroup,
    RecordBatch,
    RecordCheckpoint,
    RecordEval,
    RecordGroup,
    RecordLineage,
    RecordSkips,
    StoreFinished,
    StorePartial,
)
from controller.coordinator.replay_buffer import ReplayLimits
from controller.coordinator.snapshot import (
    BatchGroup,
    BatchRecord,
    CheckpointRecord,
    Counts,
    GroupRecord,
    LedgerState,
    SampleRecord,
)


@dataclass
class SampleFacts:
    partial: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_finished: bool = False
    is_kept: bool = False
    value: float | None = None


@dataclass
class GroupFacts:
    version: int
    draw: int
    samples: dict[int, SampleFacts] = field(default_factory=dict)
    fate: str = "live"

    @property
    def first_version(self) -> int:
        return min(sample.versions[0] for sample in self.samples.values())


class LedgerModel:
    """Applies ledger effects, checking invariants on the way."""

    def __init__(
        self, groups_per_step: int, group_size: int, bound: int | None, on_stale: str, least_groups: int | None = None,
        replay: ReplayLimits | None = None,
    ) -> None:  # fmt: skip
        self.replay, self.num_reuses = replay, Counter[int]()
        self.is_purged = False
        """The real ledger may have deleted tokens that could otherwise be reused."""
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.least_groups = least_groups or groups_per_step
        self.num_vacant = 0
        self.bound, self.on_stale = bound, on_stale
        self.groups: dict[int, GroupFacts] = {}
        self.skipped: set[int] = set()
        self.fates: Counter[str] = Counter()
        self.batches: dict[int, BatchRecord] = {}
        self.lineages: list[str] = []
        self.replay_from = 0
        self.checkpoints: list[CheckpointRecord] = []
        self.evals: list[int] = []
        self.num_finished = 0
        self.num_trainer_restarts = 0

    def apply(self, effect: Effect, versions: list[int] | None) -> None:
        match effect:
            case RecordLineage():
                assert effect.lineage not in self.lineages, "a lineage id was used twice"
                self.lineages.append(effect.lineage)
                self.replay_from = effect.checkpoint_version
                self.num_trainer_restarts += bool(effect.trainer_died)
                self.checkpoints = [c for c in self.checkpoints if c.version <= effect.checkpoint_version]
            case RecordGroup():
                self._admit(effect)
            case RecordSkips():
                for skip in effect.draws:
                    assert skip.draw == len(self.groups) + len(self.skipped), "positions are passed over in order"
                    self.skipped.add(skip.draw)
            case StorePartial():
                assert versions is not None
                self._store_partial(effect, versions)
            case StoreFinished():
                if effect.purpose == "train":
                    assert versions is not None
                    self._store_finished(effect, versions)
            case DropGroup():
                self._end(effect.group_id, effect.reason)
            case FilterGroup():
                values = {s.value for s in self.groups[effect.group_id].samples.values() if s.is_kept}
                assert len(values) == 1, "a group with signal was filtered"
                self._end(effect.group_id, "filtered")
            case RecordBatch():
                self._record_batch(effect)
            case RecordCheckpoint():
                self.checkpoints.append(
                    CheckpointRecord(version=effect.version, lineage=effect.lineage, path=effect.path)
                )
            case RecordEval():
                self.evals.append(effect.version)
            case _:
                raise AssertionError(f"not a ledger effect: {effect}")

    def _live(self, group_id: int) -> GroupFacts:
        group = self.groups[group_id]
        assert group.fate == "live", f"group {group_id} is {group.fate} already"
        return group

    def _end(self, group_id: int, fate: str) -> None:
        self._live(group_id).fate = fate
        self.fates["live"] -= 1
        self.fates[fate] += 1

    def _admit(self, effect: RecordGroup) -> None:
        assert effect.group_id == len(self.groups), "draws are numbered 0, 1, 2, ..."
        assert effect.draw is not None
        assert effect.draw not in self.skipped, "a position was passed over and taken"
        assert effect.draw == len(self.groups) + len(self.skipped), "a position was neither taken nor passed over"
        self.groups[effect.group_id] = GroupFacts(effect.version, effect.draw)
        self.fates["live"] += 1
        started = self.fates["live"] + self.fates["consumed"] + self.num_vacant
        assert effect.started == started, f"started is {started}, not {effect.started}"
        if self.bound is not None:
            batch = (started - 1) // self.groups_per_step
            assert batch <= effect.version + self.bound, (
                f"bounded-admission: group {effect.group_id} was admitted too early"
            )

    def _store_partial(self, effect: StorePartial, versions: list[int]) -> None:
        group = self._live(effect.group_id)
        sample = group.samples.setdefault(effect.sample_index, SampleFacts())
        assert not sample.is_finished
        assert effect.start == len(sample.partial), "partial tokens must follow each other"
        fresh = versions[effect.skip :]
        assert len(fresh) == effect.num_tokens > 0
        sample.partial.extend(fresh)
        assert sample.partial == sorted(sample.partial), "stamped-versions: versions decrease"
        assert sample.partial[0] >= group.version, "stamped-versions: a token below its min_version"

    def _store_finished(self, effect: StoreFinished, versions: list[int]) -> None:
        outcome = effect.outcome
        group = self._live(outcome.group_id)
        sample = group.samples.setdefault(outcome.sample_index, SampleFacts())
        assert not sample.is_finished, "exactly-once: a sample was finished twice"
        assert versions == sorted(versions), "stamped-versions: versions decrease"
        assert versions[0] >= group.version
        assert (outcome.first_version, outcome.last_version) == (versions[0], versions[-1])
        sample.versions, sample.partial = versions, []
        sample.is_finished, sample.is_kept, sample.value = True, effect.is_kept, effect.value
        self.num_finished += 1

    def _record_batch(self, effect: RecordBatch) -> None:
        assert effect.lineage == self.lineages[-1]
        if effect.is_replay:
            recorded = self.batches[effect.step]
            same = (recorded.groups, recorded.reused) == (effect.groups, effect.reused)
            assert same, "exactly-once: a replay differs from its record"
            assert effect.step > self.replay_from
        else:
            assert effect.step == len(self.batches) + 1, "steps are recorded in order"
            assert self.least_groups <= len(effect.groups) <= self.groups_per_step
            self.num_vacant += self.groups_per_step - len(effect.groups)
            self._reuse(effect)
            for chosen in effect.groups:
                self._consume(effect.step, chosen)
        self.batches[effect.step] = BatchRecord(
            step=effect.step, lineage=effect.lineage, groups=effect.groups, reused=effect.reused
        )

    def _reuse(self, effect: RecordBatch) -> None:
        """Check the groups of earlier steps in a new batch: nothing that may be reused is left out."""
        if self.replay is None:
            assert not effect.reused
            return
        consumed = {chosen.group_id: chosen for batch in self.batches.values() for chosen in batch.groups}
        usable = {
            group_id
            for group_id, chosen in consumed.items()
            if effect.step - 1 - chosen.first_version <= self.replay.max_age
            and self.num_reuses[group_id] < self.replay.max_reuses
        }
        reused = [chosen.group_id for chosen in effect.reused]
        assert set(reused) <= usable, f"step {effect.step} reused {reused} of {usable}"
        most = min(self.replay.groups_per_step, len(usable))
        assert len(reused) == len(set(reused)) <= most
        assert self.is_purged or len(reused) == most
        assert all(consumed[chosen.group_id] == chosen for chosen in effect.reused)
        self.num_reuses.update(reused)

    def _consume(self, step: int, chosen: BatchGroup) -> None:
        group = self._live(chosen.group_id)
        assert len(group.samples) == self.group_size, "an unfinished group was shipped"
        assert all(sample.is_finished for sample in group.samples.values()), "an unfinished group was shipped"
        kept = tuple(sorted(index for index, sample in group.samples.items() if sample.is_kept))
        assert kept == chosen.sample_indices
        assert chosen.first_version == group.first_version
        staleness = step - 1 - group.first_version
        assert staleness >= 0
        if self.bound is not None and self.on_stale != "keep":
            assert staleness <= self.bound, f"bounded-staleness: step {step} used a group of staleness {staleness}"
        self._end(chosen.group_id, "consumed")

    # ------------------------------------------------------------ the whole

    def check_counts(self, counts: Counts) -> None:
        """drawn = consumed + filtered + dropped + in flight, on both sides."""
        assert counts.add_up(), counts
        fates = +self.fates
        assert counts.drawn == len(self.groups)
        assert counts.consumed == fates["consumed"]
        assert counts.filtered == fates["filtered"]
        assert counts.in_flight == fates["live"]
        dropped = {fate: n for fate, n in fates.items() if fate not in ("live", "consumed", "filtered")}
        assert dropped == {fate: n for fate, n in counts.dropped.items() if n}

    def check_invariant(self) -> None:
        """Invariant I of areal_like/staleness.py, with what the ledger knows of first versions."""
        if self.bound is None or self.on_stale != "wait":
            return
        step = len(self.batches) + 1
        deadlines: list[int] = []
        for group in self.groups.values():
            if group.fate != "live":
                continue
            firsts = [(s.versions or s.partial or [group.version])[0] for s in group.samples.values()]
            if len(firsts) < self.group_size:
                firsts.append(group.version)
            deadlines.append(min(firsts) + self.bound + 1)
        for rank, limit in enumerate(sorted(deadlines), start=1):
            assert rank <= (limit - step + 1) * self.groups_per_step, f"invariant I is broken at {limit}: {deadlines}"

    def load(self) -> LedgerState:
        """What a restarted controller would read."""
        live = tuple(
            GroupRecord(
                group_id=group_id,
                version=group.version,
                draw=group.draw,
                samples=tuple(_record(i, s) for i, s in sorted(group.samples.items()) if s.is_finished or s.partial),
            )
            for group_id, group in self.groups.items()
            if group.fate == "live"
        )
        fates = +self.fates
        return LedgerState(
            num_lineages=len(self.lineages),
            num_trainer_restarts=self.num_trainer_restarts,
            num_drawn=len(self.groups),
            next_draw=max((group.draw for group in self.groups.values()), default=-1) + 1,
            num_filtered=fates["filtered"],
            dropped={fate: n for fate, n in sorted(fates.items()) if fate not in ("live", "consumed", "filtered")},
            live=live,
            batches=tuple(self.batches[step] for step in sorted(self.batches)),
            checkpoints=tuple(self.checkpoints),
            evals=tuple(sorted(set(self.evals))),
            stored=frozenset(group_id for group_id, group in self.groups.items() if group.fate == "consumed"),
        )


def _record(index: int, sample: SampleFacts) -> SampleRecord:
    versions = sample.versions or sample.partial
    return SampleRecord(
        sample_index=index,
        num_tokens=len(versions),
        first_version=versions[0],
        last_version=versions[-1],
        is_finished=sample.is_finished,
        is_kept=sample.is_kept,
        value=sample.value,
    )
