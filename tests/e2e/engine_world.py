"""The tiny model of sglang_world.py behind any engine, so that one set of tests can be run against each.

Answers are long instead of slow: not every engine can be slowed down.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sglang_world import CONFIG, FORKED, World, ask, start_all, until

from areal_like.trajectory import Segment
from rollout.config import EngineSettings, SGLangSettings, VLLMSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import Engine, GenerationOutcome, GenerationRequest
from rollout.engine.server.process import ServerSetup
from rollout.engine.sglang.engine import SGLangEngine
from rollout.engine.vllm.engine import VLLMEngine

CONTEXT, SLOTS = 640, 16
LONG, PROMPT = 500, 40
"""Tokens of an answer that is to be interrupted, and of its prompt."""
MIN_TOKENS = 5000
"""Of answers that span versions, for each way of interrupting them."""
NUM_VERSIONS = 60
ENGINES = ("embedded", "sglang", "vllm")
SERVER_LIMITS: dict[str, Any] = {"control_timeout_s": 600.0, "stall_timeout_s": 600.0, "load_timeout_s": 600.0}


class EngineWorld(World):
    """Versions of a tiny model, and one engine of the given kind over them. Loads may be of any mode."""

    def __init__(self, root: Path, kind: str) -> None:
        # vLLM has no attention for narrower heads on CPUs.
        super().__init__(root, CONFIG | {"head_dim": 32, "max_position_embeddings": CONTEXT}, num_versions=NUM_VERSIONS)
        self.kind = kind
        self.engine: Engine = None  # type: ignore[assignment]
        self.reports: list[str] = []

    def make_engine(self) -> Engine:
        """The engine, not started."""
        base: dict[str, Any] = {"device": "cpu", "kind": self.kind, "num_slots": SLOTS, "max_context": CONTEXT}
        setup = ServerSetup("w", self.root / "logs" / "w.log", 1)
        shared: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
        served: dict[str, Any] = {**shared, "interruption": "keep_kv", "setup": setup, "report": self.reports.append}
        if self.kind == "embedded":
            return EmbeddedEngine(self.model_dir, EngineSettings(**base), **shared)
        if self.kind == "sglang":
            # A tenth, its default on CPUs, is too little where other processes take memory while it starts.
            sglang = SGLangSettings(checksums=True, environment=FORKED, memory_fraction=0.3, **SERVER_LIMITS)
            python = os.environ["AREAL_LIKE_SGLANG_PYTHON"]
            return SGLangEngine(self.model_dir, EngineSettings(**base, python=python, sglang=sglang), **served)
        vllm = VLLMSettings(probe=True, environment=FORKED, **SERVER_LIMITS)
        python = os.environ["AREAL_LIKE_VLLM_PYTHON"]
        return VLLMEngine(self.model_dir, EngineSettings(**base, python=python, vllm=vllm), **served)

    def started(self) -> Iterator[EngineWorld]:
        """This world with a running engine that has loaded version 0; its engine is closed afterwards."""
        self.engine = self.make_engine()

        async def begin() -> None:
            await self.engine.start()
            await self.load(0)

        try:
            self.run(begin)
            yield self
        finally:
            self.runner.run(self.engine.close())
            self.runner.close()

    async def client(self) -> Any:
        """The client of the engine's server."""
        if isinstance(self.engine, VLLMEngine):
            return (await self.engine._started().keeper.ready()).client
        assert isinstance(self.engine, SGLangEngine)
        return (await self.engine._started()[0].ready()).client

    async def load_next(self, interruption: str) -> int:
        """Load the version after the one in use."""
        version = self.engine.version + 1
        report = await self.load(version, interruption)
        assert report.version == self.engine.version == version
        return version

    async def generated(self, count: int, tasks: list[asyncio.Task[GenerationOutcome]]) -> None:
        """Return once the engine has sampled that many further tokens, whether they are shown yet or not, or once the
        answers have ended."""
        seen = self.engine.counters()["tokens"]
        await until(lambda: self.engine.counters()["tokens"] >= seen + count or all(task.done() for task in tasks))

    async def interrupted(self, first: int, interruption: str) -> list[tuple[GenerationRequest, GenerationOutcome]]:
        """Answers under two swaps, with at least MIN_TOKENS tokens in those that span versions. How many do depends on
        how fast the machine is, so more are made until there are enough."""
        found: list[tuple[GenerationRequest, GenerationOutcome]] = []
        while (
            sum(len(one.segment) for _, one in found if one.segment.versions_R[0] < one.segment.last_version)
            < MIN_TOKENS
        ):
            numbers = range(first + len(found), first + len(found) + SLOTS)
            requests = [ask(n, max_new_tokens=LONG, prompt_length=PROMPT) for n in numbers]
            tasks = await start_all(self, requests)
            for _ in range(2):
                await self.load_next(interruption)
                await self.generated(SLOTS * 20, tasks)
            found += zip(requests, await asyncio.gather(*tasks), strict=True)
        return found

    def kept_error_nats(self, request: GenerationRequest, segment: Segment) -> float:
        """As `error_nats`, for an answer that kept its keys and values over swaps."""
        versions, counts = np.unique(segment.versions_R, return_counts=True)
        tokens = np.concatenate((request.prompt_P, segment.tokens_R))
        spans = list(zip(versions.tolist(), counts.tolist(), strict=True))
        said = self.kept_logprobs(spans, tokens, len(request.prompt_P), request.sampling.temperature)
        return float(np.abs(said - segment.logprobs_R).max())


def num_spanning(answer: tuple[GenerationRequest, GenerationOutcome]) -> int:
    """The tokens of an answer if they are of several versions, else 0."""
    segment = answer[1].segment
    return len(segment) if segment.versions_R[0] < segment.last_version else 0
