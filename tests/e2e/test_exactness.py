"""Interruption is exact in a real run: every recorded log-prob is that of the version stamped on its token.

The oracle is transformers' plain forward pass over the whole sample, with the weights of each stamped version as they
were published. A token lost or repeated at a seam, a stale key-value cache or a wrong stamp changes the context or the
weights, which is visible with versions that differ as much as here. Long answers are rewarded, with a random part, so
that a high learning rate keeps changing the policy during the whole run.

The same holds for episodes of several turns, in which versions change between turns: what an environment wrote is
context, and is not trained on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import START
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from areal_like.process import command_words
from areal_like.trajectory import Trajectory
from controller.ledger.ledger import Ledger

pytestmark = pytest.mark.e2e

TEMPERATURE, MAX_NEW_TOKENS = 0.9, 72
NUM_STEPS, GROUPS, GROUP_SIZE = 12, 6, 4
NUM_CHECKED = 96
POLL_S = 0.01
TOLERANCE_NATS, APART_NATS = 1e-4, 0.1
MOVING = [
    f"num_steps={NUM_STEPS}", f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}", "staleness.max_staleness=8",
    "data.train.options={pgeo: 0.05}", "data.eval=null", "eval.every_steps=0", "metrics.report=false",
    "rollout.engine.num_slots=128",
    f"sampling.temperature={TEMPERATURE}", f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
    "trainer.mini_batches=3", "trainer.optimizer.lr=1e-3", "trainer.optimizer.warmup_steps=0",
    "trainer.weights.kind=disk", "trainer.weights.keep=1000", "ledger.keep_mb=null",
    "launch.silence_s=600", "launch.controller_silence_s=600",  # workers are suspended for whole steps of the trainer
    "reward.scorers=[{kind: 'coin:toss'}]", *START,
]  # fmt: skip
"""Long answers, small batches, and an update that moves the policy far: a new version several times an answer."""
TURNS, TURN_TOKENS, TURN_STEPS, TURN_GROUPS = 4, 24, 6, 4
IN_TURNS = [
    "warm_start=null", f"num_steps={TURN_STEPS}", f"groups_per_step={TURN_GROUPS}",
    "data.train.options={pgeo: 0.3, max_terms: 6}", "data.train.limit=200",
    f"sampling.max_new_tokens={TURN_TOKENS}", "rollout.workflow=environment",
    f"rollout.workflow_options={{max_turns: {TURNS}, stop: ';'}}", "reward.scorers=[]",
    "reward.environment={kind: 'more:More', num_processes: 1, step_timeout_s: 300}", "rollout.score_timeout_s=800",
    "trainer.optimizer.lr=3e-3", "rollout.threads=1", "trainer.threads=1",
]  # fmt: skip
"""Episodes of up to TURNS turns, each of which `;` or the end of a sequence ends: two of the seventeen characters of a
model with random weights."""
MORE = """
import asyncio
import random
from pathlib import Path

RANKS = {{}}


def loaded():
    try:
        return int(Path({gate!r}).read_text())
    except (OSError, ValueError):
        return 0


class More:
    def reset(self, row, seed):
        self.num_turns, self.version = 0, RANKS.setdefault(seed, len(RANKS)) // {groups}

    async def step(self, action):
        self.num_turns += 1
        while loaded() < self.version:
            await asyncio.sleep(0.02)
        reward = len(action) / 10 + random.Random(action).random()
        return f"{{self.num_turns}}+1=", reward, False
"""
"""An environment that holds the episodes of later groups after their first turn until the engine has loaded a later
version: those of the groups of step k until version k."""
COIN = """
import random

def toss(row, response, **info):
    return len(response) / 10 + random.Random(response).random()
"""


@dataclass
class Sample:
    """One consumed sample, and under each version stamped on it the log-probs of all its tokens."""

    group_id: int
    index: int
    trajectory: Trajectory
    recomputed: dict[int, np.ndarray]

    @property
    def versions(self) -> list[int]:
        return np.unique(self.trajectory.versions_T[self.trajectory.loss_mask_T]).tolist()

    def error_nats(self) -> float:
        """Largest difference between a recorded log-prob and the stamped version's."""
        mask, stamps = self.trajectory.loss_mask_T, self.trajectory.versions_T
        expected = np.array([self.recomputed[int(stamps[at])][at] for at in np.flatnonzero(mask)])
        return float(np.abs(self.trajectory.logprobs_T[mask] - expected).max())

    def spread_nats(self) -> float:
        """How far apart its first and last version are: the mean over its sampled tokens."""
        mask = self.trajectory.loss_mask_T
        first, last = self.recomputed[self.versions[0]], self.recomputed[self.versions[-1]]
        return float(np.abs(first - last)[mask].mean())


