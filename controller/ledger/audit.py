"""Recounts the invariants from `bounded-admission` to `stamped-versions` from the ledger of a finished, crashed or
running run, independently of the code that enforces them.

Read-only. The coordinator's code is not used: admission and staleness are recomputed from recorded facts and, if
payloads are still stored, from the versions stamped on the tokens.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from areal_like.errors import LedgerError, UserError
from areal_like.staleness import OVER_AGE, OnStale
from areal_like.trajectory import NO_VERSION, repeated_answers
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import LEDGER_FILE, REMEDY, SEGMENT_FOLDER
from controller.ledger.read_only import is_purged
from controller.ledger.schema import decode_groups
from controller.ledger.segment_store import Location, SegmentStore, unpack_sample, unpack_segment
from controller.ledger.source_audit import declared_models, source_findings

MAX_FINDINGS = 100


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an audit. `findings` is empty for a clean ledger; each names the violated invariant."""

    findings: tuple[str, ...]
    num_drawn: int
    num_consumed: int
    num_filtered: int
    dropped: dict[str, int]
    num_in_flight: int
    num_steps: int
    num_lives: int
    num_samples: int
    num_payloads: int
    """Samples whose tokens were still stored and were recounted individually."""
    staleness: dict[int, int]
    """Consumed groups by staleness."""
    num_trained: int
    """Samples trained on, each in one step."""
    num_repeats: int
    """Additional passes over them within that step (`trainer.passes_per_batch`)."""
    num_reused: int
    """Times that later steps trained on samples again (`replay_buffer`)."""

    @property
    def is_clean(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def lines(self) -> list[str]:
        """The report as text."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        head = (
            f"ledger: {self.num_drawn} groups drawn = {self.num_consumed} consumed in {self.num_steps} steps + "
            f"{self.num_filtered} filtered + {sum(self.dropped.values())} dropped ({dropped}) + "
            f"{self.num_in_flight} in flight; {self.num_payloads} of {self.num_samples} samples recounted by token"
        )
        if self.num_repeats:
            head += f"; {self.num_trained} samples trained on, each in one step, with {self.num_repeats} repeats in it"
        if self.num_reused:
            head += f"; later steps trained on samples again {self.num_reused} times"
        return [head, *(self.findings or ("all invariants hold",))]


class _Lineage(NamedTuple):
    seq: int
    checkpoint_version: int
    groups_per_step: int
    group_size: int
    bound: int | None
    on_stale: OnStale
    passes_per_batch: int
    least_groups: int
    replay_groups: int
    replay_max_age: int
    replay_max_reuses: int


class _Group(NamedTuple):
    version: int
    started: int
    seq: int
    fate: str
    reason: str
    step: int | None
    end_seq: int | None


class _Sample(NamedTuple):
    first_version: int
    last_version: int
    num_tokens: int
    is_kept: bool
    facts: bytes
    file: int | None
    offset: int
    size: int


def audit(run_dir: Path) -> AuditReport:
    """Recount the invariants of a run from its ledger, independently of the code that enforces them.

    Args:
        run_dir: the run's folder.

    Returns:
        The counts, and a line for each violation.

    Raises:
        UserError: there is no ledger.
        LedgerError: it cannot be read.

    Example:
        >>> audit(Path("runs/quickstart")).is_clean
        True
    """
    path = run_dir / LEDGER_FILE
    if not path.exists():
        raise UserError("the folder contains no ledger", where=str(run_dir), remedy="specify the folder of a run")
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)
    try:
        db.execute("BEGIN")  # one consistent view, also of a run in progress
        return _Audit(db, run_dir).report()
    except (sqlite3.Error, ValueError) as error:
        raise LedgerError(f"{path} cannot be read ({error}); {REMEDY}") from error
    finally:
        db.close()


class _Audit:
    def __init__(self, db: sqlite3.Connection, run_dir: Path) -> None:
        self._db, self._run_dir = db, run_dir
        self._findings: list[str] = []
        self._staleness: Counter[int] = Counter()
        self._num_payloads = 0
        self._num_reused = 0
        self._num_reuses: Counter[int] = Counter()
        self._first_steps: dict[int, int] = {}
        """The step that each group was generated for."""
        self._samples_of_step: dict[int, int] = {}
        self._passes_of_step: dict[int, int] = {}
        """Passes over the samples of each step, in the lineage that last recorded it."""
        self._models = declared_models(run_dir)
        self._segments = SegmentStore(run_dir / SEGMENT_FOLDER, segment_bytes=1, fsync=False)
        columns = "seq, checkpoint_version, groups_per_step, group_size, max_staleness, on_stale, "
        # A ledger of an older version is read without migration (migrations.py).
        known = {row[1] for row in db.execute("PRAGMA table_info(lineages)")}
        columns += "passes_per_batch" if "passes_per_batch" in known else "1"
        columns += ", coalesce(least_groups, groups_per_step)" if "least_groups" in known else ", groups_per_step"
        for name in ("replay_groups", "replay_max_age", "replay_max_reuses"):
            columns += f", coalesce({name}, 0)" if name in known else ", 0"
        self._reused = "reused" if "replay_groups" in known else "NULL"
        self._lineages = [_Lineage(*row) for row in db.execute(f"SELECT {columns} FROM lineages ORDER BY seq")]
        columns = "group_id, version, started, seq, fate, reason, step, end_seq"
        self._groups = {row[0]: _Group(*row[1:]) for row in db.execute(f"SELECT {columns} FROM groups")}
        self._samples: dict[int, dict[int, _Sample]] = {}
        columns = "group_id, sample_index, first_version, last_version, num_tokens, is_kept, facts, file, offset, size"
        for row in db.execute(f"SELECT {columns} FROM samples"):
            self._samples.setdefault(row[0], {})[row[1]] = _Sample(*row[2:])

    def report(self) -> AuditReport:
        try:
            self._recount_admission()
            self._recount_samples()
            self._recount_partials()
            steps = self._recount_batches()
            self._recount_fates(steps)
        finally:
            self._segments.close()
        fates = Counter(group.fate for group in self._groups.values())
        return AuditReport(
            findings=tuple(self._findings[:MAX_FINDINGS]),
            num_drawn=len(self._groups),
            num_consumed=fates["consumed"],
            num_filtered=fates["filtered"],
            dropped=dict(Counter(group.reason for group in self._groups.values() if group.fate == "dropped")),
            num_in_flight=fates["live"],
            num_steps=len(steps),
            num_lives=len(self._lineages),
            num_samples=sum(map(len, self._samples.values())),
            num_payloads=self._num_payloads,
            staleness=dict(sorted(self._staleness.items())),
            num_trained=sum(self._samples_of_step.values()),
            num_reused=self._num_reused,
            num_repeats=sum(num * (self._passes_of_step[step] - 1) for step, num in self._samples_of_step.items()),
        )

    def _find(self, invariant: str, text: str) -> None:
        self._findings.append(f"{invariant}: {text}")

    def _lineage_at(self, seq: int) -> _Lineage | None:
        index = bisect_right([lineage.seq for lineage in self._lineages], seq) - 1
        return self._lineages[index] if index >= 0 else None

    # ------------------------------------------------------------ bounded-admission

    def _recount_admission(self) -> None:
        """Count the started groups at every admission from the order of facts."""
        changes: list[tuple[int, int, int | None]] = [(seq, vacant, None) for seq, vacant in self._vacancies()]
        for group_id, group in self._groups.items():
            changes.append((group.seq, 1, group_id))
            if group.fate in ("dropped", "filtered") and group.end_seq is not None:
                changes.append((group.end_seq, -1, group_id))
        started = 0
        for seq, change, group_id in sorted(changes, key=lambda one: one[0]):
            started += change
            if change < 0 or group_id is None:
                continue
            group = self._groups[group_id]
            if group.started != started:
                self._find(
                    "bounded-admission",
                    f"group {group_id} was admitted as number {group.started}, but the recount gives {started}",
                )
            lineage = self._lineage_at(seq)
            if lineage is None:
                self._find("exactly-once", f"group {group_id} was drawn before the run started")
            elif lineage.bound is not None:
                batch = (started - 1) // lineage.groups_per_step
                if batch > group.version + lineage.bound:
                    self._find(
                        "bounded-admission",
                        f"group {group_id} of batch {batch} was admitted at version {group.version}, although the "
                        f"staleness bound is {lineage.bound}",
                    )

    def _vacancies(self) -> Iterator[tuple[int, int]]:
        """Places that steps left empty, by when: they count as started (`dynamic_batch`)."""
        rows = self._db.execute("SELECT seq, groups FROM batches WHERE NOT is_replay ORDER BY seq")
        for seq, blob in rows:
            lineage = self._lineage_at(seq)
            if lineage is not None and lineage.least_groups < lineage.groups_per_step:
                yield seq, lineage.groups_per_step - len(decode_groups(blob))

    # ------------------------------------------------------------ stamped-versions

    def _recount_samples(self) -> None:
        for group_id, samples in self._samples.items():
            group = self._groups.get(group_id)
            if group is None:
                self._find("exactly-once", f"there are samples of group {group_id}, which was never drawn")
                continue
            for index, sample in samples.items():
                if sample.first_version < group.version:
                    self._find(
                        "stamped-versions",
                        f"group {group_id} sample {index} is older than its admission version {group.version}",
                    )
                if sample.file is None:
                    if group.fate == "live":
                        self._find(
                            "exactly-once", f"group {group_id} sample {index} was purged while its group is in flight"
                        )
                    continue
                self._recount_tokens(group_id, index, sample)

    def _recount_tokens(self, group_id: int, index: int, sample: _Sample) -> None:
        assert sample.file is not None
        try:
            payload = self._segments.read(Location(sample.file, sample.offset, sample.size))
        except LedgerError:
            if is_purged(self._run_dir, sample.file):  # after this view of the ledger began
                return
            raise
        trajectories, _ = unpack_sample(payload)
        sampled = [trajectory.versions_T[trajectory.loss_mask_T] for trajectory in trajectories]
        versions = np.concatenate(sampled)
        self._num_payloads += 1
        if any(bool((np.diff(one) < 0).any()) for one in sampled):
            self._find("stamped-versions", f"policy versions decrease within group {group_id} sample {index}")
        for answer in repeated_answers(trajectories):
            self._find("exactly-once", f"group {group_id} sample {index} has the tokens of answer {answer} twice")
        for fault in source_findings(trajectories, self._models):
            self._find("stamped-versions", f"group {group_id} sample {index} {fault}")
        recorded = msgspec.json.decode(sample.facts).get("trajectories", 1)
        if len(trajectories) != recorded:
            self._find(
                "exactly-once",
                f"group {group_id} sample {index} has {len(trajectories)} trajectories, but {recorded} in its record",
            )
        if (int(versions.min()), int(versions.max())) != (sample.first_version, sample.last_version):
            self._find("stamped-versions", f"versions of group {group_id} sample {index} differ from what was recorded")
        if len(versions) != sample.num_tokens:
            self._find(
                "exactly-once",
                f"group {group_id} sample {index} has {len(versions)} tokens, but {sample.num_tokens} in its record",
            )

    def _recount_partials(self) -> None:
        columns = "group_id, sample_index, start, num_tokens, file, offset, size"
        known: dict[tuple[int, int], tuple[int, int]] = {}
        rows = self._db.execute(f"SELECT {columns} FROM partials ORDER BY group_id, sample_index, start")
        for group_id, index, start, num_tokens, *place in rows:
            group = self._groups.get(group_id)
            if group is None or group.fate != "live" or index in self._samples.get(group_id, {}):
                self._find(
                    "exactly-once",
                    f"there are partial tokens of group {group_id} sample {index}, which is not in flight",
                )
                continue
            length, last = known.get((group_id, index), (0, NO_VERSION))
            segment = unpack_segment(self._segments.read(Location(*place)))
            if start != length or len(segment) != num_tokens:
                self._find(
                    "exact-interruption",
                    f"partial tokens of group {group_id} sample {index} have a gap at token {length}",
                )
            if segment.first_version < max(last, group.version):
                self._find("stamped-versions", f"versions of group {group_id} sample {index} decrease at token {start}")
            known[group_id, index] = (start + num_tokens, segment.last_version)

    # ------------------------------------------------------------ bounded-staleness and exactly-once

    def _recount_batches(self) -> dict[int, set[int]]:
        """Group ids by step along the surviving lineage."""
        steps: dict[int, set[int]] = {}
        blobs: dict[int, tuple[bytes, bytes | None]] = {}
        lasts: dict[int, int] = {}
        for seq, step, is_replay, *recorded in self._db.execute(
            f"SELECT seq, step, is_replay, groups, {self._reused} FROM batches ORDER BY seq"
        ):
            blob, reused = recorded
            lineage = self._lineage_at(seq)
            if lineage is None:
                self._find("exactly-once", f"step {step} was recorded before the run started")
                continue
            last = lasts.get(lineage.seq, lineage.checkpoint_version)
            if step != last + 1:
                self._find("exactly-once", f"step {step} was recorded after step {last} of the same lineage")
            lasts[lineage.seq] = step
            self._passes_of_step[step] = lineage.passes_per_batch
            if is_replay or step in blobs:
                if blobs.get(step) != (blob, reused) or not is_replay:
                    self._find("exactly-once", f"step {step} was recorded twice and differs")
                if step <= lineage.checkpoint_version:
                    self._find(
                        "exactly-once",
                        f"step {step} was replayed although checkpoint {lineage.checkpoint_version} covers it",
                    )
                continue
            blobs[step] = (blob, reused)
            groups = decode_groups(blob)
            steps[step] = {group.group_id for group in groups}
            self._samples_of_step[step] = sum(len(group.sample_indices) for group in groups)
            fewest, most = lineage.least_groups, lineage.groups_per_step
            if len(steps[step]) != len(groups) or not fewest <= len(groups) <= most:
                wanted = f"{most}" if fewest == most else f"{fewest} to {most}"
                self._find("exactly-once", f"step {step} has {len(groups)} groups, not {wanted}")
            for group in groups:
                self._recount_consumed(step, group.group_id, group.sample_indices, lineage)
            self._recount_reused(step, () if reused is None else decode_groups(reused), lineage)
            self._first_steps.update(dict.fromkeys(steps[step], step))
        if sorted(steps) != list(range(1, len(steps) + 1)):
            self._find("exactly-once", f"recorded steps have gaps: {sorted(steps)[:20]}")
        return steps

    def _recount_consumed(self, step: int, group_id: int, indices: tuple[int, ...], lineage: _Lineage) -> None:
        samples = self._samples.get(group_id, {})
        if len(samples) != lineage.group_size:
            self._find(
                "exactly-once",
                f"step {step} used group {group_id} with {len(samples)} of {lineage.group_size} samples finished",
            )
        kept = {index for index, sample in samples.items() if sample.is_kept}
        if set(indices) != kept or len(indices) != len(kept):
            self._find(
                "exactly-once", f"step {step} used samples {indices} of group {group_id}, but {sorted(kept)} were kept"
            )
        if not samples:
            return
        staleness = step - 1 - min(sample.first_version for sample in samples.values())
        self._staleness[staleness] += 1
        if max(sample.last_version for sample in samples.values()) > step - 1:
            self._find(
                "stamped-versions", f"step {step} used tokens of group {group_id} from a version that did not exist yet"
            )
        if lineage.bound is not None and OVER_AGE[lineage.on_stale].is_strict and staleness > lineage.bound:
            self._find(
                "bounded-staleness",
                f"step {step} used group {group_id} at staleness {staleness}, but the bound is {lineage.bound}",
            )

    def _recount_reused(self, step: int, groups: tuple[BatchGroup, ...], lineage: _Lineage) -> None:
        """Check the groups of earlier steps that a step trained on again."""
        if len(groups) > lineage.replay_groups or len({group.group_id for group in groups}) != len(groups):
            self._find(
                "exactly-once",
                f"step {step} reused {len(groups)} groups, but at most {lineage.replay_groups} are allowed",
            )
        for group in groups:
            if group.group_id not in self._first_steps:
                self._find("exactly-once", f"step {step} reused group {group.group_id} of no earlier step")
            self._num_reused += len(group.sample_indices)
            self._num_reuses[group.group_id] += 1
            if self._num_reuses[group.group_id] > lineage.replay_max_reuses:
                self._find(
                    "exactly-once",
                    f"step {step} reused group {group.group_id}, which is reuse {self._num_reuses[group.group_id]} of "
                    f"this group, but at most {lineage.replay_max_reuses} are allowed",
                )
            samples = self._samples.get(group.group_id, {})
            oldest = min((sample.first_version for sample in samples.values()), default=NO_VERSION)
            if step - 1 - oldest > lineage.replay_max_age:
                self._find(
                    "bounded-staleness",
                    f"step {step} reused group {group.group_id} at staleness {step - 1 - oldest}, but "
                    f"replay_buffer.max_age is {lineage.replay_max_age}",
                )
            self._recount_consumed(step, group.group_id, group.sample_indices, lineage)

    def _recount_fates(self, steps: dict[int, set[int]]) -> None:
        if sorted(self._groups) != list(range(len(self._groups))):
            self._find("exactly-once", "draw numbers have gaps")
        uses = Counter(group_id for groups in steps.values() for group_id in groups)
        for group_id, number in uses.items():
            if number > 1:
                self._find("exactly-once", f"group {group_id} was used by {number} steps")
        for group_id, group in self._groups.items():
            if (group.fate == "consumed") != (uses[group_id] > 0):
                self._find("exactly-once", f"group {group_id} is {group.fate} but was used by {uses[group_id]} steps")
            elif group.fate == "consumed" and group_id not in steps.get(group.step or 0, set()):
                self._find("exactly-once", f"group {group_id} is assigned to step {group.step}, which did not use it")
            elif group.fate not in ("consumed", "filtered", "dropped", "live"):
                self._find("exactly-once", f"group {group_id} has the unknown fate {group.fate}")
            if group.fate == "dropped" and not group.reason:
                self._find("exactly-once", f"group {group_id} was dropped without a reason")
