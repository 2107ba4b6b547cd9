"""What the reader of samples makes of a ledger's rows, of a ledger in use, and of a file that is none."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.ledger import sample_reader
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.ledger.migrations import SCHEMA_VERSION
from controller.ledger.sample_reader import SampleStats, Unreadable, read_samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger without rows."""
    with Ledger(tmp_path, run_id="r"):
        pass
    return tmp_path / LEDGER_FILE


@contextmanager
def changed(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield db


def lineage(path: Path, group_size: int, name: str = "l0") -> None:
    with changed(path) as db:
        db.execute(
            "INSERT INTO lineages VALUES (NULL, ?, 0, 1, ?, NULL, 'keep', 1, NULL, NULL, NULL, NULL)",
            [name, group_size],
        )


def group(
    path: Path, group_id: int, fate: str = "consumed", step: int | None = None, reason: str = "", detail: str = ""
) -> None:
    with changed(path) as db:
        row = [group_id, fate, reason, detail, step]
        db.execute("INSERT INTO groups VALUES (?, 0, 1, 1, ?, ?, ?, ?, NULL, NULL)", row)


def sample(
    path: Path, group_id: int, index: int = 0, *, num_tokens: int = 5, first_version: int = 0,
    kind: str = "scored", value: float | None = 1.0, is_kept: bool = True, facts: Any = None,
) -> None:  # fmt: skip
    blob = facts if isinstance(facts, bytes) else json.dumps(facts or {}).encode()
    with changed(path) as db:
        db.execute(
            "INSERT INTO samples VALUES (?, ?, 1, ?, ?, 9, ?, ?, ?, 'rollout-0', ?, NULL, 0, 0)",
            [group_id, index, num_tokens, first_version, kind, value, is_kept, blob],
        )


def read(path: Path, max_samples: int = 1000) -> SampleStats:
    found = read_samples(path, max_samples=max_samples)
    assert found is not None
    return found


def test_a_ledger_without_groups_tells_nothing(path: Path) -> None:
    assert read_samples(path, max_samples=10) is None


def test_what_filters_left_out_is_reported_by_difficulty_and_length(path: Path) -> None:
    for group_id, detail, num_tokens in ((0, "0", 30), (1, "1", 10), (2, "1", 20)):
        group(path, group_id, "filtered", detail=detail)
        for index in range(2):
            sample(path, group_id, index, num_tokens=num_tokens + index)
    assert read(path).removed == {"filtered": [(0.0, 1, 30.5), (1.0, 2, 15.5)]}
    with changed(path) as db:
        skipped = [(3, 7, 0.0, 40.0), (5, 7, 1.0, 10.0), (9, 8, 0.96, 20.0)]
        db.executemany("INSERT INTO skipped_draws VALUES (?, ?, ?, ?)", skipped)
    assert read(path).removed["passed over"] == [(0.0, 1, 40.0), (1.0, 2, 15.0)]
    with changed(path) as db:
        db.execute("DROP TABLE skipped_draws")  # a ledger of an older version
    assert list(read(path).removed) == ["filtered"]


def test_arrays_follow_the_steps_and_within_a_step_the_groups_and_samples(path: Path) -> None:
    for group_id, step in ((4, 2), (7, 1), (3, 2)):
        group(path, group_id, step=step)
        for index in (1, 0):
            sample(path, group_id, index, num_tokens=10 * group_id + index, value=float(index), first_version=step - 1)
    stats = read(path)
    assert stats.step.tolist() == [1, 1, 2, 2, 2, 2]
    assert stats.group.tolist() == [7, 7, 3, 3, 4, 4]
    assert stats.length.tolist() == [70, 71, 30, 31, 40, 41]
    assert stats.value.tolist() == [0.0, 1.0] * 3
    assert stats.share == 1.0
    assert stats.fates == {"consumed": 3}


def test_the_staleness_of_a_sample_is_that_of_the_earliest_token_of_its_group(path: Path) -> None:
    for group_id, step, versions in ((1, 1, (0, 0)), (2, 5, (4, 1))):
        group(path, group_id, step=step)
        for index, version in enumerate(versions):
            sample(path, group_id, index, first_version=version)
    assert read(path).staleness.tolist() == [0, 0, 3, 3]


def test_samples_that_were_not_kept_count_for_verdicts_and_staleness_alone(path: Path) -> None:
    group(path, 1, step=3)
    sample(path, 1, 0, first_version=2)
    sample(path, 1, 1, first_version=0, kind="failed", value=None, is_kept=False)
    stats = read(path)
    assert stats.length.tolist() == [5]
    assert stats.staleness.tolist() == [2]
    assert stats.verdicts == {"scored": 1, "failed": 1}


def test_groups_that_were_not_consumed_are_counted_by_fate_and_reason(path: Path) -> None:
    group(path, 1, step=1)
    sample(path, 1)
    group(path, 2, fate="live")
    group(path, 3, fate="consumed", step=None)
    for group_id, reason in ((4, "stale"), (5, "timeout"), (6, "stale")):
        group(path, group_id, fate="dropped", reason=reason)
        sample(path, group_id)
    stats = read(path)
    assert stats.step.tolist() == [1]
    assert stats.fates == {"consumed": 2, "live": 1, "dropped": 3}
    assert list(stats.dropped_by_reason.items()) == [("stale", 2), ("timeout", 1)]


def test_only_dropped_groups_leave_empty_arrays_and_a_whole_share(path: Path) -> None:
    group(path, 1, fate="dropped", reason="stale")
    stats = read(path)
    assert (len(stats.step), stats.share, stats.components, stats.timings_s) == (0, 1.0, {}, {})
    assert all(np.isnan(stats.zero_signal_late))


def test_facts_of_a_sample_become_columns_and_what_is_damaged_is_left_out(path: Path) -> None:
    group(path, 1, step=1)
    group(path, 2, step=2)
    facts = [
        {"finish_reason": "length", "components": {"correct": 1, "style": 0.5}, "timings": {"score_s": 2.0}},
        {"finish_reason": "stop", "components": {"correct": 0.0, "words": "many"}, "timings": {"score_s": 4.0}},
        b"\xff not JSON", [1], {"components": None, "timings": 3},
    ]  # fmt: skip
    for index, found in enumerate(facts):
        sample(path, 1, index, facts=found, value=None if index == 4 else 1.0)
    sample(path, 2, facts={"components": {"correct": 1.0}})
    stats = read(path)
    assert stats.is_cut.tolist() == [True, False, False, False, False, False]
    assert stats.components.keys() == {"correct", "style"}
    np.testing.assert_array_equal(stats.components["correct"], [1.0, 0.0, np.nan, np.nan, np.nan, 1.0])
    np.testing.assert_array_equal(stats.components["style"], [0.5, *[np.nan] * 5])
    assert stats.components_by_step == {"correct": [(1, 0.5), (2, 1.0)], "style": [(1, 0.5)]}
    assert stats.timings_s == {"score_s": 3.0}
    assert np.isnan(stats.value).tolist() == [False, False, False, False, True, False]


def test_a_component_that_no_sample_has_a_number_for_has_no_means(path: Path) -> None:
    group(path, 1, step=1)
    sample(path, 1, facts=b'{"components": {"correct": NaN}}')
    sample(path, 1, 1, facts={"components": {"correct": "yes"}})
    assert read(path).components == {}


def test_answers_without_a_score_are_counted_by_scorer_verdict_and_policy(path: Path) -> None:
    group(path, 1, step=1)
    sample(path, 1, 0, facts={"failed_in": "math"})
    for index, (kind, facts) in enumerate(
        (("failed", {"failed_in": "code", "policy": "drop"}), ("timeout", {}), ("failed", {"failed_in": "code",
         "policy": "drop"}), ("failed", b"{broken")),
        start=1,
    ):  # fmt: skip
        sample(path, 1, index, kind=kind, value=None, facts=facts)
    failures = read(path).failures
    assert failures == {("code", "failed", "drop"): 2, ("", "timeout", ""): 1, ("", "failed", ""): 1}
    assert next(iter(failures)) == ("code", "failed", "drop"), "the most frequent first"


@pytest.mark.parametrize(
    ("max_samples", "groups"),
    [(8, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (7, [1, 2, 4]), (4, [1, 4]), (3, [1]), (0, [1])],
)
def test_too_many_samples_are_thinned_by_whole_groups_evenly_over_the_steps(
    path: Path, max_samples: int, groups: list[int]
) -> None:
    lineage(path, 1)
    lineage(path, 2, "l1")
    for group_id in (1, 2, 3, 4):
        group(path, group_id, step=group_id)
        sample(path, group_id, 0)
        sample(path, group_id, 1)
    stats = read(path, max_samples)
    assert stats.group.tolist() == [group_id for group_id in groups for _ in range(2)]
    assert stats.share == len(groups) / 4


def test_groups_of_a_ledger_without_a_size_count_as_one_sample_each(path: Path) -> None:
    for group_id in (1, 2, 3):
        group(path, group_id, step=group_id)
        sample(path, group_id)
    assert read(path, 2).group.tolist() == [1, 3]
    lineage(path, 1)
    assert read(path, 2).group.tolist() == [1, 3]


def test_more_groups_than_one_query_asks_for_are_all_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reader, "IDS_PER_QUERY", 2)
    for group_id in range(5):
        group(path, group_id, step=group_id + 1)
        sample(path, group_id)
    assert read(path).group.tolist() == [0, 1, 2, 3, 4]


def late(path: Path, *rewards: tuple[int, list[float | None]]) -> tuple[float, float]:
    """zero_signal_late of groups given as (step, rewards)."""
    for group_id, (step, values) in enumerate(rewards):
        group(path, group_id, step=step)
        for index, value in enumerate(values):
            sample(path, group_id, index, value=value)
    return read(path).zero_signal_late


def test_equal_rewards_are_counted_in_the_last_fifth_of_the_steps(path: Path) -> None:
    """Steps 3 to 33: of 31 steps the last 6.2, so that step 27 counts and step 26 does not."""
    mixed = [(step, [0.0, 1.0]) for step in (*range(3, 26), *range(28, 34))]
    assert late(path, *mixed, (26, [1.0, 1.0]), (27, [1.0, 1.0])) == (1 / 7, 1.0)


def test_of_equal_rewards_those_at_the_best_value_ever_seen_are_distinguished(path: Path) -> None:
    rewards = [(1, [0.0, 2.0]), (9, [2.0, 2.0]), (9, [0.5, 0.5]), (9, [2.0, 2.0]), (9, [1.0, 2.0])]
    assert late(path, *rewards) == (0.75, 2 / 3)


@pytest.mark.parametrize(("value", "solved"), [(1.0, 1.0), (0.0, 0.0), (-1.0, 0.0)])
def test_one_value_for_all_samples_is_the_best_only_as_a_success(path: Path, value: float, solved: float) -> None:
    assert late(path, (1, [value, value]), (2, [value, value])) == (1.0, solved)


def test_the_last_step_of_a_short_run_counts(path: Path) -> None:
    assert late(path, (1, [1.0, 1.0]), (2, [0.0, 1.0])) == (0.0, 0.0)


def test_groups_of_one_and_rewards_that_are_none_say_nothing(path: Path) -> None:
    assert all(np.isnan(late(path, (1, [1.0]))))


def test_equal_rewards_without_a_number_are_no_equal_rewards(path: Path) -> None:
    assert late(path, (1, [None, None])) == (0.0, 0.0)


# ------------------------------------------------------------ the file


def test_a_file_that_is_not_there_or_no_ledger_is_unreadable_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"^the file is missing$"):
        read_samples(tmp_path / "none", max_samples=1)
    (tmp_path / "other").write_text("something else" * 1000)
    with pytest.raises(Unreadable, match=r"^cannot be read "):
        read_samples(tmp_path / "other", max_samples=1)