def count_batches(folder: Path) -> int:
    """Batches that the trainer has received so far."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return ledger.execute("SELECT count(*) FROM batches").fetchone()[0]


def follow(run, keep: Path, gate: Path | None = None) -> dict[int, Path]:
    """Follow the run to its end; returns the payload of every version, linked as it appears (the store goes then).

    Rollout workers are suspended while the trainer has a batch, and resumed when its version is published: the answers
    that are in flight then, most of them, continue under the new version. So an answer outlasts steps of the
    trainer on any machine, however it shares out its time. With `gate` they are not suspended: the file gets the newest
    version in an engine.
    """
    keep.mkdir()
    run.wait_until(lambda: bool(run.metrics("swap")), "the first version in an engine")
    workers = [process for process in run.family() if "rollout" in command_words(process)]
    store = run.folder / "weights"
    while run.process.poll() is None:
        for manifest in store.glob("*.manifest.json"):
            with contextlib.suppress(FileNotFoundError):  # the run ended meanwhile
                payload = json.loads(manifest.read_text())["payload"]
                if not (keep / payload).exists():
                    os.link(store / payload, keep / payload)
        if gate is not None:
            gate.write_text(str(max(row["version"] for row in run.metrics("swap"))))
            time.sleep(POLL_S)
            continue
        num_published = len(list(keep.iterdir())) - 1  # the first version is the starting model's
        num_batches = count_batches(run.folder)
        is_training = num_published < num_batches < NUM_STEPS
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in workers:
                worker.suspend() if is_training else worker.resume()
        time.sleep(POLL_S)
    return {int(path.name[1:].partition("-")[0]): path for path in keep.iterdir()}


def consumed_samples(folder: Path) -> list[Sample]:
    """Every sample of every recorded batch, in order."""
    with contextlib.closing(Ledger(folder, must_exist=True, keep_bytes=None)) as ledger:
        return [
            Sample(group.group_id, index, ledger.trajectories(group.group_id, index)[0], {})
            for batch in ledger.load().batches
            for group in batch.groups
            for index in group.sample_indices
        ]


def drawn(samples: list[Sample], number: int = NUM_CHECKED) -> list[Sample]:
    """Those to check: three quarters out of the interrupted ones."""
    samples = random.Random(0).sample(samples, len(samples))
    interrupted = [sample for sample in samples if len(sample.versions) > 1][: number * 3 // 4]
    others = [sample for sample in samples if len(sample.versions) == 1]
    return interrupted + others[: number - len(interrupted)]


@torch.inference_mode()
def recompute(model: PreTrainedModel, weights: dict[int, Path], samples: list[Sample]) -> None:
    """Fill in `recomputed`: one plain forward pass per version over the samples it has tokens in."""
    for version in sorted({version for sample in samples for version in sample.versions}):
        missing, unexpected = model.load_state_dict(load_file(weights[version]), strict=False)
        assert not missing
        assert not unexpected
        of_version = [sample for sample in samples if version in sample.versions]
        length = max(len(sample.trajectory) for sample in of_version)
        tokens = torch.zeros(len(of_version), length, dtype=torch.long)
        is_real = torch.zeros_like(tokens)
        for row, sample in enumerate(of_version):
            tokens[row, : len(sample.trajectory)] = torch.from_numpy(sample.trajectory.tokens_T.astype(np.int64))
            is_real[row, : len(sample.trajectory)] = 1
        logits = model(tokens, attention_mask=is_real).logits.float() / TEMPERATURE
        logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].numpy()
        for row, sample in enumerate(of_version):
            sample.recomputed[version] = np.concatenate([[0.0], logprobs[row, : len(sample.trajectory) - 1]])


def assert_nothing_lost_or_repeated(run, samples: list[Sample], tokenizer) -> None:
    assert run.summary["audit"] == "clean"
    names = Counter((sample.group_id, sample.index) for sample in samples)
    assert len(names) == sum(names.values()) == NUM_STEPS * GROUPS * GROUP_SIZE
    prompts: dict[int, bytes] = {}
    for sample in samples:
        trajectory = sample.trajectory
        sampled = np.flatnonzero(trajectory.loss_mask_T)
        assert (np.diff(sampled) == 1).all()
        assert sampled[-1] == len(trajectory) - 1
        assert (np.diff(trajectory.versions_T[sampled]) >= 0).all()
        prompt, answer = trajectory.tokens_T[: sampled[0]], trajectory.tokens_T[sampled]
        assert prompts.setdefault(sample.group_id, prompt.tobytes()) == prompt.tobytes()
        assert tokenizer.decode(prompt, skip_special_tokens=True).replace(" ", "").endswith("=")
        ends = np.flatnonzero(answer == tokenizer.eos_token_id)
        if trajectory.finish_reason == "stop":
            assert ends.tolist() == [len(answer) - 1]
        else:
            assert len(answer) == MAX_NEW_TOKENS
            assert not len(ends)


def compare(run, checked: list[Sample], weights: dict[int, Path]) -> None:
    """Compare with the oracle."""
    model_dir = json.loads((run.folder / "processes" / "rollout-0.json").read_text())["model"]["path"]
    recompute(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval(), weights, checked)
    worst = max(checked, key=Sample.error_nats)
    worst_nats, where = worst.error_nats(), (worst.group_id, worst.index, worst.versions)
    assert worst_nats <= TOLERANCE_NATS, where
    num_far = sum(len(sample.versions) > 1 and sample.spread_nats() > APART_NATS for sample in checked)
    assert num_far >= len(checked) / 2, "too few answers were interrupted for the check to mean anything"


def tokenizer_of(run) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(
        json.loads((run.folder / "processes" / "rollout-0.json").read_text())["model"]["path"]
    )


def check(run, tmp_path: Path) -> None:
    """Run to the end, then compare with the oracle."""
    weights = follow(run, tmp_path / "versions")
    assert run.wait() == 0, run.output
    samples = consumed_samples(run.folder)
    assert_nothing_lost_or_repeated(run, samples, tokenizer_of(run))
    compare(run, drawn(samples), weights)
    assert len({sample.trajectory.finish_reason for sample in samples}) == 2, "one kind of end was never seen"


def turns_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[begin, end) of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.loss_mask_T.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def assert_turns_are_whole(samples: list[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token of a turn is trained on and none of the environment's: a turn ends with a mark or at its limit, and
    between two turns is the environment's text."""
    marks = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(";"))
    for sample in samples:
        trajectory = sample.trajectory
        turns = turns_of(trajectory)
        assert turns[-1][1] == len(trajectory)
        for number, (begin, end) in enumerate(turns):
            before = trajectory.tokens_T[turns[number - 1][1] if number else 0 : begin]
            words = tokenizer.decode(before, skip_special_tokens=True).replace(" ", "")
            assert words == f"{number}+1=" if number else words.endswith("=")
            own = trajectory.tokens_T[begin:end]
            is_last = number == len(turns) - 1
            ends = np.flatnonzero(np.isin(own, marks)).tolist()
            assert ends == [len(own) - 1] or (is_last and not ends and len(own) == TURN_TOKENS)


