"""`areal-like capsule RUN --step N` writes one step to a file; `areal-like replay FILE` repeats and compares it.

The step is trained here when the capsule is made, from the state that goes into the file: gradients are not recorded
by a run. Its metrics are compared with the run's row of the step.

Entries:
  manifest.json     format, run, step, SHA-256 of every other entry
  spec.json         how the trainer was started, without paths, addresses and secrets
  config.yaml       the resolved configuration, without paths and secrets
  environment.json  versions, platform and trainer.json of the run, and trainer.json here
  before/           the checkpoint of version N - 1: weights, optimizer state, critic, generators, tokenizer
  model/, teacher/  models that the step reads and does not change, if there are any
  batch.bin         tokens, log-probs, versions and rewards of the batch (areal_like/wire/batch_stream.py)
  samples.jsonl     the batch for people: prompts, answers and verdicts, as `areal-like samples --format jsonl`
  result.json       gradients of each update (SHA-256 by tensor), metrics, tensors after the step, the run's own row
"""

from __future__ import annotations

import io
import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like import __version__
from areal_like.config import DEFAULT_TRANSFER, ProcessSpec
from areal_like.errors import OperationError, UserError, WireError
from areal_like.metrics import encode
from areal_like.plain_text import one_line
from areal_like.wire.batch_stream import read_batch, write_batch
from areal_like.wire.messages import Batch
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.capsule_contents import (
    checkpoint_files,
    count,
    model_files,
    read_result,
    read_setup,
    refuse_pickles,
)
from controller.runs.replay.capsule_file import read_archive, write_archive
from controller.runs.replay.config_text import config_text, portable
from controller.runs.replay.environment import notes_on
from controller.runs.replay.player import Order, play
from controller.runs.replay.recording import Recording, in_home, open_recording
from controller.runs.replay.several_starts import play_starts
from controller.runs.replay.starts import Start
from controller.runs.replay.step_metrics import OF_EARLIER_STEPS, compare_metrics
from controller.runs.replay.tensors import digests_in, first_difference, total
from controller.runs.sample_rows import Choice, read_samples
from controller.runs.samples import as_lines
from controller.wiring.replay import capsule_problem, fixed_models

BEFORE, BATCH, SPEC, RESULT = "before", "batch.bin", "spec.json", "result.json"
ENVIRONMENT, CONFIG, SAMPLES = "environment.json", "config.yaml", "samples.jsonl"
Result = dict[str, Any]


def make_capsule(folder: RunFolder, step: int, out: Path) -> int:
    """Write the capsule of a step and print what it holds; return the exit status, 0.

    Raises UserError (no such step, a setting that a capsule cannot hold, an existing file), OperationError, OSError.
    """
    if out.exists():
        raise UserError("the file already exists", where=str(out), remedy="choose a new file")
    if not out.absolute().parent.is_dir():
        raise UserError("the parent folder does not exist", where=str(out), remedy="create the folder first")
    with open_recording(folder) as recording, tempfile.TemporaryDirectory(prefix="areal-like-capsule-") as root:
        recording.check_step(step, "--step")
        if (problem := capsule_problem(recording.spec)) is not None:
            raise UserError(problem[1], where=problem[0], remedy="replay the run itself with areal-like replay")
        models: dict[str, Path | bytes] = {}
        for name, path in fixed_models(recording.spec).items():
            models |= model_files(f"{name}/", in_home(path, recording.home))
        config, samples = _config(folder), _sample_lines(folder, step)
        before = _state_before(recording, step, Path(root))
        batch = recording.batch(step)
        order = _order(recording.specs, recording.num_threads, recording.home, before, step)
        result, setup = run_step(order, Path(root) / "step", batch)
        row = recording.rows.get(step)
        entries: dict[str, Path | bytes] = {
            SPEC: _portable(recording.spec).model_dump_json(indent=1).encode(),
            CONFIG: config,
            ENVIRONMENT: _json(_environment(recording, setup)),
            BATCH: _batch_bytes(batch),
            SAMPLES: samples,
            RESULT: _json({**result, "recorded_metrics": row}),
            **checkpoint_files(f"{BEFORE}/", before),
            **models,
        }
        facts = {"run": folder.name, "step": step, "areal_like": __version__, "num_threads": recording.num_threads}
        digest = write_archive(out, entries, facts)
        print(
            f"{out}: step {step} of {folder.name}, {out.stat().st_size / 1e6:,.1f} MB, sha256 of its manifest {digest}"
        )
        print(_words(result))
        if row is not None and (found := compare_metrics(row, result["metrics"], OF_EARLIER_STEPS)[1]) is not None:
            words = f"{found.name} is {found.recorded!r} in the run and {found.replayed!r} in the replay"
            print(
                f"note: repeating the step on this machine gave a different result than in the run: {words}",
                file=sys.stderr,
            )
    return 0


