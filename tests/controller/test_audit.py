"""The audit finds what the coordinator must never do; it is fed ledgers that a broken coordinator would write."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from real_ledger import apply_all
from schedules import run_schedule

from areal_like.errors import UserError
from controller.audit import audit
from controller.ledger import Ledger
from controller.settings import CoordinatorSettings


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
    assert report.lines()[-1] == "laws 1 to 5 hold"


def test_an_admission_beyond_the_bound_is_found(copy: Path) -> None:
    findings = change(copy, "UPDATE groups SET version = -3 WHERE group_id = 1")
    assert "law 1: group 1 of batch 0 was admitted at version -3" in findings


def test_a_wrong_count_of_started_groups_is_found(copy: Path) -> None:
    assert "law 1: group 4 was admitted as number 2, recounted" in change(
        copy, "UPDATE groups SET started = 2 WHERE group_id = 4"
    )


def test_a_group_used_past_its_deadline_is_found(copy: Path) -> None:
    assert "law 2" in change(copy, "UPDATE lineages SET max_staleness = 0")


def test_a_group_used_twice_or_booked_wrongly_is_found(copy: Path) -> None:
    findings = change(copy, "UPDATE batches SET groups = (SELECT groups FROM batches WHERE step = 1) WHERE step = 2")
    assert "used by 2 steps" in findings
    assert "law 4" in findings


def test_a_missing_step_a_lost_group_and_a_nameless_drop_are_found(copy: Path) -> None:
    assert "holes" in change(copy, "DELETE FROM batches WHERE step = 3")
    assert "draw numbers have holes" in change(copy, "DELETE FROM groups WHERE group_id = 0")
    assert "without a reason" in change(copy, "UPDATE groups SET fate = 'dropped' WHERE fate = 'consumed'")


def test_versions_that_differ_from_the_stamped_tokens_are_found(copy: Path) -> None:
    findings = change(copy, "UPDATE samples SET first_version = first_version - 1, last_version = last_version + 9")
    assert "differ from what was recorded" in findings
    assert "from a version not made yet" in findings


def test_an_unfinished_group_in_a_batch_is_found(copy: Path) -> None:
    group = "(SELECT MIN(group_id) FROM groups WHERE fate = 'consumed')"
    findings = change(copy, f"DELETE FROM samples WHERE sample_index = 1 AND group_id = {group}")
    assert "1 of 2 samples finished" in findings


def test_a_running_ledger_can_be_audited_from_outside(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=2, num_workers=1)
        run_schedule(0, settings=settings, mirror=lambda entries: apply_all(ledger, entries))
        assert audit(tmp_path).is_clean


def test_no_ledger_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ledger"):
        audit(tmp_path)
