"""Differences between the machine and packages of a run and those of its replay, which may explain different bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FACTS = ("torch", "transformers", "hardware", "device", "backend", "ranks", "attention", "precision", "threads")
"""Entries of trainer.json on which the bits of a step depend."""


def notes_on(recorded: Mapping[str, Any], setup_file: Path) -> Iterator[str]:
    """Yield a note for each fact of trainer.json that differs. setup_file: the replay's."""
    try:
        here = json.loads(setup_file.read_text())
    except (OSError, ValueError):
        return
    for name in FACTS:
        if name in recorded and recorded[name] != here.get(name):
            yield f"{name} was {recorded[name]} in the run and is {here.get(name)} on this machine"
