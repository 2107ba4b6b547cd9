"""`areal-like whatif RUN key=value ...`: the recorded batches of a run under other settings of the trainer.

The replay is one start of the trainer. It reports each step next to the record, and ends where the recorded samples say
too little about the changed policy. Which settings it accepts is in whatif_settings.py; settings of the schedule are
answered in whatif_schedule.py.

Exit status: 0 all steps were replayed; 1 the replay ended early.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.player import Order, play
from controller.runs.replay.recording import Origin, Recording, open_recording
from controller.runs.replay.replay import Progress
from controller.runs.replay.whatif_settings import changed_settings, sections_of
from controller.wiring.replay import recalls_versions

FROM_START = ("critic", "lora")
"""Sections whose parameters a checkpoint of the run does not have."""
COMPARED = ("loss", "grad_norm", "clip_fraction")
Row = dict[str, Any]


def replay_changed(
    folder: RunFolder, overrides: Sequence[str], *, first: int | None, last: int | None, min_ess: float, as_json: bool
) -> int:
    """Replay a run with other settings and print each step next to the record; return the exit status.

    Args:
        folder: the run.
        overrides: `key.path=value`, all of the trainer.
        first: start from the newest kept checkpoint up to this version; None: from the starting model.
        last: the last step; None: the last one that was trained.
        min_ess: least effective sample size of a step, as a share of its tokens.
        as_json: print one JSON object.

    Raises:
        UserError: the settings do not fit, or the run cannot be replayed.
        LedgerError, OperationError: a batch is damaged, or the trainer failed.
    """
    with open_recording(folder) as recording:
        spec = _changed_spec(recording, overrides, has_origin=first is not None)
        end = recording.last_step if last is None else last
        recording.check_step(end, "--to" if last is not None else str(folder.root))
        origin = Origin(0, None)
        if first is not None:
            if first:
                recording.check_step(first, "--from")
            origin = recording.origin(min(first, end - 1), lambda words: print(f"note: {words}", file=sys.stderr))
        recording.check_origin(origin, end)
        if not as_json:
            where = "the starting model" if origin.checkpoint is None else f"checkpoint {origin.version}"
            print(f"{folder.name}: steps {origin.version + 1} to {end} from {where}, with {' '.join(overrides)}")
        rows, refused = _replayed(recording, spec, origin, end, min_ess)
    if as_json:
        found = {"run": folder.name, "settings": list(overrides), "steps": rows, "refused": refused}
        print(json.dumps(found, indent=1))
    else:
        _print(rows)
        for line in summary(rows, refused, min_ess):
            print(line)
    return 1 if refused else 0


def _changed_spec(recording: Recording, overrides: Sequence[str], *, has_origin: bool) -> ProcessSpec:
    """The recorded spec with other settings. Raises UserError."""
    spec, sections = recording.spec, sections_of(overrides)
    if spec.num_ranks > 1:
        what = (
            f"the trainer of this run has {spec.num_ranks} ranks, but the comparison with the record requires a single "
            "rank"
        )
        raise UserError(what, where="trainer.ranks", remedy="specify a run with trainer.ranks: 1")
    if recalls_versions(spec):
        what = "the steps of this run use log-probs of the recorded versions, which do not exist for a changed policy"
        raise UserError(what, where="trainer.version_logprobs", remedy="specify a run without trainer.version_logprobs")
    if has_origin and (new := next((name for name in FROM_START if name in sections), None)) is not None:
        what = "the checkpoints of the run do not contain the parameters of this component"
        raise UserError(what, where=f"trainer.{new}", remedy="remove --from to replay from the starting model")
    return spec.model_copy(update={"settings": changed_settings(recording.folder, spec.settings, overrides)})


def _replayed(
    recording: Recording, spec: ProcessSpec, origin: Origin, last: int, min_ess: float
) -> tuple[list[Row], Row | None]:
    """Each replayed step next to the record, and the step that was refused."""
    rows: list[Row] = []
    refused: Row | None = None
    progress = Progress(last)
    order = Order(
        (spec,), recording.num_threads, recording.home, origin.checkpoint, last, min_ess=min_ess,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="areal-like-whatif-") as root:
        for event in play(order, Path(root) / "start", recording.batch):
            if event["kind"] == "step":
                progress(f"step {event['step']}")
                rows.append(_row(event, recording.rows.get(event["step"], {})))
            elif event["kind"] == "refused":
                refused = {"step": event["step"], **event["off_policy"]}
    return rows, refused


def _row(event: Mapping[str, Any], recorded: Mapping[str, Any]) -> Row:
    found = {name: event["metrics"].get(name) for name in COMPARED}
    there = {f"recorded_{name}": recorded.get(name) for name in (*COMPARED, "ess", "kl_behaviour_proximal")}
    return {"step": event["step"], **found, **event["off_policy"], **there}


def _print(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ("step", "loss", "recorded", "gradient norm", "recorded", "clipped", "recorded", "ESS tokens",
             "ESS answers", "KL nats/token")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        pairs = [_number(row[f"{part}{name}"]) for name in COMPARED for part in ("", "recorded_")]
        table.add_row(
            str(row["step"]), *pairs, _number(row["ess"]), _number(row["answer_ess"]), _number(row["kl_nats"])
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def summary(rows: Sequence[Row], refused: Row | None, min_ess: float) -> list[str]:
    """The replay in sentences: how far it went from the record, why it ended, and what it cannot say."""
    lines = []
    if rows:
        furthest, least = max(rows, key=lambda row: row["kl_nats"]), min(rows, key=lambda row: row["ess"])
        lines.append(
            f"{len(rows)} steps: the policy differs by at most {furthest['kl_nats']:.2g} nats per token from the one "
            f"that sampled (step {furthest['step']}); the effective sample size is at least {least['ess']:.1%} of the "
            f"tokens (step {least['step']})"
        )
    if refused is not None:
        lines.append(
            f"stopped before step {refused['step']}: the effective sample size is {refused['ess']:.1%} of the tokens, "
            f"which is below --min-ess {min_ess:g}, so the recorded samples are too unlikely under the changed policy"
        )
    lines.append(
        "samples and rewards are those of the recorded policy; only a new run shows what the changed policy would "
        "achieve"
    )
    return lines
