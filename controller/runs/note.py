"""`areal-like note`: shows or changes the notes and tags of a run, at any time.

The file is read and written in run_folder/run_notes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from controller.run_folder.formatting import printable
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.run_notes import read_notes, write_notes


def note(folder: RunFolder, text: str | None, *, tags: Sequence[str] | None) -> int:
    """Replace what is given, keep the rest, print the result, and return the exit status. Raises UserError."""
    found = read_notes(folder.root)
    if text is not None or tags is not None:
        found = write_notes(
            folder.root, found.notes if text is None else text, found.tags if tags is None else [t for t in tags if t]
        )
    print(printable(found.line) or "no notes and no tags")
    return 0