def test_another_schema_is_unreadable_with_its_number(path: Path) -> None:
    with changed(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(SCHEMA_VERSION + 1),))
    with pytest.raises(
        Unreadable,
        match=rf"^it has schema version {SCHEMA_VERSION + 1}, but this version of areal_like reads only up to",
    ):
        read_samples(path, max_samples=1)


def test_a_ledger_is_read_while_its_run_writes_it(path: Path) -> None:
    group(path, 1, step=1)
    with changed(path) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM groups")
        assert read(path).fates == {"consumed": 1}, "what is not committed is not seen, and holds nobody up"
        writer.execute("ROLLBACK")


def test_all_that_is_read_is_the_state_of_one_moment(path: Path) -> None:
    group(path, 1, step=1)
    with sample_reader._opened(path) as db:
        group(path, 2, step=2)
        assert db.execute("SELECT COUNT(*) FROM groups").fetchone() == (1,)
    assert read(path).fates == {"consumed": 2}


def test_a_locked_ledger_is_unreadable_and_closed_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reader, "LOCK_WAIT_S", 0.01)
    group(path, 1, step=1)
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *of, **options: opened.append(connect(*of, **options)) or opened[-1])
    with changed(path) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unreadable, match=r"cannot be read .database is locked"):
            read_samples(path, max_samples=1)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[-1].execute("SELECT 1")


