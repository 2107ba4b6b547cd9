"""A replay over several starts of the trainer, each from the checkpoint that the one before it saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from controller.runs.replay.player import Event, Order, play
from controller.runs.replay.recording import Origin, Recording
from controller.runs.replay.starts import Start, part_of


def play_starts(
    recording: Recording, origin: Origin, last: int, root: Path, order_of: Callable[[Start, Path | None], Order]
) -> Iterator[Event]:
    """Yield the events of all starts from `origin` to version `last`. Raises as `play`.

    Args:
        recording: the run.
        origin: the version and the checkpoint before the first step.
        last: the last version.
        root: folder for what the starts write; the folder of a start is removed after the next one has ended.
        order_of: makes the order of a start from its checkpoint; all but the last one must save their last version.
    """
    checkpoint = origin.checkpoint
    starts = part_of(recording.chain, origin.version, last) or (Start("", origin.version, last),)
    for number, start in enumerate(starts):
        for event in play(order_of(start, checkpoint), root / f"start_{number}", recording.batch):
            if event["kind"] == "saved":
                checkpoint = Path(event["folder"])
            yield event
        if number:
            shutil.rmtree(root / f"start_{number - 1}", ignore_errors=True)
