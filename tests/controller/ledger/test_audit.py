"""The audit finds what the coordinator must never do; it is fed ledgers that a broken coordinator would write."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from desk import Desk
from real_ledger import apply_all, entry_of
from schedules import run_schedule

from areal_like.errors import UserError
from controller.coordinator.effects import StorePartial
from controller.coordinator.settings import CoordinatorSettings
from controller.ledger.audit import audit
from controller.ledger.ledger import Ledger


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps with a fall-back in between."""
    folder = tmp_path_factory.mktemp("run")
    settings = CoordinatorSettings(
        groups_per_step=2, group_size=2, num_steps=6, max_staleness=2, num_workers=2, max_filtered_batches=0
    )
    with Ledger(folder, segment_bytes=2000) as ledger:
        cluster = run_schedule(3, settings=settings, mirror=lambda entries: apply_all(ledger, entries))
    assert cluster.end is not None
    assert cluster.end.status == "completed"
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    for path in [*run.glob("ledger.sqlite*"), *run.glob("segments/*")]:
        target = tmp_path / path.relative_to(run)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path


def change(folder: Path, *statements: str) -> str:
    db = sqlite3.connect(folder / "ledger.sqlite")
    for statement in statements:
        assert db.execute(statement).rowcount > 0, statement
    db.commit()
    db.close()
    return "\n".join(audit(folder).findings)


def test_a_clean_run_has_no_findings_and_its_numbers_add_up(run: Path) -> None:
    report = audit(run)
    assert report.is_clean, report.lines()
    assert report.num_steps == 6
    assert report.num_consumed == 12 == sum(report.staleness.values())
    assert max(report.staleness) <= 2
    total = report.num_consumed + report.num_filtered + sum(report.dropped.values()) + report.num_in_flight
    assert report.num_drawn == total
    assert report.num_payloads == report.num_samples > 0
    assert report.lines()[-1] == "all invariants hold"


def test_an_admission_beyond_the_bound_is_found(copy: Path) -> None:
    findings = change(copy, "UPDATE groups SET version = -3 WHERE group_id = 1")
    assert "bounded-admission: group 1 of batch 0 was admitted at version -3" in findings


def test_a_wrong_count_of_started_groups_is_found(copy: Path) -> None:
    assert "bounded-admission: group 4 was admitted as number 2, but the recount gives" in change(
        copy, "UPDATE groups SET started = 2 WHERE group_id = 4"
    )


def test_a_group_used_past_its_deadline_is_found(copy: Path) -> None:
    assert "bounded-staleness" in change(copy, "UPDATE lineages SET max_staleness = 0")


@pytest.mark.parametrize("fate", ["filtered", "live"])
def test_a_used_group_with_another_fate_is_found(copy: Path, fate: str) -> None:
    findings = change(copy, f"UPDATE groups SET fate = '{fate}', step = NULL WHERE group_id = 0 AND fate = 'consumed'")
    assert f"exactly-once: group 0 is {fate} but was used by 1 steps" in findings


def test_a_group_used_twice_or_booked_wrongly_is_found(copy: Path) -> None:
    findings = change(copy, "UPDATE batches SET groups = (SELECT groups FROM batches WHERE step = 1) WHERE step = 2")
    assert "used by 2 steps" in findings
    assert "exactly-once" in findings


def test_a_missing_step_a_lost_group_and_a_nameless_drop_are_found(copy: Path) -> None:
    assert "recorded steps have gaps" in change(copy, "DELETE FROM batches WHERE step = 3")
    assert "draw numbers have gaps" in change(copy, "DELETE FROM groups WHERE group_id = 0")
    assert "without a reason" in change(copy, "UPDATE groups SET fate = 'dropped' WHERE fate = 'consumed'")


def test_versions_that_differ_from_the_stamped_tokens_are_found(copy: Path) -> None:
    findings = change(copy, "UPDATE samples SET first_version = first_version - 1, last_version = last_version + 9")
    assert "differ from what was recorded" in findings
    assert "from a version that did not exist yet" in findings


def test_an_unfinished_group_in_a_batch_is_found(copy: Path) -> None:
    group = "(SELECT MIN(group_id) FROM groups WHERE fate = 'consumed')"
    findings = change(copy, f"DELETE FROM samples WHERE sample_index = 1 AND group_id = {group}")
    assert "1 of 2 samples finished" in findings


