"""Samples of any version of a policy: the embedded engine in this process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_like.trajectory import NO_VERSION, Segment, Trajectory
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import BatchSample, Sampling
from benchmarks.objectives.task import Rows, Task
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.tokens import stop_ids
from trainer.export import cast
from trainer.weights.publish import tensor_bytes

Weights = dict[str, torch.Tensor]


class Sampler:
    """Loads weights into an engine, and samples or evaluates with them. An asynchronous context manager.

    folder: a new folder for the weights, removed at the end. seed: of all samples.
    """

    def __init__(self, model: Path, task: Task, rows: Rows, folder: Path, *, seed: int) -> None:
        self._task, self._rows, self._seed = task, rows, seed
        self._stop = stop_ids(model, rows.tokenizer)
        self._store = WeightStore(folder, "disk", keep=2)
        self._folder = folder
        settings = EngineSettings(device="cpu", num_slots=128, max_context=task.max_context)
        self._engine = EmbeddedEngine(model, settings, dtype="float32", num_threads=torch.get_num_threads())
        self._num_loads = self._num_groups = 0
        self._num_requests = 0

    async def __aenter__(self) -> Sampler:
        await self._engine.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.close()
        shutil.rmtree(self._folder)

    async def load(self, weights: Weights) -> None:
        """Sample with these weights from now on."""
        tensors = {name: tensor_bytes(cast(tensor, "float32")) for name, tensor in weights.items()}
        path = await asyncio.to_thread(self._store.publish, self._num_loads, "l0", tensors)
        self._num_loads += 1
        await self._engine.load_version(path, "recompute")

    async def batch(self, version: int, num_groups: int | None = None) -> list[BatchSample]:
        """Samples of the next groups of rows, stamped with `version`. Call `load` first."""
        size = self._task.group_size
        drawn = self._rows.train(num_groups or self._task.groups_per_step)
        first_group, self._num_groups = self._num_groups, self._num_groups + len(drawn)
        rows = [row for row in drawn for _ in range(size)]
        sampled = await self._generate(rows, temperature=1.0)
        return [
            BatchSample(
                group_id=first_group + index // size, sample_index=index % size,
                trajectory=_trajectory(self._rows.prompt(row), outcome, version),
                reward=float(self._is_right(row, outcome)),
            )
            for index, (row, outcome) in enumerate(zip(rows, sampled, strict=True))
        ]  # fmt: skip

    async def accuracy(self, count: int) -> float:
        """Share of correct greedy answers to `count` held-out prompts."""
        rows = self._rows.held_out(count)
        sampled = await self._generate(rows, temperature=0.0)
        return sum(self._is_right(row, one) for row, one in zip(rows, sampled, strict=True)) / len(rows)

    def _is_right(self, row: dict[str, Any], outcome: GenerationOutcome) -> bool:
        return self._rows.is_right(row, outcome.segment.tokens_R, outcome.end_reason)

    async def _generate(self, rows: Sequence[dict[str, Any]], *, temperature: float) -> list[GenerationOutcome]:
        sampling = Sampling(temperature=temperature, max_new_tokens=self._task.max_new, stop_token_ids=self._stop)
        requests = []
        for row in rows:
            self._num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=self._num_requests, prompt_P=self._rows.prompt(row), prefix=Segment.empty(),
                    sampling=sampling, seed=self._seed * 1_000_003 + self._num_requests,
                )
            )  # fmt: skip
        return list(await asyncio.gather(*(self._engine.generate(request) for request in requests)))


def _trajectory(prompt_P: np.ndarray, outcome: GenerationOutcome, version: int) -> Trajectory:
    answer, num_prompt = outcome.segment, len(prompt_P)
    return Trajectory(
        np.concatenate([prompt_P, answer.tokens_R]),
        np.arange(num_prompt + len(answer)) >= num_prompt,
        np.concatenate([np.zeros(num_prompt, np.float32), answer.logprobs_R]),
        np.concatenate([np.full(num_prompt, NO_VERSION, np.int32), np.full(len(answer), version, np.int32)]),
        "stop" if outcome.end_reason == "stop" else "length",
    )
