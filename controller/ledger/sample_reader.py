"""Reads statistics of samples from the ledger as arrays, also while the run writes it.

Uses a read-only connection, and an even selection of groups if there are too many. Invariants are checked in audit.py.
Ledgers with an unsupported schema are rejected.

A reader of a WAL database never blocks the run and is never blocked by it. If a folder cannot be written to, SQLite
cannot create its shared index; then a cleanly closed ledger (without a log) is read as an immutable file.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np

from controller.ledger.migrations import SCHEMA_VERSION, is_readable, schema_version

LOCK_WAIT_S = 2.0
READ_S = 30.0
"""Time limit of reading; a ledger that takes longer is not used in a report."""
HANDLER_STEPS = 10_000
"""Number of SQLite virtual machine instructions between checks of the time limit."""
IDS_PER_QUERY = 500


class Unreadable(Exception):
    """Raised with the reason why a ledger cannot be read."""


class Removed(NamedTuple):
    """Draws or groups that a filter left out, of one difficulty (rounded to a tenth), with the mean length of
    answers.
    """

    level: float
    num_draws: int
    mean_tokens: float


@dataclass(frozen=True)
class SampleStats:
    """Consumed and kept samples. Arrays are aligned and ordered by step; if `share` is below 1 they contain a
    selection.
    """

    step: np.ndarray
    """Step that used the sample, int64."""
    length: np.ndarray
    """Tokens the policy sampled, int64."""
    value: np.ndarray
    """Reward, float64; NaN if there is none."""
    staleness: np.ndarray
    """Staleness of the sample's group in that step, int64."""
    group: np.ndarray
    """Group id, int64."""
    is_cut: np.ndarray
    """Whether the answer ended at the token limit, bool."""
    components: dict[str, np.ndarray]
    """Named components of the reward, float64, NaN if a sample does not have it."""
    verdicts: dict[str, int]
    """All training samples by verdict kind, including filtered, dropped and unused ones."""
    failures: dict[tuple[str, str, str], int]
    """Samples without a score by (failed scorer, verdict kind, handling); empty texts if unknown."""
    components_by_step: dict[str, list[tuple[int, float]]]
    """(step, mean) of each component, over the selected samples."""
    fates: dict[str, int]
    """Groups by fate: live, consumed, filtered, dropped."""
    dropped_by_reason: dict[str, int]
    """Groups dropped, by reason."""
    timings_s: dict[str, float]
    """Mean seconds of the selected samples by phase: queue_s, generate_s, score_s, ..."""
    share: float
    """Share of consumed groups in the arrays."""
    removed: dict[str, list[Removed]] = field(default_factory=dict)
    """Rows and groups left out by filters: `passed over`: draws skipped by data.curriculum, by the success rate of
    their row; `filtered`: groups of filter_zero_signal, by their reward.
    """

    @property
    def zero_signal_late(self) -> tuple[float, float]:
        """In the last fifth of the steps: share of groups with equal rewards, and of those the share at the best value
        of the run. If all values of the run are equal, the value is the best if it is above 0.
        """
        if not len(self.step):
            return float("nan"), float("nan")
        return self._zero_signal(self.step > self.step[-1] - max(1.0, (self.step[-1] - self.step[0] + 1) / 5))

    @property
    def _best_value(self) -> float:
        """Best value of the run; NaN if no value is known, or the only one is not a success."""
        known = self.value[np.isfinite(self.value)]
        if not len(known) or (known.max() == known.min() and known.max() <= 0):
            return float("nan")
        return float(known.max())

    def _zero_signal(self, chosen: np.ndarray) -> tuple[float, float]:
        group, value = self.group[chosen], self.value[chosen]
        order = np.argsort(group, kind="stable")
        _, starts, counts = np.unique(group[order], return_index=True, return_counts=True)
        low, high = (reduce.reduceat(value[order], starts)[counts > 1] for reduce in (np.minimum, np.maximum))
        if not len(low):
            return float("nan"), float("nan")
        is_equal = low == high
        is_best = is_equal & (high == self._best_value)
        return float(is_equal.mean()), float(is_best.sum() / max(1, is_equal.sum()))