KEPT = "is_kept = 1 AND file IS NOT NULL"
ONE = f"(group_id, sample_index) IN (SELECT group_id, sample_index FROM samples WHERE {KEPT} LIMIT 1)"


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE groups SET version = version + 1 WHERE group_id = 0", "stamped-versions: group 0 sample 0 is older than"),  # noqa: E501
        ("UPDATE groups SET seq = -1 WHERE group_id = 0", "exactly-once: group 0 was drawn before the run started"),
        ("UPDATE samples SET group_id = 999 WHERE group_id = 0", "exactly-once: there are samples of group 999, which was never drawn"),  # noqa: E501
        (f"UPDATE samples SET num_tokens = num_tokens + 1 WHERE {ONE}", "exactly-once: group"),
        (f"UPDATE samples SET first_version = first_version + 1 WHERE {ONE}", "differ from what was recorded"),
        (f"UPDATE samples SET last_version = last_version + 1 WHERE {ONE}", "differ from what was recorded"),
        ("UPDATE samples SET is_kept = 1 - is_kept WHERE group_id = 0", "samples (0, 1) of group 0, but [] were kept"),
        ("UPDATE groups SET step = 5 WHERE group_id = 0", "exactly-once: group 0 is assigned to step 5, which did not use it"),  # noqa: E501
        ("UPDATE groups SET fate = 'unknown' WHERE group_id = 0", "exactly-once: group 0 is unknown but was used by 1 steps"),  # noqa: E501
        ("UPDATE batches SET seq = -step", "was recorded before the run started"),
        ("UPDATE lineages SET group_size = 3", "with 2 of 3 samples finished"),
        ("UPDATE lineages SET groups_per_step = 3", "has 2 groups, not 3"),
        ("UPDATE batches SET is_replay = 1 WHERE step = 6", "exactly-once: step 6 was recorded twice and differs"),
        ("UPDATE batches SET step = 9 WHERE step = 6", "exactly-once: step 9 was recorded after step 5 of the same lineage"),  # noqa: E501
        ("UPDATE samples SET last_version = 5 WHERE group_id = 0", "stamped-versions: step 1 used tokens of group 0 from"),  # noqa: E501
    ],
)  # fmt: skip
def test_every_wrong_record_is_found(copy: Path, statement: str, finding: str) -> None:
    assert finding in change(copy, statement)


def test_passes_over_a_batch_are_counted_and_excuse_no_group_in_two_steps(copy: Path) -> None:
    before = audit(copy)
    assert (before.num_trained, before.num_repeats) == (24, 0)
    assert "repeats" not in before.lines()[0]
    db = sqlite3.connect(copy / "ledger.sqlite")
    (newest,) = db.execute("SELECT MAX(seq) FROM lineages").fetchone()
    (num_again,) = db.execute("SELECT COUNT(*) FROM batches WHERE seq > ?", (newest,)).fetchone()
    db.close()
    assert num_again > 0, "a step that was trained again counts by the lineage that trained it for good"
    assert change(copy, f"UPDATE lineages SET passes_per_batch = CASE seq WHEN {newest} THEN 3 ELSE 2 END") == ""
    report = audit(copy)
    repeats = 4 * (2 * num_again + (6 - num_again))
    assert (report.num_trained, report.num_repeats) == (24, repeats)
    assert f"24 samples trained on, each in one step, with {repeats} repeats in it" in report.lines()[0]
    again = "(SELECT groups FROM batches WHERE step = 1 AND is_replay = 0)"
    assert "group 0 was used by 2 steps" in change(copy, f"UPDATE batches SET groups = {again} WHERE step = 6")


@pytest.fixture
def in_flight(tmp_path: Path) -> Path:
    """A group of two: the first sample has five tokens, brought by two reports; nothing is finished."""
    desk = Desk(groups_per_step=1, group_size=2, max_staleness=2)
    desk.start()
    lease_id = desk.lease_of(0)
    desk.progress(lease_id, 0, [0, 0])
    desk.progress(lease_id, 2, [0, 0, 0])
    with Ledger(tmp_path) as ledger:
        versions = [[0] * e.num_tokens if isinstance(e, StorePartial) else None for e in desk.effects]
        recorded = zip(desk.effects, versions, strict=True)
        ledger.apply([entry_of(effect, numbers) for effect, numbers in recorded if effect.is_ledger])
    assert audit(tmp_path).is_clean
    return tmp_path


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (
            "DELETE FROM partials WHERE start = 0",
            "exact-interruption: partial tokens of group 0 sample 0 have a gap at token 0",
        ),
        (
            "UPDATE partials SET start = 3 WHERE start = 2",
            "exact-interruption: partial tokens of group 0 sample 0 have a gap at token 2",
        ),
        (
            "UPDATE partials SET num_tokens = 3 WHERE start = 0",
            "exact-interruption: partial tokens of group 0 sample 0 have a gap",
        ),
        (
            "UPDATE partials SET group_id = 999",
            "exactly-once: there are partial tokens of group 999 sample 0, which is not in flight",
        ),
        ("UPDATE groups SET fate = 'filtered' WHERE group_id = 0", "sample 0, which is not in flight"),
        (
            "UPDATE groups SET version = 1 WHERE group_id = 0",
            "stamped-versions: versions of group 0 sample 0 decrease at token 0",
        ),
    ],
)
def test_every_wrong_record_of_partial_tokens_is_found(in_flight: Path, statement: str, finding: str) -> None:
    assert finding in change(in_flight, statement)


def test_a_group_recorded_as_used_that_no_step_used_is_found(in_flight: Path) -> None:
    findings = change(in_flight, "UPDATE groups SET fate = 'consumed', step = 1 WHERE group_id = 0")
    assert "exactly-once: group 0 is consumed but was used by 0 steps" in findings


def test_a_running_ledger_can_be_audited_from_outside(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=2, num_workers=1)
        run_schedule(0, settings=settings, mirror=lambda entries: apply_all(ledger, entries))
        assert audit(tmp_path).is_clean


def test_no_more_than_a_hundred_findings_are_listed(tmp_path: Path) -> None:
    desk = Desk(groups_per_step=60, group_size=1, max_staleness=1)
    desk.start(capacity=128)
    with Ledger(tmp_path) as ledger:
        ledger.apply([entry_of(effect, None) for effect in desk.effects if effect.is_ledger])
    findings = change(tmp_path, "UPDATE groups SET started = -1").splitlines()
    assert audit(tmp_path).num_drawn == 120
    assert len(findings) == 100


def test_no_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ledger"):
        audit(tmp_path)
