"""`areal-like replay RUN --engine`: recorded answers again, under the versions stamped on their tokens.

Each version's weights are those of a kept checkpoint, of the starting model, or of a replay of the trainer
(policies.py). For each recorded token the logits are computed from the tokens before it, and the sampler draws with the
random number that belongs to its place in the answer (rollout/regenerate.py). Compared are tokens, log-probs, and where
answers end. A token that differs only because its random number is within rounding of the border between two tokens is
a tie, which is counted apart.

Exit status: 0 no difference other than ties; 1 a difference. Nothing is written to the run.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from areal_like.config import ProcessSpec
from areal_like.device_names import names_cpu
from areal_like.errors import LedgerError, UserError
from areal_like.regenerate_files import INTEGERS, AnswerSpan, RegenerateSpec, SampledTokens, VersionOrder
from areal_like.trajectory import Trajectory
from controller.config.run_config import task_sampling
from controller.ledger.batch_reader import SampleVersions
from controller.run_folder.formatting import span
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.answers import Comparison, Place, Tolerances, spans_of
from controller.runs.replay.engine_process import EngineProcess, open_engine
from controller.runs.replay.policies import Plan, plan, policies
from controller.runs.replay.recording import KEEP, Recording, in_home, open_recording
from controller.runs.replay.replay import Progress
from controller.runtime.outbound import stream_seed
from controller.wiring.checkpoints import holds_adapter
from controller.wiring.process_specs import num_cores
from controller.wiring.replay import EngineFacts, engine_facts

EXACT = Tolerances(nats=1e-4, probability=1e-5)
"""Of the embedded engine in float32 on a CPU."""
SERVER = Tolerances(nats=1e-3, probability=0.0)
"""Of log-probs of another engine in float32 on a CPU."""
ROUNDED = Tolerances(nats=0.25, probability=0.02)
"""In other dtypes, and on a GPU."""
SHUFFLE = 0
"""Seed of the choice of `--samples`, so that it is the same each time."""
KEPT_KV = "they were sampled with keys and values of earlier versions (rollout.interruption: keep_kv)"


class Chosen(NamedTuple):
    """A sample to compare, and the step that trained on it first."""

    step: int
    sample: SampleVersions


@dataclass
class Skipped:
    """What is not compared: samples and tokens, by the reason."""

    samples: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


def regenerate_run(
    folder: RunFolder, *, first: int | None, last: int | None, num_samples: int | None, as_json: bool
) -> int:
    """Draw the answers of a run again and print the result; return the exit status.

    Args:
        folder: the run.
        first: only answers that later steps trained on; None: of all steps.
        last: the last of these steps; None: the last one that was trained.
        num_samples: compare only so many samples, chosen at random but the same each time; None: all.
        as_json: print one JSON object.

    Raises:
        UserError: the run goes on, or lacks what is needed.
        LedgerError, OperationError: the ledger is damaged, or a process failed.
    """
    started_s = time.monotonic()
    if num_samples == 0:
        raise UserError("the number of samples to compare is 0", where="--samples", remedy="specify at least 1 sample")
    with open_recording(folder) as recording, tempfile.TemporaryDirectory(prefix="areal-like-replay-") as root:
        end = recording.last_step if last is None else last
        recording.check_step(end, "--to" if last is not None else str(folder.root))
        if first is not None and not first < end:
            what = f"--from is {first}, but it must be less than the last step, {end}"
            raise UserError(what, where="--from", remedy=f"specify a step before step {end}")
        worker = _worker(recording)
        engine, skipped = engine_facts(worker), Skipped()
        chosen = _choose(recording, range((first or 0) + 1, end + 1), num_samples, skipped)
        versions = sorted({one for item in chosen for one in _versions(item.sample)})
        found = plan(recording, versions, _note)
        if len(found.gone) == len(versions):
            reason = found.gone[versions[0]]
            raise UserError(
                f"the weights of none of the recorded versions can be restored: {reason}",
                where=str(folder.root),
                remedy=KEEP,
            )
        if not as_json:
            print(_title(recording, engine, found, (first or 0) + 1, end), flush=True)
        job = Regeneration(recording, worker, engine, chosen, skipped)
        comparison = job.run(found, Path(root))
        wall_s = time.monotonic() - started_s
        if as_json:
            print(json.dumps(_facts(job, found, comparison, ((first or 0) + 1, end), wall_s), indent=1))
        else:
            for line in _lines(job, comparison, wall_s):
                print(line)
        return 0 if comparison.is_equal else 1


class Regeneration:
    """Compares chosen samples, one version after another. Call `run` once."""

    def __init__(
        self, recording: Recording, worker: ProcessSpec, engine: EngineFacts, chosen: Sequence[Chosen], skipped: Skipped
    ) -> None:
        self._recording, self._worker, self._chosen = recording, worker, chosen
        self.engine, self.skipped = engine, skipped
        self.name = recording.folder.name
        self.allowed = ROUNDED

    def run(self, found: Plan, scratch: Path) -> Comparison:
        """Return what was found. Raises UserError, OperationError, LedgerError."""
        comparison, progress = Comparison(), Progress(len(found.folders) + found.num_replayed)
        for version, reason in found.gone.items():
            if number := _num_tokens(self._parts(version)):
                self.skipped.tokens[f"version {version} cannot be made: {reason}"] = number
        spec = RegenerateSpec(
            run_id=self._worker.run_id, parent_pid=os.getpid(), seed=self._worker.seed, num_threads=num_cores(),
            worker=self._worker,
        )  # fmt: skip
        with open_engine(spec, self._recording.home, scratch) as process:
            self.allowed = self._tolerances(process.device)
            for number, (version, folder) in enumerate(policies(self._recording, found, scratch / "policies"), start=1):
                self._compare(version, folder, process, comparison)
                progress(f"version {number}")
        if not comparison.num_tokens:
            what = f"no token can be compared: {next(iter(self.skipped.tokens), 'no version sampled any')}"
            raise UserError(what, where=str(self._recording.folder.root), remedy=KEEP)
        return comparison

    def _tolerances(self, device: str) -> Tolerances:
        if not self.engine.is_exact or not names_cpu(device):
            return ROUNDED
        return EXACT if self.engine.can_redraw else SERVER

    def _compare(self, version: int, folder: Path, process: EngineProcess, comparison: Comparison) -> None:
        parts = self._parts(version)
        sequences = []
        for place, trajectory, spans in parts:
            is_last = self.engine.has_one_answer and self.engine.can_redraw and version == trajectory.last_version
            sequences.append(SampledTokens(
                tokens_T=trajectory.tokens_T.astype(INTEGERS).tobytes(),
                seed=stream_seed(self._worker.seed, "train", place.group, place.sample),
                spans=spans,
                end=trajectory.finish_reason if is_last else None,
            ))  # fmt: skip
        order = VersionOrder(
            version=version, model_dir=str(folder), sampling=task_sampling(self._worker.sampling),
            sequences=tuple(sequences),
        )  # fmt: skip
        for (place, trajectory, spans), result in zip(parts, process.run(order), strict=True):
            comparison.add(place, trajectory, version, spans, result, self.allowed, can_redraw=self.engine.can_redraw)

    def _parts(self, version: int) -> list[tuple[Place, Trajectory, tuple[AnswerSpan, ...]]]:
        """What a version sampled of the chosen samples."""
        parts = []
        for step, sample in self._chosen:
            if version not in _versions(sample):
                continue
            trajectories = self._recording.reader.trajectories(sample.group_id, sample.sample_index)
            _check_versions(sample, trajectories)
            for number, trajectory in enumerate(trajectories):
                spans = spans_of(trajectory, version, has_one_answer=self.engine.has_one_answer)
                if spans and self.engine.keeps_kv and version != sample.first_version:
                    self.skipped.tokens[KEPT_KV] += sum(one.length for one in spans)
                elif spans:
                    parts.append((Place(step, sample.group_id, sample.sample_index, number), trajectory, spans))
        return parts


def _worker(recording: Recording) -> ProcessSpec:
    """The recorded spec of the first rollout worker, with a model folder that is still there. Raises UserError."""
    where = str(recording.folder.root)
    files = sorted(recording.folder.processes.glob("rollout-*.json"))
    if not files:
        raise UserError(
            "the run never started a rollout worker",
            where=where,
            remedy="specify a run that has trained at least one step",
        )
    spec = ProcessSpec.load(files[0])
    model = in_home(Path(str(spec.model.path)), recording.home)
    kept = [folder for _, folder in sorted(recording.checkpoints.items()) if not holds_adapter(folder)]
    for folder in (model, *kept):
        if (folder / "config.json").is_file():
            return spec.model_copy(update={"model": spec.model.model_copy(update={"path": str(folder)})})
    what = f"the starting model no longer exists, and no checkpoint is left: {spec.model.path}"
    raise UserError(what, where=where, remedy="restore the model")


def _choose(recording: Recording, steps: range, num_samples: int | None, skipped: Skipped) -> list[Chosen]:
    """The samples to compare, in the order of the record. Raises UserError if there is none."""
    found = [
        Chosen(step, sample)
        for step in steps
        if step in recording.batches
        for sample in recording.reader.sample_versions(recording.batches[step])
    ]
    stored = [one for one in found if one.sample.is_stored]
    if len(stored) < len(found):
        skipped.samples["their tokens are no longer stored"] = len(found) - len(stored)
    if not stored:
        what = f"no answers of steps {steps.start} to {steps.stop - 1} are stored"
        raise UserError(what, where=str(recording.folder.root), remedy=KEEP)
    if num_samples is None or num_samples >= len(stored):
        return stored
    places = sorted(random.Random(SHUFFLE).sample(range(len(stored)), num_samples))
    return [stored[place] for place in places]


def _versions(sample: SampleVersions) -> range:
    """Versions that may have sampled tokens of a sample."""
    return range(sample.first_version, sample.last_version + 1)


def _check_versions(sample: SampleVersions, trajectories: Sequence[Trajectory]) -> None:
    """Raise LedgerError if tokens have versions that the sample does not have."""
    recorded = (min(one.first_version for one in trajectories), max(one.last_version for one in trajectories))
    if recorded != (sample.first_version, sample.last_version):
        raise LedgerError(
            f"group {sample.group_id} sample {sample.sample_index} is recorded with versions {sample.first_version} to "
            f"{sample.last_version}, but its tokens have versions {recorded[0]} to {recorded[1]}; run areal-like "
            "verify to see what is damaged"
        )


def _num_tokens(parts: Sequence[tuple[Place, Trajectory, tuple[AnswerSpan, ...]]]) -> int:
    return sum(one.length for _, _, spans in parts for one in spans)


def _title(recording: Recording, engine: EngineFacts, found: Plan, first: int, last: int) -> str:
    what = "tokens and log-probs" if engine.can_redraw else "log-probs"
    return (
        f"{recording.folder.name}: {what} of the answers of steps {first} to {last}, with "
        f"{len(found.folders) + found.num_replayed} versions: {len(found.folders)} of the starting model or a "
        f"checkpoint, {found.num_replayed} by replaying the trainer"
    )


def _lines(job: Regeneration, found: Comparison, wall_s: float) -> list[str]:
    lines, allowed = [], job.allowed
    if not job.engine.can_redraw:
        lines.append(
            f"tokens were not drawn again, because the sampler of {job.engine.title} cannot be repeated; only "
            "log-probs were compared"
        )
    elif found.num_drawn < found.num_tokens:
        lines.append(
            f"{found.num_tokens - found.num_drawn:,} tokens were not drawn again, because the number of their turn is "
            "not recorded; only their log-probs were compared"
        )
    lines += [f"{number:,} samples were not compared: {why}" for why, number in job.skipped.samples.items()]
    lines += [f"{number:,} tokens were not compared: {why}" for why, number in job.skipped.tokens.items()]
    if job.engine.can_redraw:
        lines.append(
            f"ties: {found.num_ties:,} tokens whose random number is within {allowed.probability:g} of the range that "
            "gives the recorded token"
        )
    lines.append(
        f"log-probs: the largest difference is {found.largest_gap_nats:.2g} nats, and up to {allowed.nats:g} nats are "
        "allowed"
    )
    counted = f"{len(found.places):,} samples with {found.num_tokens:,} tokens, in {span(wall_s)}"
    if found.first is None:
        return [*lines, f"equal: {counted}"]
    return [
        *lines,
        f"{found.num_other_tokens:,} tokens, {found.num_other_logprobs:,} log-probs and {found.num_other_ends:,} ends "
        f"of answers differ, of {counted}",
        f"different: {found.first.words}",
    ]


def _facts(job: Regeneration, found: Plan, result: Comparison, steps: tuple[int, int], wall_s: float) -> dict[str, Any]:
    return {
        "run": job.name, "steps": steps, "compared": ["tokens", "logprobs"] if job.engine.can_redraw else ["logprobs"],
        "versions": len(found.folders) + found.num_replayed, "versions_replayed": found.num_replayed,
        "samples": len(result.places), "tokens": result.num_tokens, "tokens_drawn": result.num_drawn,
        "ties": result.num_ties, "largest_tie": result.largest_tie,
        "different_tokens": result.num_other_tokens, "different_logprobs": result.num_other_logprobs,
        "different_ends": result.num_other_ends, "largest_gap_nats": result.largest_gap_nats,
        "allowed_nats": job.allowed.nats,
        "allowed_probability": job.allowed.probability if job.engine.can_redraw else None,
        "samples_not_compared": dict(job.skipped.samples), "tokens_not_compared": dict(job.skipped.tokens),
        "first": None if result.first is None else result.first.facts(), "wall_s": round(wall_s, 1),
    }  # fmt: skip


def _note(words: str) -> None:
    print(f"note: {words}", file=sys.stderr, flush=True)
