"""Weights of earlier versions of a run's policy: of the starting model, of kept checkpoints, or by training again.

A version without a checkpoint is made by replaying the trainer's steps from the newest checkpoint before it
(player.py), or from the starting model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_like.plain_folder import plain_until_exit
from controller.runs.replay.player import Order
from controller.runs.replay.recording import Origin, Recording, in_home
from controller.runs.replay.several_starts import play_starts
from controller.runs.replay.starts import Start
from controller.wiring.checkpoints import checkpoint_problem, holds_adapter
from controller.wiring.replay import recalls_versions

Say = Callable[[str], None]


@dataclass(frozen=True)
class Leg:
    """Versions that one replay from `origin` makes, ascending."""

    origin: Origin
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Where versions come from. `gone`: the others, each with the reason why it cannot be made."""

    folders: dict[int, Path]
    """Versions whose weights are in a folder of the run."""
    legs: tuple[Leg, ...]
    gone: dict[int, str]

    @property
    def num_replayed(self) -> int:
        """Number of versions that are made by replaying steps."""
        return sum(len(leg.versions) for leg in self.legs)


def plan(recording: Recording, versions: Collection[int], say: Say) -> Plan:
    """Choose the origin of each version. say: takes a note on each damaged checkpoint."""
    origins = _origins(recording, max(versions, default=0), say)
    is_recalling, bases = recalls_versions(recording.spec), {start.base for start in recording.chain}
    folders: dict[int, Path] = {}
    legs: dict[int, list[int]] = {}
    gone: dict[int, str] = {}
    for version in sorted(versions):
        folder = origins.get(version)
        if folder is not None and not holds_adapter(folder):
            folders[version] = folder
            continue
        usable = [one for one in origins if one <= version and (one in bases or not is_recalling)]
        reason = "neither the starting model nor an earlier checkpoint is left"
        for origin in sorted(usable, reverse=True):
            if (missing := _missing_step(recording, origin, version)) is None:
                legs.setdefault(origin, []).append(version)
                break
            reason = f"there is no checkpoint, and the tokens of step {missing} are no longer stored"
        else:
            gone[version] = reason
    made = [
        Leg(Origin(origin, origins[origin] if origin else None), tuple(found)) for origin, found in sorted(legs.items())
    ]
    return Plan(folders, tuple(made), gone)


def policies(recording: Recording, found: Plan, scratch: Path) -> Iterator[tuple[int, Path]]:
    """Yield the versions of a plan and the folders of their weights; a replayed one is deleted when the next is asked
    for.

    Raises UserError, OperationError, LedgerError: the trainer failed, or a batch cannot be read.
    """
    yield from sorted(found.folders.items())
    for number, leg in enumerate(found.legs):
        root = scratch / f"leg_{number}"
        for version, folder in _replayed(recording, leg, root):
            yield version, folder
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


def _replayed(recording: Recording, leg: Leg, root: Path) -> Iterator[tuple[int, Path]]:
    base, last = leg.origin.version, leg.versions[-1]

    def order_of(start: Start, checkpoint: Path | None) -> Order:
        return Order(
            recording.specs, recording.num_threads, recording.home, checkpoint, start.last,
            saves_at=() if start.last == last else (start.last,),
            policies_at=tuple(
                one for one in leg.versions if start.base < one <= start.last or one == base == start.base
            ),
        )  # fmt: skip

    for event in play_starts(recording, leg.origin, last, root, order_of):
        if event["kind"] == "policy":
            yield event["version"], Path(event["folder"])


def _origins(recording: Recording, at_most: int, say: Say) -> dict[int, Path]:
    """Folders of the starting model and of intact checkpoints, by version."""
    model = in_home(Path(str(recording.spec.model.path)), recording.home)
    found = {0: model} if (model / "config.json").is_file() else {}
    for version, folder in sorted(recording.checkpoints.items()):
        if version > at_most:
            continue
        if (problem := checkpoint_problem(folder)) is not None:
            say(f"checkpoint {version} was skipped: {problem}")
        else:
            found[version] = plain_until_exit(folder)
    return found


def _missing_step(recording: Recording, origin: int, version: int) -> int | None:
    """The first step between two versions whose batch is not stored completely."""
    return next((step for step in range(origin + 1, version + 1) if not recording.is_stored(step)), None)