def test_logprobs_are_those_of_the_version_stamped_on_each_token(areal, quickstart, tmp_path):
    (tmp_path / "coin.py").write_text(COIN)
    check(areal("train", quickstart, *MOVING), tmp_path)


@pytest.mark.thorough
def test_answers_handed_from_worker_to_worker_are_as_exact(areal, quickstart, tmp_path):
    (tmp_path / "coin.py").write_text(COIN)
    run = areal("train", quickstart, *MOVING, "rollout.num_workers=2", "rollout.segment_tokens=12")
    check(run, tmp_path)
    workers: dict[tuple[int, int], set[int]] = {}
    for event in json.loads((run.folder / "trace.json").read_text())["traceEvents"]:
        if event["name"] == "generate" and "sample" in event.get("args", {}):
            workers.setdefault((event["args"]["group"], event["args"]["sample"]), set()).add(event["pid"])
    num_moved = sum(len(pids) > 1 for pids in workers.values())
    assert num_moved > len(workers) / 10, "answers did not change workers"


def test_turns_are_exact_over_versions_that_change_between_them(areal, quickstart, tmp_path):
    gate = tmp_path / "gate"
    (tmp_path / "more.py").write_text(MORE.format(gate=str(gate), groups=TURN_GROUPS))
    run = areal("train", quickstart, *(one for one in MOVING if one not in START), *IN_TURNS)
    weights = follow(run, tmp_path / "versions", gate)
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    samples = consumed_samples(run.folder)
    names = {(sample.group_id, sample.index) for sample in samples}
    assert len(names) == len(samples) == TURN_STEPS * TURN_GROUPS * GROUP_SIZE
    assert_turns_are_whole(samples, tokenizer_of(run))
    compare(run, drawn(samples, len(samples) // 2), weights)
    stamps = [
        [sample.trajectory.versions_T[begin:end] for begin, end in turns_of(sample.trajectory)] for sample in samples
    ]
    pairs = [(one[-1], other[0]) for turns in stamps for one, other in itertools.pairwise(turns)]
    assert sum(one != other for one, other in pairs) > len(samples) / 2, "too few versions changed between turns"
