"""Part `gradients`: how close the gradient of each objective, on stale samples, is to the on-policy gradient.

The default objective trains on-policy for MEASURED_AT[-1] steps; the weights of every version are kept. At each version
of MEASURED_AT and for each lag k, the version k steps older samples NUM_BATCHES batches, which every variant gets. No
update follows. The reference is the on-policy gradient with the variant's own advantage and aggregation
(`reference_of`), the mean over REFERENCE_BATCHES batches that the current version samples. `single`: mean cosine of one
batch's gradient with the reference. `mean`: of the mean gradient over the batches, which has less noise. `norm`: norm
of that mean over the norm of the reference. Lag 0 shows what sampling noise alone leaves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_like.wire.messages import BatchSample
from benchmarks.objectives.sampler import Sampler, Weights
from benchmarks.objectives.task import Rows, Task
from benchmarks.objectives.training import Training
from benchmarks.objectives.variants import WITHOUT_GRADIENTS, reference_of, settings_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    measured_at: tuple[int, ...] = (64, 96)
    """Versions of the recorded run."""
    num_batches: int = 4
    reference_batches: int = 16
    lr: float = 1e-5
    """So low that the policy still learns at the last version: a policy that makes no mistakes has no gradient."""


async def measure(model: Path, task: Task, seed: int, lags: Sequence[int], names: Sequence[str], extent: Extent) -> Row:
    """Rows of `version`, `lag` and `variant`, with the accuracy of each version at which it was measured."""
    rows = Rows(task, seed)
    with tempfile.TemporaryDirectory(prefix="objectives-") as folder:
        async with Sampler(model, task, rows, Path(folder) / "weights", seed=seed) as sampler:
            versions = await _record(model, task, sampler, extent)
            watched = Watched(model, task)
            found: list[Row] = []
            accuracy = {}
            for version in extent.measured_at:
                await sampler.load(versions[version])
                accuracy[version] = await sampler.accuracy(200)
                fresh = [await sampler.batch(version) for _ in range(extent.reference_batches)]
                stale = {0: [await sampler.batch(version) for _ in range(extent.num_batches)]}
                for lag in lags:
                    if 0 < lag <= version:
                        await sampler.load(versions[version - lag])
                        stale[lag] = [await sampler.batch(version - lag) for _ in range(extent.num_batches)]
                watched.continue_from(versions, version)
                found += watched.compare(names, fresh, {lag: stale[lag] for lag in lags if lag in stale}, version)
    return {"rows": found, "accuracy": accuracy}


async def _record(model: Path, task: Task, sampler: Sampler, extent: Extent) -> list[Weights]:
    """The weights of every version of an on-policy run."""
    steps = max(extent.measured_at)
    settings = settings_of("decoupled", micro_batch_tokens=4096, optimizer={"lr": extent.lr, "schedule": "constant"})
    training = Training(model, settings, num_steps=steps, groups=task.groups_per_step)
    versions = [training.weights()]
    for version in range(steps):
        await sampler.load(versions[version])
        training.step(await sampler.batch(version), version)
        versions.append(training.weights())
    return versions


class Watched:
    """Gradients of variants and of their references at one policy."""

    def __init__(self, model: Path, task: Task) -> None:
        self._model, self._task = model, task
        self._versions: list[Weights] = []
        self._version = 0

    def continue_from(self, versions: list[Weights], version: int) -> None:
        """All gradients are those at this version; older ones may be asked for log-probs."""
        self._versions, self._version = versions, version

    def compare(
        self, names: Sequence[str], fresh: Sequence[Sequence[BatchSample]],
        stale: dict[int, list[list[BatchSample]]], version: int,
    ) -> list[Row]:  # fmt: skip
        """A row for each lag and variant."""
        references: dict[str, torch.Tensor] = {}
        found = []
        for name in names:
            if name in WITHOUT_GRADIENTS:
                continue
            reference_settings = reference_of(name, micro_batch_tokens=4096)
            key = json.dumps(reference_settings.model_dump(mode="json"), sort_keys=True)
            if key not in references:
                training = self._training(reference_settings)
                references[key] = torch.stack([training.gradient(batch, version) for batch in fresh]).mean(0)
            training = self._training(settings_of(name, micro_batch_tokens=4096))
            for lag, batches in stale.items():
                gradients = [training.gradient(batch, version) for batch in batches]
                found.append({"version": version, "lag": lag, "variant": name, **likeness(gradients, references[key])})
        return found

    def _training(self, settings: Any) -> Training:
        training = Training(self._model, settings, num_steps=1_000, groups=self._task.groups_per_step, is_watched=True)
        if settings.version_logprobs is not None:
            for version in range(self._version + 1):
                training.set_weights(self._versions[version])
                training.remember(version)
        training.set_weights(self._versions[self._version])
        return training


def likeness(gradients: Sequence[torch.Tensor], reference: torch.Tensor) -> dict[str, float]:
    """Cosine of single gradients and of their mean with the reference (0 where one is zero), and the ratio of norms."""
    mean = torch.stack(list(gradients)).mean(0)
    return {
        "single": sum(_cosine(one, reference) for one in gradients) / len(gradients),
        "mean": _cosine(mean, reference),
        "norm": float(mean.norm() / reference.norm()),
    }


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    product = float(one.norm() * other.norm())
    return float(one @ other) / product if product > 0 else 0.0
