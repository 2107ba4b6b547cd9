"""Kinds of notes that the coordinator emits, and their handling in addition to the log.

The handling is carried out in runtime/server.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

NoteKind = Literal[
    "draining",
    "duplicate",
    "erased",
    "eval_dropped",
    "eval_refused",
    "eval_rejected",
    "eval_repinned",
    "eval_unpinned",
    "gap",
    "ignored",
    "incident",
    "migrated",
    "quarantined",
    "refused",
    "released",
    "returned",
    "rewrite",
    "rewrite_failed",
    "scale_limit",
    "scaled",
    "trainer_restarted",
    "worker_left",
    "worker_lost",
]
"""Stable keys: they are written to metrics and the ledger, and the report uses them."""


class NoteHandling(msgspec.Struct, frozen=True, kw_only=True):
    """Handling of notes of one kind, in addition to the log and the metrics."""

    is_shown: bool = False
    """Displayed to the user as a warning."""
    is_traced: bool = False
    """Shown as an instant event on the timeline."""
    is_recorded: bool = False
    """Recorded in the ledger (RecordIncident), in order with all other records: why workers were idle."""


LOGGED = NoteHandling()

HANDLING: Mapping[NoteKind, NoteHandling] = {
    "draining": NoteHandling(is_shown=True, is_traced=True, is_recorded=True),
    "duplicate": LOGGED,
    "erased": LOGGED,  # recorded by the ledger itself, when rows are erased
    "eval_dropped": LOGGED,  # displayed when the server handles EvalDropped
    "eval_refused": LOGGED,
    "eval_rejected": LOGGED,
    "eval_repinned": NoteHandling(is_shown=True),
    "eval_unpinned": LOGGED,
    "gap": LOGGED,
    "ignored": LOGGED,
    "incident": NoteHandling(is_shown=True, is_traced=True, is_recorded=True),
    "migrated": NoteHandling(is_traced=True),
    "quarantined": NoteHandling(is_shown=True, is_recorded=True),
    "refused": LOGGED,
    "released": LOGGED,
    "returned": LOGGED,
    "rewrite": NoteHandling(is_shown=True, is_recorded=True),
    "rewrite_failed": NoteHandling(is_shown=True),
    "scale_limit": NoteHandling(is_shown=True),
    "scaled": NoteHandling(is_shown=True, is_traced=True, is_recorded=True),
    "trainer_restarted": NoteHandling(is_shown=True, is_traced=True),
    "worker_left": NoteHandling(is_traced=True, is_recorded=True),
    "worker_lost": NoteHandling(is_shown=True, is_traced=True, is_recorded=True),
}
"""All kinds, so that a new kind requires an entry."""
