"""A run folder as a trainer leaves it, made in this process: a tiny model, a real ledger, real steps and restarts.

`play_here` replaces controller.runs.replay.player.play: the same trainer code, without a process.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.metrics import JsonlLog, encode
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from areal_like.wire.batch_stream import write_batch
from areal_like.wire.messages import Batch
from controller.coordinator.effects import RecordBatch, RecordGroup, RecordLineage, StoreFinished
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import BatchGroup
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.run_folder.run_folder import RunFolder
from controller.runs.replay.player import Order, _replay_spec
from controller.wiring.replay import in_scratch
from trainer.export import write_model
from trainer.model.tokenizers import build_tokenizer
from trainer.replay.player import play
from trainer.training import Training

GROUPS, GROUP_SIZE, VOCABULARY = 3, 4, 61
MAX_NEW_TOKENS = 20
SETTINGS: Mapping[str, Any] = {"device": "cpu", "optimizer": {"lr": 1e-2}, "checkpoint": {"keep": 2}}


def make_model(folder: Path) -> Path:
    """Write a two-layer model and a tokenizer into a new folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCABULARY, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder.mkdir(parents=True)
    write_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), folder, dtype="float32")
    build_tokenizer("characters:running_sum", None).save_pretrained(folder)
    return folder


class Answers(Protocol):
    """What samples the answers of a run."""

    def take(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Receive a version."""

    def __call__(self, group_id: int, index: int, step: int) -> Trajectory:
        """A sample of the batch of a step."""


class RandomAnswers:
    """Random tokens, with random log-probs and versions."""

    def take(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        pass

    def __call__(self, group_id: int, index: int, step: int) -> Trajectory:
        rng, version = np.random.default_rng(100 * group_id + index), step - 1
        length, _ = _length_and_reward(rng)
        answer = Segment(
            rng.integers(3, VOCABULARY, length).astype(np.int32),
            (-rng.exponential(3.0, length)).astype(np.float32),
            np.sort(rng.integers(max(0, version - 2), version + 1, length)).astype(np.int32),
        )
        return Trajectory.from_prompt(prompt_of(group_id), answer, "stop")


def _length_and_reward(rng: np.random.Generator) -> tuple[int, float]:
    """The first two draws of a sample's generator: length of a random answer, and reward."""
    return int(rng.integers(2, 12)), float(rng.integers(0, 3))


def prompt_of(group_id: int) -> np.ndarray:
    """Prompt of a group, int32 [4]."""
    return np.random.default_rng(group_id).integers(3, VOCABULARY, 4).astype(np.int32)


@dataclass
class MadeRun:
    """The run, and what its trainer holds after the last step."""

    folder: RunFolder
    spec: ProcessSpec
    weights: dict[str, torch.Tensor]


def make_run(
    root: Path,
    *,
    starts: Sequence[tuple[int, int]] = ((0, 5),),
    saved: Sequence[int] = (2, 4, 5),
    settings: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    answers: Answers | None = None,
) -> MadeRun:
    """Train in a new folder.

    starts: base and last step of each start of the trainer; one that begins before the previous one's last step is a
    fall-back. saved: versions with a checkpoint. rollout: the section `rollout` of a worker; None: no worker was
    started. answers: what samples them; None: random tokens.
    """
    torch.set_num_threads(1)  # as in tests/conftest.py, also when a fixture of a module makes the run
    run = RunFolder(root / "runs" / "made")
    run.processes.mkdir(parents=True)
    run.write_state("finished", command="train", started_in=str(root), versions={"torch": torch.__version__})
    run.config.write_text("name: made\napi_key: a-secret\n")
    spec = ProcessSpec(
        role="trainer", name="trainer", run_id="made", run_dir=str(run.root), hub_address="tcp://127.0.0.1:1",
        parent_pid=os.getpid(), seed=1, num_threads=torch.get_num_threads(),
        model=ModelSettings(path=str(make_model(root / "prepared"))),
        sampling=SamplingSettings(max_new_tokens=MAX_NEW_TOKENS),
        staleness=StalenessSettings(), groups_per_step=GROUPS, group_size=GROUP_SIZE, num_steps=8,
        weight_dir=str(run.root / "weights"), settings={**SETTINGS, **(settings or {})},
    )  # fmt: skip
    spec.save(run.processes / "trainer.json")
    if rollout is not None:
        worker = {"role": "rollout", "name": "rollout-0", "settings": dict(rollout)}
        spec.model_copy(update=worker).save(run.processes / "rollout-0.json")
    answers = answers or RandomAnswers()
    log = JsonlLog(run.metrics)
    with Ledger(run.root, run_id="made", segment_bytes=1) as ledger:
        done = 0
        for number, (base, last) in enumerate(starts):
            training = _start(run, spec, ledger, number, base)
            answers.take(base, training.policy.full_weights())
            for step in range(base + 1, last + 1):
                is_replay = step <= done
                groups = _record(ledger, step, f"l{number}", answers, is_replay=is_replay)
                metrics = training.run(training.prepare(ledger.batch_samples(groups), step))
                answers.take(step, training.policy.full_weights())
                if not is_replay:
                    log.append({**metrics, "kind": "step", "step": step, "staleness_max": 9})
                if step in saved:
                    training.save()()
            done = max(done, last)
    log.close()
    training.export()
    return MadeRun(run, spec, {name: one.clone() for name, one in training.policy.full_weights().items()})


def _start(run: RunFolder, spec: ProcessSpec, ledger: Ledger, number: int, base: int) -> Training:
    lineage = RecordLineage(
        lineage=f"l{number}", checkpoint_version=base, groups_per_step=GROUPS, group_size=GROUP_SIZE,
        max_staleness=None, on_stale="wait",
    )  # fmt: skip
    ledger.apply([LedgerEntry(effect=lineage)])
    resume_from = str(run.checkpoints / f"step_{base:06d}") if base else None
    training = Training(spec.model_copy(update={"lineage": f"l{number}", "resume_from": resume_from}))
    training.open()
    return training


def _record(ledger: Ledger, step: int, lineage: str, answers: Answers, *, is_replay: bool) -> tuple[BatchGroup, ...]:
    """Record the batch of a step, with its samples if they are new."""
    first = (step - 1) * GROUPS
    groups = tuple(
        BatchGroup(group_id=number, sample_indices=tuple(range(GROUP_SIZE)), first_version=max(0, step - 3))
        for number in range(first, first + GROUPS)
    )
    entries = []
    for group in () if is_replay else groups:
        entries.append(
            LedgerEntry(effect=RecordGroup(group_id=group.group_id, version=step - 1, started=group.group_id + 1))
        )
        entries += [_sample(group.group_id, index, answers(group.group_id, index, step)) for index in range(GROUP_SIZE)]
    entries.append(LedgerEntry(effect=RecordBatch(step=step, lineage=lineage, groups=groups, is_replay=is_replay)))
    ledger.apply(entries)
    return groups


def _sample(group_id: int, index: int, trajectory: Trajectory) -> LedgerEntry:
    _, reward = _length_and_reward(np.random.default_rng(100 * group_id + index))
    outcome = SampleOutcome(
        lease_id=1, group_id=group_id, sample_index=index, num_tokens=trajectory.num_sampled,
        first_version=trajectory.first_version, last_version=trajectory.last_version, verdict_kind="scored",
        value=reward,
    )  # fmt: skip
    return LedgerEntry(
        effect=StoreFinished(purpose="train", outcome=outcome, value=reward, is_kept=True),
        trajectories=(trajectory,),
        verdict=Verdict(kind="scored", value=reward),
        response_text="an answer",
        worker="rollout-0",
    )


def play_here(order: Order, scratch: Path, batch_of: Callable[[int], Batch]) -> Iterator[dict[str, Any]]:
    """As controller.runs.replay.player.play, in this process; events come when the start has ended."""
    scratch.mkdir(parents=True)
    spec = _replay_spec(order, in_scratch(order.specs[0], scratch, order.checkpoint, ""))
    keep = {"checkpoint": {"keep": 100}}  # events are read later than they happen
    trainer = spec.trainer.model_copy(update={"settings": {**spec.trainer.settings, **keep}})
    spec = type(spec).model_validate_json(spec.model_copy(update={"trainer": trainer}).model_dump_json())
    stream, events = io.BytesIO(), list[dict[str, Any]]()

    def say(event: dict[str, Any]) -> None:
        if event["kind"] == "want":
            place = stream.tell()
            write_batch(stream, batch_of(event["step"]))
            stream.seek(place)
        else:
            events.append(json.loads(encode(event)))

    play(spec, stream, say)
    yield from events
