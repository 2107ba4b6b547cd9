"""Part `swap`: transfer of a new version from the trainer's parameters into a generating engine, by a file.

The file is stored in shared memory (`shm`, with both interruptions) or, as safetensors, in the temporary folder
(`disk`, only with `recompute`: the treatment of caches does not depend on where the file was). Streams and process
groups, whose trainer is a separate process, are measured by benchmarks.weight_transfer (--device cuda --shape 4B).

The real publisher, the real store and the real embedded engine with all slots busy. `publish_s`: from the parameters on
the device to a file with checksums, cast to the published type; a file on disk is written as in a run, without waiting
for the page cache to be flushed. `stage_s`: from the file to spare weights during generation, checksums included.
`pause_ms`: duration of the pause of generation reported by the engine; `gap_ms`: the longest time without a new step,
observed from outside while the version was staged and swapped (polled every 2 ms).
`staging_share`: tokens per second while the version was staged, over those before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import StoreKind
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from benchmarks.gpu_suite import arithmetic, measure
from benchmarks.gpu_suite.case import Context, Cut, Skip
from benchmarks.gpu_suite.shapes import SHAPES, Shape, config_of, random_model
from rollout.config import EngineSettings, Interruption
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationRequest
from trainer.weights.publish import publish_version

POLL_S = 0.002
KEEP = 2
ROWS: tuple[tuple[StoreKind, Interruption], ...] = (("shm", "recompute"), ("shm", "keep_kv"), ("disk", "recompute"))
"""Measurements of each model, in this order."""
DISK_TIMES = 2.0
"""Time reserved for versions on disk, relative to the time of as many versions in shared memory."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the concurrent generation."""

    num_slots: int
    prompt: int
    max_context: int
    repeats: int
    settle_s: float


def run(context: Context) -> None:
    """Measure every model with each kind of file."""
    names = ["tiny"] if context.is_tiny else ["0.6B"] if context.is_quick else ["0.6B", "1.7B", "4B"]
    sizes = Sizes(4, 8, 64, 1, 0.2) if context.is_tiny else Sizes(64, 256, 2048, 2 if context.is_quick else 3, 1.5)
    for name in names:
        needs_s = 3 if context.is_tiny else 25
        if context.left_s < needs_s:
            reason = f"{max(context.left_s, 0):.0f} s left, about {needs_s} s needed"
            context.write({"table": "swap", "case": name, "status": "cut", "reason": reason})
            continue
        context.section("swap", name, partial(_run_model, context, SHAPES[name], sizes))


def _run_model(context: Context, shape: Shape, sizes: Sizes) -> None:
    asyncio.run(_model(context, shape, sizes))


async def _model(context: Context, shape: Shape, sizes: Sizes) -> None:
    device = torch.device(context.device)
    dtype = "float32" if context.is_tiny else "bfloat16"
    item_bytes = 4 if context.is_tiny else 2
    engine_bytes = arithmetic.engine_memory_bytes(shape, sizes.num_slots, sizes.max_context, item_bytes)
    measure.require_memory(engine_bytes + 6 * shape.parameters + (3 << 30), device)
    _require_room(context.shared_memory, (KEEP + 1) * shape.parameters * item_bytes, "shared memory")
    config = config_of(shape)
    folder = context.scratch / f"model-{shape.name}"
    config.save_pretrained(folder)
    model = random_model(config, device)
    settings = EngineSettings(num_slots=sizes.num_slots, max_context=sizes.max_context, device=context.device)
    engine = EmbeddedEngine(folder, settings, dtype=dtype, num_threads=1)
    await engine.start()
    roots = {"shm": context.shared_memory, "disk": context.scratch}
    stores = {kind: WeightStore(roots[kind] / f"versions-{shape.name}", kind, KEEP) for kind, _ in ROWS}
    trip = Trip(context, shape, sizes, model, stores, engine, dtype)
    try:
        await trip.first()
        async with Generation(engine, shape, sizes):
            await asyncio.sleep(sizes.settle_s)
            for kind, interruption in ROWS:
                await trip.measure(kind, interruption)
    finally:
        await engine.close()
        for store in stores.values():
            store.close(remove=True)


def _require_room(folder: Path, need_bytes: int, where: str) -> None:
    free = shutil.disk_usage(folder).free
    if need_bytes > free:
        raise Skip(f"needs {need_bytes / measure.GIB:.1f} GiB of {where}, {free / measure.GIB:.1f} GiB are free")


