"""An engine that shares its device: memory is truly given back, and generation afterwards is what it was."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BIG = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 1024}
REPOSITORY = Path(__file__).resolve().parents[3]
MEASURE = """
import asyncio, gc, sys
from pathlib import Path
import psutil, torch
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine

def resident_bytes():
    gc.collect()
    return psutil.Process().memory_info().rss

async def main(model, manifest):
    settings = EngineSettings(device="cpu", num_slots=32, max_context=1024)
    engine = EmbeddedEngine(model, settings, dtype="float32", num_threads=1)
    await engine.start()
    await engine.load_version(manifest, "recompute")
    await engine.load_version(manifest, "recompute")  # the spare set is touched too
    cache = engine._core.decoder.cache
    with torch.inference_mode():  # pages that were never written are not resident
        cache._keys.fill_(0.0)
        cache._values.fill_(0.0)
    del cache
    held = resident_bytes()
    num_bytes = await engine.release_memory()
    left = resident_bytes()
    again = await engine.release_memory()
    assert engine.version == -1
    await engine.close()
    print(held, left, num_bytes, again)

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""
"""In a process of its own, as a worker is: how much goes back depends on what a process held and freed before."""


@pytest.mark.processes
def test_release_gives_weights_and_cache_back_to_the_operating_system(kit: Any) -> None:
    bench = kit.bench("qwen3", **BIG)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(bench.root / "model"), str(bench.manifests[0])],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    held, left, num_bytes, again = map(int, done.stdout.split())
    assert num_bytes > 60e6
    assert held - left > 0.9 * num_bytes
    assert again == 0


def test_an_engine_that_starts_empty_takes_memory_with_its_first_version(kit: Any) -> None:
    bench = kit.bench("qwen3")

    async def body() -> Any:
        from rollout.config import EngineSettings
        from rollout.engine.embedded import EmbeddedEngine

        settings = EngineSettings(device="cpu", num_slots=4, max_context=128)
        engine = EmbeddedEngine(bench.root / "model", settings, dtype="float32", num_threads=1, starts_empty=True)
        await engine.start()
        try:
            assert not engine._core.has_memory
            assert engine.capabilities.max_context == 128
            await engine.load_version(bench.manifests[0], "recompute")
            return (await kit.generate_all(engine, [kit.ask(0)]))[0]
        finally:
            await engine.close()

    assert len(kit.run(body()).segment) == 20


def test_answers_after_a_release_are_bit_equal_to_those_without(kit: Any) -> None:
    bench = kit.bench("qwen3")
    requests = [kit.ask(i, prompt_length=3 + i, max_new_tokens=30, seed=i) for i in range(4)]

    async def round_of(engine: Any) -> list[Any]:
        tasks = await kit.start(engine, requests, 3)
        await engine.resume()
        return await asyncio.gather(*tasks)

    async def body() -> tuple[list[Any], list[Any]]:
        async with bench.engine() as engine:
            plain = await round_of(engine)
            await engine.release_memory()
            await engine.load_version(bench.manifests[0], "recompute")
            return plain, await round_of(engine)

    plain, later = kit.run(body())
    for one, other in zip(plain, later, strict=True):
        assert np.array_equal(one.segment.tokens_R, other.segment.tokens_R)
        assert np.array_equal(one.segment.logprobs_R, other.segment.logprobs_R)


def test_what_runs_at_a_release_ends_as_cancelled_with_its_tokens(kit: Any) -> None:
    bench = kit.bench("qwen3")

    async def body() -> Any:
        async with bench.engine() as engine:
            (task,) = await kit.start(engine, [kit.ask(0, max_new_tokens=50)], 5)
            await engine.release_memory()
            await engine.resume()
            return await task

    outcome = kit.run(body())
    assert outcome.end_reason == "cancelled"
    assert len(outcome.segment) == 5


def test_an_engine_has_its_memory_from_the_start_unless_it_starts_empty(kit: Any) -> None:
    async def body() -> None:
        async with kit.bench("qwen3").engine(load=None) as engine:
            assert await engine.release_memory() > 0

    kit.run(body())
