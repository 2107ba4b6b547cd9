"""`areal-like replay RUN`: the trainer's steps of a run again, from its ledger, compared with what it recorded.

Each start of the trainer that led to the last version is repeated as a start of its own, from the same version. A
checkpoint from which it started and which is not kept any more is made again by the start before it.

Compared are each step's metrics, every kept checkpoint, and the exported policy. The replay ends at the first
difference. Exit status: 0 everything is equal; 1 something differs.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from controller.run_folder.formatting import span
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.environment import notes_on
from controller.runs.replay.player import Event, Order, play
from controller.runs.replay.recording import Origin, Recording, open_recording
from controller.runs.replay.starts import Start, part_of
from controller.runs.replay.step_metrics import OF_EARLIER_STEPS, compare_metrics
from controller.runs.replay.tensors import compare_folders, total
from controller.wiring.replay import recalls_versions

PROGRESS_S = 5.0
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What a replay found. `difference`: the first one, in words; empty: none."""

    num_steps: int = 0
    num_metrics: int = 0
    num_without_row: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of what was compared tensor by tensor, by its name."""
    difference: str = ""


def replay_run(folder: RunFolder, *, first: int | None, last: int | None) -> int:
    """Replay a run and print the result; return the exit status.

    Args:
        folder: the run.
        first: start from the newest kept checkpoint up to this version; None: from the starting model.
        last: the last step; None: the last one that was trained.

    Raises:
        UserError: the run goes on, has nothing to replay, or lacks something that is needed.
        LedgerError, OperationError: a batch is damaged, or the trainer failed.
    """
    with open_recording(folder) as recording:
        end = recording.last_step if last is None else last
        recording.check_step(end, "--to" if last is not None else str(folder.root))
        origin = Origin(0, None)
        if first is not None:
            if first:
                recording.check_step(first, "--from")
            origin = recording.origin(min(first, end - 1), _note)
        recording.check_origin(origin, end)
        started_s = time.monotonic()
        print(_title(recording, origin, end), flush=True)
        outcome = Replay(recording, origin, end, Progress(end)).run()
        for line in _lines(outcome, time.monotonic() - started_s):
            print(line)
        return 1 if outcome.difference else 0


class Replay:
    """Replays the steps from `origin` to `last` and compares them. Call `run` once."""

    def __init__(self, recording: Recording, origin: Origin, last: int, progress: Say) -> None:
        self._recording, self._origin, self._last, self._progress = recording, origin, last, progress
        self._outcome = Outcome()
        self._saved: Path | None = None
        self._is_recalling = recalls_versions(recording.spec)

    def run(self) -> Outcome:
        """Return what was found. Raises as `replay_run`."""
        parts = part_of(self._recording.chain, self._origin.version, self._last)
        checkpoint = self._origin.checkpoint
        with tempfile.TemporaryDirectory(prefix="areal-like-replay-") as root:
            for number, start in enumerate(parts):
                scratch = Path(root) / f"start_{number}"
                self._run_start(start, checkpoint, scratch)
                if self._outcome.difference:
                    break
                if number:
                    shutil.rmtree(Path(root) / f"start_{number - 1}", ignore_errors=True)
                checkpoint = self._saved
        return self._outcome

    def _run_start(self, start: Start, checkpoint: Path | None, scratch: Path) -> None:
        recording, is_end = self._recording, start.last == self._last
        kept = {version for version in recording.checkpoints if start.base < version <= start.last}
        order = Order(
            specs=recording.specs,
            num_threads=recording.num_threads,
            home=recording.home,
            checkpoint=checkpoint,
            last_step=start.last,
            saves_at=tuple(sorted(kept if is_end else kept | {start.last})),
            has_export=is_end and self._last == recording.last_step and recording.exported is not None,
        )
        events = play(order, scratch, recording.batch)
        for event in events:
            self._take(event, scratch)
            if self._outcome.difference:
                events.close()  # type: ignore[attr-defined]
                return

    def _take(self, event: Event, scratch: Path) -> None:
        match event["kind"]:
            case "opened":
                for words in notes_on(self._recording.setup, scratch / "trainer.json"):
                    _note(words)
            case "step":
                self._take_step(event)
            case "saved":
                self._saved = Path(event["folder"])
                if (recorded := self._recording.checkpoints.get(event["version"])) is not None:
                    self._compare(f"checkpoint {event['version']}", recorded, self._saved)
            case "exported":
                assert self._recording.exported is not None
                self._compare("final", self._recording.exported, Path(event["folder"]))

    def _take_step(self, event: Event) -> None:
        step = event["step"]
        self._outcome.num_steps += 1
        self._progress(f"step {step}")
        row = self._recording.rows.get(step)
        is_of_other_start = step in self._recording.repeated
        if row is None or (is_of_other_start and self._is_recalling):
            self._outcome.num_without_row += 1
            return
        is_whole = self._origin.checkpoint is None and not is_of_other_start
        number, found = compare_metrics(row, event["metrics"], () if is_whole else OF_EARLIER_STEPS)
        self._outcome.num_metrics += number
        if found is not None:
            words = f"{found.name} is {found.recorded!r} in the record and {found.replayed!r} in the replay"
            self._outcome.difference = f"step {step}: {words}"

    def _compare(self, name: str, recorded: Path, found: Path) -> None:
        different, digests = compare_folders(recorded, found)
        if different is not None:
            self._outcome.difference = f"{name}: {different.name}: {different.words}"
            return
        self._outcome.digests[f"{name} ({len(digests)} tensors)"] = total(digests)


def _title(recording: Recording, origin: Origin, last: int) -> str:
    where = "the starting model" if origin.checkpoint is None else f"checkpoint {origin.version}"
    parts = part_of(recording.chain, origin.version, last)
    starts = ""
    if len(parts) > 1:
        starts = (
            f"; the trainer was started {len(parts)} times, at versions {', '.join(str(one.base) for one in parts)}"
        )
    return f"{recording.folder.name}: replaying steps {origin.version + 1} to {last} from {where}{starts}"


def _lines(outcome: Outcome, wall_s: float) -> list[str]:
    lines = [f"{name}: equal, sha256 {digest}" for name, digest in outcome.digests.items()]
    if outcome.num_without_row:
        lines.append(
            f"the metrics of {outcome.num_without_row} steps were not recorded, or were recorded by a different start "
            "of the trainer"
        )
    if outcome.difference:
        return [*lines, f"different: {outcome.difference}"]
    return [
        *lines,
        f"equal: {outcome.num_steps} steps with {outcome.num_metrics} metrics, in {span(wall_s)}",
    ]


class Progress:
    """Prints a line on stderr every few seconds."""

    def __init__(self, last: int) -> None:
        self._last, self._shown_s = last, time.monotonic()

    def __call__(self, words: str) -> None:
        if time.monotonic() - self._shown_s >= PROGRESS_S:
            self._shown_s = time.monotonic()
            print(f"{words} of {self._last}", file=sys.stderr, flush=True)


def _note(words: str) -> None:
    print(f"note: {words}", file=sys.stderr, flush=True)