@pytest.mark.parametrize(("log", "is_readable"), [(None, True), (b"", True), (b"x", False)])
def test_a_ledger_without_a_shared_index_is_read_only_where_nobody_can_be_writing_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: bytes | None, is_readable: bool
) -> None:
    """SQLite cannot open a WAL database where it may not make that index, except as an immutable file."""
    group(path, 1, step=1)
    connect, uris = sqlite3.connect, []

    def refusing(database: str, **options: Any) -> sqlite3.Connection:
        uris.append(database)
        if "immutable" not in database:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(database, **options)

    monkeypatch.setattr(sample_reader.sqlite3, "connect", refusing)
    if log is not None:
        path.with_name(path.name + "-wal").write_bytes(log)
    if is_readable:
        assert read(path).fates == {"consumed": 1}
        assert uris == [f"file:{path}?mode=ro", f"file:{path}?mode=ro&immutable=1"]
    else:
        with pytest.raises(Unreadable, match="unable to open"):
            read_samples(path, max_samples=1)


def test_a_ledger_that_takes_too_long_is_given_up_and_one_within_its_time_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group(path, 1, step=1)
    monkeypatch.setattr(sample_reader, "HANDLER_STEPS", 1)
    now_s = [100.0]
    monkeypatch.setattr(sample_reader, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now_s[0])}))
    assert read(path).fates == {"consumed": 1}
    until = sample_reader._deadline(130.0)
    now_s[0] = 130.0
    assert until() == 0
    now_s[0] = 130.1
    assert until() == 1
    monkeypatch.setattr(sample_reader, "READ_S", -1.0)
    with pytest.raises(Unreadable, match=r"^reading it takes too long$"):
        read_samples(path, max_samples=1)