def replay_capsule(file: Path) -> int:
    """Repeat the step of a capsule and print the comparison; return 0 if everything is equal, else 1.

    Raises UserError (an entry was changed), OperationError.
    """
    with tempfile.TemporaryDirectory(prefix="areal-like-capsule-") as root:
        inside = Path(root) / "capsule"
        inside.mkdir()
        manifest = read_archive(file, inside)
        try:
            recorded, setup = read_result(inside / RESULT), read_setup(inside / ENVIRONMENT)
            step, num_threads = count(manifest, "step"), count(manifest, "num_threads")
            refuse_pickles(name for name in manifest["entries"] if name != BATCH)
            with (inside / BATCH).open("rb") as opened:
                batch = read_batch(opened)
        except (OSError, ValueError, RecursionError, WireError) as error:
            words = one_line(f"the file is not a complete capsule ({error})")
            raise UserError(words, where=str(file), remedy="create the file again with areal-like capsule") from error
        made_by = f"step {step} of run {manifest.get('run')}, areal_like {manifest.get('areal_like')}"
        print(f"{file.name}: {one_line(made_by)}", flush=True)
        spec = _placed(ProcessSpec.load(inside / SPEC), inside)
        order = _order((spec,), num_threads, Path.cwd(), inside / BEFORE, step)
        result, _ = run_step(order, Path(root) / "step", batch, setup)
        if (difference := first_differing(recorded, result)) is not None:
            print(one_line(f"different: {difference}"))
            return 1
        print(f"equal: {_words(result)}")
    return 0


def run_step(
    order: Order, scratch: Path, batch: Batch, setup: Mapping[str, Any] | None = None
) -> tuple[Result, dict[str, Any]]:
    """Train one step; return its result, and trainer.json. setup: trainer.json of the record, to note differences."""
    result: Result = {}
    for event in play(order, scratch, lambda _: batch):
        match event["kind"]:
            case "opened":
                for words in notes_on(setup or {}, scratch / "trainer.json"):
                    print(one_line(f"note: {words}"), file=sys.stderr, flush=True)
            case "step":
                result |= {"gradients": event["gradients"], "metrics": event["metrics"]}
            case "saved":
                result["tensors"] = digests_in(Path(event["folder"]))
    if "tensors" not in result:
        raise OperationError("the trainer exited without training the step")
    return result, json.loads((scratch / "trainer.json").read_text())


def first_differing(recorded: Result, found: Result) -> str | None:
    """Return the first difference of two results, in words: gradients by update, metrics, tensors after the step."""
    theirs, ours = recorded["gradients"], found["gradients"]
    if len(theirs) != len(ours):
        return f"{len(theirs)} updates in the record, {len(ours)} in the replay"
    for update, (there, here) in enumerate(zip(theirs, ours, strict=True), start=1):
        if (name := first_difference(there, here)) is not None:
            return f"update {update}: the gradient of {name}"
    _, metric = compare_metrics(recorded["metrics"], found["metrics"], OF_EARLIER_STEPS, is_whole=True)
    if metric is not None:
        return f"{metric.name} is {metric.recorded!r} in the record and {metric.replayed!r} in the replay"
    if (name := first_difference(recorded["tensors"], found["tensors"])) is not None:
        return f"after the step: {name}"
    return None


