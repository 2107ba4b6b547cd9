"""Each kind of note has its handling at one place."""

from __future__ import annotations

from typing import get_args

from controller.coordinator.notes import HANDLING, NoteKind


def test_every_note_kind_has_a_handling() -> None:
    assert list(HANDLING) == sorted(get_args(NoteKind))


def test_what_the_ledger_records_is_visible_on_screen_or_on_the_timeline() -> None:
    assert all(one.is_shown or one.is_traced for one in HANDLING.values() if one.is_recorded)


def test_notes_that_only_confirm_normal_operation_are_not_shown() -> None:
    assert {kind for kind, one in HANDLING.items() if one.is_shown} == {
        "draining",
        "eval_repinned",
        "incident",
        "quarantined",
        "rewrite",
        "rewrite_failed",
        "scale_limit",
        "scaled",
        "trainer_restarted",
        "worker_lost",
    }


def test_the_timeline_has_what_changes_who_works() -> None:
    assert {kind for kind, one in HANDLING.items() if one.is_traced} == {
        "draining", "incident", "migrated", "scaled", "trainer_restarted", "worker_left", "worker_lost",
    }  # fmt: skip


def test_the_ledger_records_why_workers_were_idle() -> None:
    assert {kind for kind, one in HANDLING.items() if one.is_recorded} == {
        "draining", "incident", "quarantined", "rewrite", "scaled", "worker_left", "worker_lost",
    }  # fmt: skip
