"""RUN/notes.json: the notes and tags of a run.

The file starts with `notes` and `tags` of the configuration, which later changes do not alter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_like.encryption.files import read_bytes, write_text
from areal_like.errors import UserError
from areal_like.plain_text import one_line

NOTES_FILE = "notes.json"
MAX_NOTES_CHARS, MAX_TAGS, MAX_TAG_CHARS = 10_000, 32, 64
"""Limits of what is stored; longer notes are an error."""


@dataclass(frozen=True)
class RunNotes:
    """Notes and tags of one run; both may be empty."""

    notes: str = ""
    tags: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Tags and notes in one line."""
        tags = " ".join(f"[{tag}]" for tag in self.tags)
        return one_line(" ".join(f"{tags} {self.notes}".split()))


def read_notes(root: Path) -> RunNotes:
    """Read the notes of a run; empty if the file is missing or damaged."""
    try:
        found = json.loads(read_bytes(root / NOTES_FILE)[: 8 * MAX_NOTES_CHARS])
        notes, tags = found.get("notes", ""), found.get("tags", [])
    except (OSError, ValueError, AttributeError):
        return RunNotes()
    if not isinstance(notes, str) or not isinstance(tags, list):
        return RunNotes()
    short = [tag[:MAX_TAG_CHARS] for tag in tags if isinstance(tag, str)]
    return RunNotes(notes[:MAX_NOTES_CHARS], tuple(short[:MAX_TAGS]))


def write_notes(root: Path, notes: str, tags: Sequence[str]) -> RunNotes:
    """Replace the file atomically. Raises UserError: too long, or the folder cannot be written."""
    made = RunNotes(notes, tuple(dict.fromkeys(tags)))
    path = root / NOTES_FILE
    if len(notes) > MAX_NOTES_CHARS:
        raise UserError(
            f"the text has {len(notes):,} characters, but the limit is {MAX_NOTES_CHARS:,}",
            where=str(path),
            remedy="shorten the text",
        )
    wrong = [tag for tag in made.tags if not tag.strip() or len(tag) > MAX_TAG_CHARS]
    if wrong or len(made.tags) > MAX_TAGS:
        what = f"`{wrong[0]}` is not a valid tag" if wrong else f"there are {len(made.tags)} tags"
        remedy = f"use at most {MAX_TAGS} tags of 1 to {MAX_TAG_CHARS} characters"
        raise UserError(what, where=str(path), remedy=remedy)
    fresh = path.with_suffix(".tmp")
    try:
        text = json.dumps({"notes": made.notes, "tags": list(made.tags)}, ensure_ascii=False, indent=1)
        write_text(fresh, text, renamed_to=path)
        fresh.replace(path)
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror})",
            where=str(path),
            remedy="check the free space of the disk, or ask the owner of the run to change the notes",
        ) from error
    return made