def _words(result: Result) -> str:
    updates = result["gradients"]
    num_gradients = len(updates[0]) if updates else 0
    what = "1 update" if len(updates) == 1 else f"{len(updates)} updates"
    return (
        f"{what} with gradients of {num_gradients} tensors, {len(result['metrics'])} metrics, "
        f"{len(result['tensors'])} tensors after the step, sha256 {total(result['tensors'])}"
    )


def _state_before(recording: Recording, step: int, root: Path) -> Path:
    """Return the checkpoint of version `step` - 1: a kept one, or one that is made by replaying up to it."""
    wanted = step - 1
    origin = recording.origin(wanted, lambda words: print(f"note: {words}", file=sys.stderr))
    recording.check_origin(origin, step)
    checkpoint = origin.checkpoint
    if checkpoint is not None and origin.version == wanted:
        return checkpoint

    def order_of(start: Start, before: Path | None) -> Order:
        return Order(recording.specs, recording.num_threads, recording.home, before, start.last, saves_at=(start.last,))

    for event in play_starts(recording, origin, wanted, root, order_of):
        if event["kind"] == "saved":
            checkpoint = Path(event["folder"])
    if checkpoint is None:
        raise OperationError(f"the trainer exited without writing a checkpoint of version {wanted}")
    return checkpoint


def _order(specs: tuple[ProcessSpec, ...], num_threads: int, home: Path, before: Path, step: int) -> Order:
    return Order(specs, num_threads, home, before, step, saves_at=(step,), has_gradients=True)


def _portable(spec: ProcessSpec) -> ProcessSpec:
    """The spec without paths, addresses, ids and secrets. How weights reach the engines is left out: a step does not
    depend on it."""
    nowhere: dict[str, Any] = {
        "run_dir": "", "hub_address": "", "reward_addresses": (), "reward_curve_dir": None, "curve_dir": "",
        "parent_pid": 0, "weight_dir": "", "weight_transfer": DEFAULT_TRANSFER, "weight_options": {},
        "resume_from": None, "ranks_address": "", "bind_address": None, "has_own_gpus": False,
    }  # fmt: skip
    settings: dict[str, Any] = portable({key: one for key, one in spec.settings.items() if key != "weights"})
    if (settings.get("teacher") or {}).get("path"):
        settings["teacher"] = {**settings["teacher"], "path": "teacher"}
    model = spec.model.model_copy(update={"path": "model", "init": None, "tokenizer": "from_model"})
    return spec.model_copy(update={**nowhere, "model": model, "settings": settings})


def _placed(spec: ProcessSpec, inside: Path) -> ProcessSpec:
    """The spec with the folders of an unpacked capsule."""
    model = inside / "model" if (inside / "model").is_dir() else inside / BEFORE
    settings = dict(spec.settings)
    if (settings.get("teacher") or {}).get("path"):
        settings["teacher"] = {**settings["teacher"], "path": str(inside / "teacher")}
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(model)}), "settings": settings})


def _environment(recording: Recording, setup: Mapping[str, Any]) -> dict[str, Any]:
    run = {key: recording.state.get(key) for key in ("versions", "python", "platform")}
    here = {"python": platform.python_version(), "platform": platform.platform()}
    found: dict[str, Any] = portable({"run": run, "setup": recording.setup, "here": here, "setup_here": setup})
    return found


def _config(folder: RunFolder) -> bytes:
    try:
        return config_text(folder.config).encode()
    except ValueError as error:
        words = f"is damaged ({error})"
        raise UserError(words, where=str(folder.config), remedy="restore the file from a backup") from error


def _sample_lines(folder: RunFolder, step: int) -> bytes:
    found = read_samples(folder, Choice(step=step, order="given", limit=None))
    return "".join(f"{line}\n" for line in as_lines(found.samples)).encode(errors="backslashreplace")


def _batch_bytes(batch: Batch) -> bytes:
    stream = io.BytesIO()
    write_batch(stream, batch)
    return stream.getvalue()


def _json(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys, so that equal contents are equal bytes; NaN becomes null."""
    return json.dumps(json.loads(encode(value)), indent=1, sort_keys=False).encode()
