"""What does a checkpoint cost a trainer, and how long is the trainer idle between steps? One thread, a tiny model.

    python -m benchmarks.checkpoint            about 4 minutes
    python -m benchmarks.checkpoint --quick    about 30 seconds

cost   Blocks of STEPS steps with a checkpoint at each step and without any alternate in one process; a pair of
       neighbouring blocks gives one figure: how much longer a step takes, writing included. Pending writes of a block
       are completed before the next block begins and are not timed. `stall`: the part in which training is blocked,
       which is the copy; the rest is the time that the writing thread takes from the computing thread.
idle   The trainer's own worker over a link that has every batch ready: the share of the time between first and last
       step in which it did not compute, by activity. Every step publishes a version and takes a checkpoint.

A step has at least TOKENS tokens. Files go to the folder for temporary files (TMPDIR), with fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; oversubscribed threads would measure nothing

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.wire import messages as m
from benchmarks.packing import MODEL, PROMPT, made_samples
from benchmarks.runs import write
from benchmarks.spreads import mean_interval
from trainer.activity import Activity
from trainer.export import write_model
from trainer.model.tokenizers import build_tokenizer
from trainer.training import Saved, Training
from trainer.worker import TrainerWorker

TOKENS = 8000
SAMPLES, LENGTH = 64, 120
STEPS = 3
IDLE_STEPS, WARM_STEPS = 24, 2
LIMIT = 0.02
"""Target for both figures, as a share of a step."""


def process_spec(run_dir: Path, prepared: Path) -> ProcessSpec:
    """A trainer's spec, with weights in shared memory and a checkpoint at every step."""
    store = tempfile.mkdtemp(prefix="areal-benchmark-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    return ProcessSpec(
        role="trainer", name="trainer", run_id="benchmark", run_dir=str(run_dir), hub_address="tcp://127.0.0.1:1",
        parent_pid=os.getpid(), seed=1, model=ModelSettings(path=str(prepared)), sampling=SamplingSettings(),
        staleness=StalenessSettings(), groups_per_step=SAMPLES // 8, group_size=8, num_steps=1000, weight_dir=store,
        settings={
            "device": "cpu", "checkpoint": {"every_steps": 1}, "micro_batch_tokens": 2048, "optimizer": {"lr": 1e-5},
        },
    )  # fmt: skip


def prepare(folder: Path) -> Path:
    """Write the quickstart's model to a folder."""
    prepared = folder / "prepared"
    prepared.mkdir()
    torch.manual_seed(0)
    write_model(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.float32), prepared, dtype="float32"
    )
    build_tokenizer("characters:running_sum", None).save_pretrained(prepared)
    (prepared / "generation_config.json").write_text('{"eos_token_id": 2}')
    return prepared


def batch(step: int) -> list[m.BatchSample]:
    """SAMPLES answers, sampled by the version from which the step starts."""
    samples = made_samples([LENGTH] * SAMPLES)
    for sample in samples:
        versions_T = sample.trajectory.versions_T
        versions_T[sample.trajectory.loss_mask_T] = step - 1
    return samples


# ---------------------------------------------------------------- cost