def read_samples(path: Path, *, max_samples: int) -> SampleStats | None:
    """Read statistics of the samples that were trained on, also during the run.

    Args:
        path: the ledger's file.
        max_samples: beyond this number whole groups are left out, evenly over the steps.

    Returns:
        The statistics; None if the ledger is still empty.

    Raises:
        Unreadable: the file is not a ledger that this version reads.
    """
    if not path.is_file():
        raise Unreadable("the file is missing")
    try:
        with _opened(path) as db:
            if not is_readable(schema := schema_version(db)):
                raise Unreadable(
                    f"it has schema version {schema}, but this version of areal_like reads only up to {SCHEMA_VERSION}"
                )
            return _read(db, max_samples)
    except (sqlite3.Error, ValueError, TypeError, OverflowError, OSError) as error:
        words = "reading it takes too long" if "interrupted" in str(error) else f"cannot be read ({str(error)[:120]})"
        raise Unreadable(words) from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection with one consistent view and a time limit of READ_S."""
    uri = f"file:{quote(str(path.resolve()))}?mode=ro"
    try:
        db = _connect(uri)
    except sqlite3.OperationalError as error:
        log = path.with_name(path.name + "-wal")
        if "locked" in str(error) or (log.exists() and log.stat().st_size):
            raise  # another process may be writing, so the file is not immutable
        db = _connect(uri + "&immutable=1")
    with closing(db):
        db.set_progress_handler(_deadline(time.monotonic() + READ_S), HANDLER_STEPS)
        yield db


def _connect(uri: str) -> sqlite3.Connection:
    db = sqlite3.connect(uri, uri=True, timeout=LOCK_WAIT_S, isolation_level=None)
    try:
        db.execute("BEGIN")
        db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def _deadline(until_s: float) -> Callable[[], int]:
    return lambda: int(time.monotonic() > until_s)


def _read(db: sqlite3.Connection, max_samples: int) -> SampleStats | None:
    fates = {str(fate): int(n) for fate, n in db.execute("SELECT fate, COUNT(*) FROM groups GROUP BY fate")}
    reasons = db.execute("SELECT reason, COUNT(*) FROM groups WHERE fate = 'dropped' GROUP BY reason ORDER BY 2 DESC")
    dropped = {str(reason): int(n) for reason, n in reasons}
    verdicts = db.execute("SELECT verdict_kind, COUNT(*) FROM samples GROUP BY verdict_kind ORDER BY 2 DESC")
    counted = {str(kind): int(n) for kind, n in verdicts}
    if not fates:
        return None
    failures = db.execute(
        "SELECT json_extract(fact, '$.failed_in'), verdict_kind, json_extract(fact, '$.policy'), COUNT(*) FROM "
        "(SELECT verdict_kind, CASE WHEN json_valid(CAST(facts AS TEXT)) THEN CAST(facts AS TEXT) END AS fact "
        "FROM samples WHERE verdict_kind != 'scored') GROUP BY 1, 2, 3 ORDER BY 4 DESC"
    )
    failed = {(str(scorer or ""), str(kind), str(policy or "")): int(n) for scorer, kind, policy, n in failures}
    consumed = db.execute(
        "SELECT group_id, step FROM groups WHERE fate = 'consumed' AND step IS NOT NULL ORDER BY step, group_id"
    ).fetchall()
    chosen = _choice(consumed, db, max_samples)
    rows = list(_rows(db, chosen))
    components = _columns([row[-2] for row in rows])
    steps = np.array([row[0] for row in rows], dtype=np.int64)
    return SampleStats(
        step=steps,
        length=np.array([row[1] for row in rows], dtype=np.int64),
        value=np.array([row[2] for row in rows], dtype=np.float64),
        staleness=np.array([row[3] for row in rows], dtype=np.int64),
        group=np.array([row[4] for row in rows], dtype=np.int64),
        is_cut=np.array([row[5] for row in rows], dtype=np.bool_),
        components=components,
        verdicts=counted,
        failures=failed,
        components_by_step={name: _means(steps, values) for name, values in components.items()},
        fates=fates,
        dropped_by_reason=dropped,
        timings_s={name: float(np.nanmean(values)) for name, values in _columns([row[-1] for row in rows]).items()},
        share=len(chosen) / len(consumed) if consumed else 1.0,
        removed=_removed(db),
    )


def _removed(db: sqlite3.Connection) -> dict[str, list[Removed]]:
    """Draws and groups left out by filters; a ledger of an older schema has no skipped positions."""
    found = {}
    queries = {
        "passed over": "SELECT ROUND(rate, 1), COUNT(*), AVG(num_tokens) FROM skipped_draws GROUP BY 1 ORDER BY 1",
        "filtered": "SELECT ROUND(CAST(detail AS REAL), 1), COUNT(DISTINCT group_id), AVG(num_tokens) "
        "FROM groups JOIN samples USING (group_id) WHERE fate = 'filtered' GROUP BY 1 ORDER BY 1",
    }
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'skipped_draws'").fetchone():
        del queries["passed over"]
    for name, query in queries.items():
        rows = [Removed(float(level), int(count), float(tokens)) for level, count, tokens in db.execute(query)]
        if rows:
            found[name] = rows
    return found


def _choice(consumed: Sequence[tuple[int, int]], db: sqlite3.Connection, max_samples: int) -> Sequence[tuple[int, int]]:
    """Select whole groups, evenly spaced in the order of steps, so that rewards within a group can be compared."""
    (group_size,) = db.execute("SELECT MAX(group_size) FROM lineages").fetchone()
    max_groups = max(1, max_samples // int(group_size or 1))
    if len(consumed) <= max_groups:
        return consumed
    return [consumed[index] for index in np.linspace(0, len(consumed) - 1, max_groups).astype(int)]


def _rows(db: sqlite3.Connection, chosen: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, ...]]:
    """(step, tokens, value, staleness, group, is cut, components, timings) of kept samples, in the order of
    `chosen`.
    """
    for start in range(0, len(chosen), IDS_PER_QUERY):
        part = chosen[start : start + IDS_PER_QUERY]
        found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        marks = ",".join("?" * len(part))
        for row in db.execute(
            "SELECT group_id, num_tokens, first_version, value, is_kept, facts FROM samples "
            f"WHERE group_id IN ({marks}) ORDER BY group_id, sample_index",
            [group_id for group_id, _ in part],
        ):
            found[row[0]].append(row)
        for group_id, step in part:
            samples = found[group_id]
            first_version = min((sample[2] for sample in samples), default=0)
            for _, num_tokens, _, value, is_kept, facts in samples:
                if is_kept:
                    is_cut, components, timings = _facts(facts)
                    yield step, num_tokens, value, step - 1 - first_version, group_id, is_cut, components, timings


def _facts(blob: Any) -> tuple[bool, dict[str, float], dict[str, float]]:
    """Whether the answer was cut, components, timings; empty if the blob is damaged."""
    try:
        facts = msgspec.json.decode(blob)
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError):
        facts = None
    if not isinstance(facts, dict):
        return False, {}, {}
    return facts.get("finish_reason") == "length", _numbers(facts.get("components")), _numbers(facts.get("timings"))


def _numbers(found: Any) -> dict[str, float]:
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): float(value) for name, value in pairs if isinstance(value, int | float)}


def _columns(found: Sequence[dict[str, float]]) -> dict[str, np.ndarray]:
    """One array per name, NaN if a sample does not have it."""
    names = sorted({name for row in found for name in row})
    return {name: np.array([row.get(name, np.nan) for row in found], dtype=np.float64) for name in names}


def _means(steps: np.ndarray, values: np.ndarray) -> list[tuple[int, float]]:
    known = ~np.isnan(values)
    found, places = np.unique(steps[known], return_inverse=True)
    sums = np.bincount(places, weights=values[known])
    counts = np.bincount(places)
    return [(int(step), float(total / count)) for step, total, count in zip(found, sums, counts, strict=True)]
