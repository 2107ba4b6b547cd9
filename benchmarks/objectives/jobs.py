"""The jobs of a comparison, in processes of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Measured
from benchmarks.objectives.curves import measure as measure_curve
from benchmarks.objectives.gradients import Extent
from benchmarks.objectives.gradients import measure as measure_gradients
from benchmarks.objectives.task import Task, starting_model

QUICK_START = ("warm_start.sft.steps=20",)
Row = dict[str, Any]


def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that compute with one thread each."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


class Jobs:
    """Runs in processes of their own; rows that an earlier call measured are taken."""

    def __init__(self, pool: ProcessPoolExecutor, measured: Measured, runs_dir: Path, *, is_quick: bool) -> None:
        self._pool, self._measured, self._runs_dir, self._is_quick = pool, measured, runs_dir, is_quick
        runs_dir.mkdir(parents=True, exist_ok=True)

    def rows(self, keys: Sequence[Sequence[object]], work: Sequence[Callable[[], Row]]) -> list[Row]:
        """One row for each key, in order, each printed when it is there."""
        started = {
            index: self._pool.submit(one)
            for index, (key, one) in enumerate(zip(keys, work, strict=True))
            if not self._measured.has(key)
        }
        found = []
        for index, key in enumerate(keys):
            future = started.get(index)
            found.append(self._measured.row(key, future.result if future else dict))
            print("  ".join(map(str, key)), _short(found[-1]), flush=True)
        return found

    def start(self, task: Task, seed: int) -> Path:
        """The starting model of a seed."""
        return starting_model(task, seed, self._runs_dir, QUICK_START if self._is_quick else ())


def gradients(model: Path, task: Task, seed: int, lags: Sequence[int], names: Sequence[str], extent: Extent) -> Row:
    """Measure gradients of one seed, in a process of the pool."""
    return asyncio.run(measure_gradients(model, task, seed, lags, names, extent))


def curve(model: Path, task: Task, seed: int, lag: int, name: str, rate: str, steps: int) -> Row:
    """Measure one learning curve, in a process of the pool."""
    return asyncio.run(measure_curve(model, task, seed, lag, name, lr=float(rate), num_steps=steps))


def _short(row: Row) -> str:
    return f"accuracy {row['accuracy']:.3f}" if isinstance(row.get("accuracy"), float) else ""