class Cost:
    """Runs blocks of steps with checkpoints and without."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None
        self.stalls_s: list[float] = []
        self.writes_s: list[float] = []
        self.num_bytes = self.num_put_off = 0

    def block(self, *, is_saving: bool) -> float:
        """Seconds per step of one block."""
        training = self._training
        prepared = [
            training.prepare(batch(step), step) for step in range(training.version + 1, training.version + STEPS + 1)
        ]
        started_s = time.perf_counter()
        for one in prepared:
            training.run(one)
            if is_saving:
                self._save()
        taken_s = (time.perf_counter() - started_s) / STEPS
        self._written()
        return taken_s

    def _save(self) -> None:
        if self._writing is not None and not self._writing.done():
            self.num_put_off += 1
            return
        self._written()
        started_s = time.perf_counter()
        copied = self._training.save()
        self.stalls_s.append(time.perf_counter() - started_s)
        self._writing = self._disk.submit(copied)

    def _written(self) -> None:
        if self._writing is not None:
            saved = self._writing.result()
            self.writes_s.append(saved.write_s)
            self.num_bytes, self._writing = saved.num_bytes, None


def cost(spec: ProcessSpec, num_pairs: int) -> dict[str, Any]:
    """Measure what checkpoints add to a step, paired."""
    training = Training(spec)
    training.open()
    measured = Cost(training)
    measured.block(is_saving=True)  # warm up buffers and caches
    more, steps_s = [], []
    for pair in range(num_pairs):
        order = (False, True) if pair % 2 else (True, False)
        taken_s = {is_saving: measured.block(is_saving=is_saving) for is_saving in order}
        more.append(taken_s[True] / taken_s[False] - 1.0)
        steps_s.append(taken_s[False])
    step_s = statistics.median(steps_s)
    mean, half = mean_interval(more)
    return {
        "pairs": num_pairs, "steps_per_block": STEPS, "tokens_per_step": SAMPLES * (PROMPT + LENGTH),
        "step_s": step_s, "checkpoint_bytes": measured.num_bytes,
        "stall_share": statistics.median(measured.stalls_s[STEPS:]) / step_s,
        "stall_share_most": max(measured.stalls_s[STEPS:]) / step_s,
        "more_mean": mean, "more_95": half, "more_median": statistics.median(more),
        "more_least": min(more), "more_most": max(more),
        "write_s": statistics.median(measured.writes_s), "put_off": measured.num_put_off,
    }  # fmt: skip


# ---------------------------------------------------------------- idle


class TimedActivity(Activity):
    """Also records when each state began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def state(self, name: str, **args: Any) -> Iterator[None]:
        started_s = time.perf_counter()
        with super().state(name, **args):
            yield
        self.states.append((name, started_s, time.perf_counter()))


class FullQueue:
    """A link that answers every request for a batch immediately; the run ends after `num_steps`."""

    hub_silence_s = 0.0

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._messages: asyncio.Queue[m.Message] = asyncio.Queue()
        self._batches = {step: tuple(batch(step)) for step in range(1, num_steps + 1)}

    async def receive(self, timeout_s: float) -> m.Message | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._messages.get()
        return None

    async def send(self, message: m.Message, timeout_s: float = 30.0) -> None:
        if isinstance(message, m.BatchRequest):
            if message.step <= self._num_steps:
                one: m.Message = m.Batch(step=message.step, lineage="l0", samples=self._batches[message.step])
            else:
                one = m.NoMoreBatches(last_step=self._num_steps, reason="measured")
            self._messages.put_nowait(one)


def idle(spec: ProcessSpec, num_steps: int) -> dict[str, Any]:
    """Share of the time in which the trainer does not compute although every batch is ready."""
    activity = TimedActivity()
    worker = TrainerWorker(spec, Training(spec, activity), FullQueue(num_steps), asyncio.Event(), activity)
    asyncio.run(worker.run())
    starts_s = [started_s for name, started_s, _ in activity.states if name == "forward_backward"]
    first_s, last_s = starts_s[WARM_STEPS], starts_s[-1]
    taken_s: Counter[str] = Counter()
    for name, started_s, ended_s in activity.states:
        if first_s <= started_s < last_s:
            taken_s[name] += ended_s - started_s  # type: ignore[assignment]
    shares = {name: seconds / (last_s - first_s) for name, seconds in sorted(taken_s.items())}
    return {
        "steps": len(starts_s) - 1 - WARM_STEPS, "wall_s": last_s - first_s,
        "wait_share": shares.get("wait:batch", 0.0),
        "idle_share": 1.0 - shares["forward_backward"], "shares": shares,
        "checkpoints": activity.num_checkpoints, "put_off": activity.num_put_off_checkpoints,
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs and steps; writes nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    assert SAMPLES * (PROMPT + LENGTH) >= TOKENS
    with tempfile.TemporaryDirectory(prefix="areal-checkpoint-") as name:
        folder = Path(name)
        prepared = prepare(folder)
        specs = [process_spec(folder / run, prepared) for run in ("cost", "idle")]
        found = {
            "cost": cost(specs[0], 4 if options.quick else 30),
            "idle": idle(specs[1], 10 if options.quick else IDLE_STEPS),
        }
        for spec in specs:
            for file in Path(spec.weight_dir).iterdir():
                file.unlink()
            Path(spec.weight_dir).rmdir()
    print(json.dumps(found, indent=1))
    if not options.quick:
        write("checkpoint", "python -m benchmarks.checkpoint", {"limit": LIMIT, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