class Generation:
    """Context manager that keeps every slot busy: whenever an answer ends, a new one begins."""

    def __init__(self, engine: EmbeddedEngine, shape: Shape, sizes: Sizes) -> None:
        self._engine, self._shape, self._sizes = engine, shape, sizes
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Generation:
        self._tasks = [asyncio.create_task(self._answers()) for _ in range(self._sizes.num_slots)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _answers(self) -> None:
        while True:
            number = next(self._ids)
            prompt = np.random.default_rng(number).integers(0, self._shape.vocabulary, self._sizes.prompt)
            request = GenerationRequest(
                request_id=number, prompt_P=prompt.astype(np.int32), prefix=Segment.empty(),
                sampling=Sampling(max_new_tokens=self._sizes.max_context), seed=number,
            )  # fmt: skip
            await self._engine.generate(request)


@dataclass
class Trip:
    """Transfers versions of one model, one after another, from the parameters to the engine."""

    context: Context
    shape: Shape
    sizes: Sizes
    model: Any
    stores: Mapping[StoreKind, WeightStore]
    engine: EmbeddedEngine
    dtype: Any
    version: int = -1
    _took_s: float = 0.0
    """Seconds for the versions of the last row."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        return self.shape.parameters * (4 if self.dtype == "float32" else 2)

    def publish(self, kind: StoreKind) -> tuple[Path, float]:
        """Publish the next version; returns its manifest and the seconds it took."""
        self.version += 1
        start_s = time.perf_counter()
        manifest = publish_version(self.stores[kind], self.model, self.version, "suite", dtype=self.dtype)
        return manifest, time.perf_counter() - start_s

    async def first(self) -> None:
        """Load version 0, so that the engine can generate."""
        manifest, _ = await asyncio.to_thread(self.publish, "shm")
        await self.engine.load_version(manifest, "recompute")

    async def measure(self, kind: StoreKind, interruption: Interruption) -> None:
        """Measure several versions with one kind of file and one interruption, and write a row of medians."""
        outcomes = []
        start_s = time.perf_counter()
        try:
            if kind == "disk":
                self._require_disk()
            for _ in range(self.sizes.repeats):
                outcomes.append(await self._once(kind, interruption))
                await asyncio.sleep(self.sizes.settle_s / 2)
        except Exception as error:  # a fault boundary, as for every case: the row below has the error
            self._write(kind, interruption, error, outcomes)
        else:
            self._write(kind, interruption, None, outcomes)
        self._took_s = time.perf_counter() - start_s

    def _require_disk(self) -> None:
        """Raise Skip if there is no space, and Cut if there is no time, for versions on disk."""
        _require_room(self.context.scratch, (KEEP + 1) * self.num_bytes, "disk")
        if self.context.left_s < (needs_s := DISK_TIMES * self._took_s):
            raise Cut(f"{max(self.context.left_s, 0):.0f} s left, about {needs_s:.0f} s needed")

    def _write(
        self, kind: StoreKind, interruption: str, error: Exception | None, outcomes: list[dict[str, float]]
    ) -> None:
        def row() -> Mapping[str, Any]:
            if error is not None:
                raise error
            medians = {key: statistics.median(outcome[key] for outcome in outcomes) for key in outcomes[0]}
            return {
                "model": self.shape.name, "kind": kind, "interruption": interruption, "mb": self.num_bytes / 1e6,
                **medians, "publish_gb_per_s": self.num_bytes / medians["publish_s"] / 1e9,
                "stage_gb_per_s": self.num_bytes / medians["stage_s"] / 1e9,
            }  # fmt: skip

        self.context.run("swap", f"{self.shape.name}, {kind}: {interruption}", float("-inf"), row)

    async def _once(self, kind: StoreKind, interruption: Interruption) -> dict[str, float]:
        before = await self._tokens_per_s(self.sizes.settle_s)
        manifest, publish_s = await asyncio.to_thread(self.publish, kind)
        watch = asyncio.create_task(self._longest_gap())
        start_s, tokens = time.perf_counter(), self.engine.counters()["tokens"]
        report = await self.engine.load_version(manifest, interruption)
        wall_s = time.perf_counter() - start_s
        rate = (self.engine.counters()["tokens"] - tokens) / max(wall_s - report.pause_s, 1e-9)
        await asyncio.sleep(0.05)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        if self.engine.version != self.version:
            raise AssertionError(f"the engine is at version {self.engine.version}, not {self.version}")
        return {
            "publish_s": publish_s, "stage_s": report.stage_s, "pause_ms": 1e3 * report.pause_s,
            "gap_ms": 1e3 * self._gap_s, "tokens_per_s": before, "staging_share": rate / before,
        }  # fmt: skip

    async def _tokens_per_s(self, seconds: float) -> float:
        start_s, tokens = time.perf_counter(), self.engine.counters()["tokens"]
        await asyncio.sleep(seconds)
        return (self.engine.counters()["tokens"] - tokens) / (time.perf_counter() - start_s)

    async def _longest_gap(self) -> None:
        self._gap_s, steps, since_s = 0.0, self.engine.counters()["steps"], time.perf_counter()
        while True:
            await asyncio.sleep(POLL_S)
            now_s, now = time.perf_counter(), self.engine.counters()["steps"]
            self._gap_s = max(self._gap_s, now_s - since_s)
            if now != steps:
                steps, since_s = now, now_s
