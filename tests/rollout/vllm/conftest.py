"""A vLLM that is none: an environment with a fake launcher, behind the real adapter."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from areal_like.trajectory import Segment
from areal_like.weights.weight_store import TensorBytes, WeightStore
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings, VLLMSettings
from rollout.engine.port import GenerationRequest
from rollout.engine.server.process import ServerSetup
from rollout.engine.vllm.engine import VLLMEngine

HERE = Path(__file__).resolve().parent
DEADLINE_S = 120.0
CLI_ARGS = """
def make_arg_parser(parser):
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--enable-log-requests", action="store_true")
    return parser
"""


class FakeVLLM:
    """A fake environment, a model folder, a store of versions, and engines over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marks = root / "marks"
        self.marks.mkdir()
        self.model_dir = root / "model"
        AutoConfig.for_model(
            "qwen3", vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=32, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
        ).save_pretrained(self.model_dir)  # fmt: skip
        self.store = WeightStore(root / "weights", "shm", keep=50)
        self.python = self.environment("0.32.0+cpu")
        self.reports: list[str] = []

    def environment(self, version: str | None) -> Path:
        """An interpreter in whose world vLLM of this version is installed."""
        packages = self.root / f"env-{version}" / "packages"
        for folder in ("entrypoints/cli", "entrypoints/launchers", "utils"):
            (packages / "vllm" / folder).mkdir(parents=True)
        shutil.copy(HERE / "fake_vllm_main.py", packages / "vllm" / "entrypoints" / "cli" / "main.py")
        (packages / "vllm" / "entrypoints" / "launchers" / "cli_args.py").write_text(CLI_ARGS)
        parser = "from argparse import ArgumentParser as FlexibleArgumentParser\n"
        (packages / "vllm" / "utils" / "argparse_utils.py").write_text(parser)
        if version is not None:
            info = packages / f"vllm-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        python = packages.parent / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        return python

    def publish(self, version: int, value: float = 0.5) -> Path:
        """A version of one small tensor."""
        tensor = torch.full((2, 2), value)
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return self.store.publish(version, "l0", {"weight": TensorBytes("float32", (2, 2), data)})

    def make(self, *, interruption: Any = "recompute", **vllm: Any) -> VLLMEngine:
        """An engine, not started."""
        environment = {"FAKE_MARKS": str(self.marks), **{k: v for k, v in os.environ.items() if k.startswith("FAKE_")}}
        settings = VLLMSettings(**{"control_timeout_s": 5.0, "environment": environment, **vllm})
        return VLLMEngine(
            self.model_dir,
            EngineSettings(
                device="cpu", kind="vllm", num_slots=4, max_context=128, python=str(self.python), vllm=settings
            ),
            dtype="float32",
            num_threads=1,
            interruption=interruption,
            setup=ServerSetup("w", self.root / "logs" / "w.log", 1),
            report=self.reports.append,
        )

    @asynccontextmanager
    async def engine(self, **more: Any) -> AsyncIterator[VLLMEngine]:
        """A started engine with version 0."""
        engine = self.make(**more)
        try:
            await engine.start()
            await engine.load_version(self.publish(0), "recompute")
            yield engine
        finally:
            await engine.close()

    @staticmethod
    def ask(request_id: int = 1, max_new_tokens: int = 60, **more: Any) -> GenerationRequest:
        sampling = {key: more.pop(key) for key in ("stop_token_ids", "ignore_eos", "temperature") if key in more}
        return GenerationRequest(
            request_id=request_id, prompt_P=np.array([5, 6, 7], np.int32), prefix=Segment.empty(),
            sampling=Sampling(max_new_tokens=max_new_tokens, **sampling), seed=1, **more,
        )  # fmt: skip

    @staticmethod
    def check(segment: Segment) -> None:
        """No token lost or repeated, and each stamped with the version its log-prob tells."""
        assert segment.tokens_R.tolist() == [(8 + at) % 50 for at in range(len(segment))]
        values = np.rint(-segment.logprobs_R * 100).astype(int) - 1
        assert values.tolist() == segment.versions_R.tolist()

    async def begin(self, engine: VLLMEngine, count: int = 3, length: int = 60) -> list[asyncio.Task[Any]]:
        """Requests that generate, each with tokens."""
        tasks = [asyncio.ensure_future(engine.generate(self.ask(n, length))) for n in range(count)]
        await self.until(lambda: all(len(engine.progress().get(n, ())) for n in range(count)))
        return tasks

    @staticmethod
    async def state(engine: VLLMEngine) -> dict[str, Any]:
        """What the server has been asked."""
        return await (await engine._started().keeper.ready()).client._get("/version")

    @staticmethod
    async def until(condition: Any) -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)

    @staticmethod
    def run(body: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(DEADLINE_S):
                return await body

        return asyncio.run(bounded())


@pytest.fixture
def fake_vllm(tmp_path: Path) -> FakeVLLM:
    return FakeVLLM(tmp_path)
