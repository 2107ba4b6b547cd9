"""Part `curves`: what each objective learns where every sample is exactly k versions old.

Step n trains on samples of version max(0, n - 1 - k). The first k + 1 steps so train on samples of the starting model,
which is what a queue of k steps does. Everything else is as in `benchmarks.staleness`: four mini-batches a step, a
constant learning rate, greedy accuracy on held-out prompts.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.objectives.sampler import Sampler, Weights
from benchmarks.objectives.task import Rows, Task
from benchmarks.objectives.training import Training
from benchmarks.objectives.variants import settings_of

EVAL_PROMPTS = 300
MINI_BATCHES = 4
SHOWN = ("ess", "clip_fraction", "kl_behaviour_proximal", "staleness_mean", "grad_norm", "entropy")
"""Metrics of the steps whose mean is kept, where there are any."""
Row = dict[str, Any]


async def measure(
    model: Path, task: Task, seed: int, lag: int, name: str, *, lr: float, num_steps: int, evals: int = 6
) -> Row:
    """Train once. `evals`: number of evaluations, evenly spaced, the last one after the last step."""
    settings = settings_of(
        name, micro_batch_tokens=4096, mini_batches=min(MINI_BATCHES, task.groups_per_step),
        optimizer={"lr": lr, "schedule": "constant", "warmup_steps": 0},
    )  # fmt: skip
    training = Training(model, settings, num_steps=num_steps, groups=task.groups_per_step)
    every = max(1, num_steps // evals)
    curve: list[tuple[int, float]] = []
    seen: list[dict[str, float]] = []
    versions: deque[tuple[int, Weights]] = deque([(0, training.weights())], maxlen=lag + 1)
    training.remember(0)
    rows = Rows(task, seed)
    with tempfile.TemporaryDirectory(prefix="objectives-") as folder:
        async with Sampler(model, task, rows, Path(folder) / "weights", seed=seed) as sampler:
            loaded = -1
            for step in range(1, num_steps + 1):
                version, weights = versions[0]
                if version != loaded:
                    await sampler.load(weights)
                    loaded = version
                seen.append(training.step(await sampler.batch(version), step - 1))
                training.remember(step)
                versions.append((step, training.weights()))
                if step % every == 0 or step == num_steps:
                    await sampler.load(versions[-1][1])
                    loaded = step
                    curve.append((step, await sampler.accuracy(EVAL_PROMPTS)))
    return {"curve": curve, "accuracy": curve[-1][1], **means(seen)}


def means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means of the metrics SHOWN over the steps."""
    return {key: sum(step[key] for step in steps) / len(steps) for key in SHOWN if all(key in step for step in steps)}
