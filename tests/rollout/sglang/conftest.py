"""An SGLang that is none: an environment with a fake launcher, behind the real adapter."""

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
import psutil
import pytest
import torch
from transformers import AutoConfig

from areal_like.process import is_alive
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.port import GenerationRequest
from rollout.engine.server.process import ServerSetup
from rollout.engine.sglang.engine import SGLangEngine
from rollout.stop_strings import StopStrings

HERE = Path(__file__).resolve().parent
DEADLINE_S = 120.0
SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--chunked-prefill-size", type=int)
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--schedule-policy", choices=["lpm", "fcfs"])
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
"""


class FakeWorld:
    """A fake environment, a model folder, a store of versions, and engines over them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.children_before = psutil.Process().children()
        self.marks = root / "marks"
        self.marks.mkdir()
        self.model_dir = root / "model"
        AutoConfig.for_model(
            "qwen3", vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            max_position_embeddings=128, architectures=["Qwen3ForCausalLM"],
        ).save_pretrained(self.model_dir)  # fmt: skip
        self.store = WeightStore(root / "weights", "shm", keep=50)
        self.python = self.environment("0.5.23")
        self.reports: list[str] = []

    def environment(self, version: str | None) -> Path:
        """An interpreter in whose world SGLang of this version is installed."""
        bin_dir = self.root / f"env-{version}" / "bin"
        packages = bin_dir.parent / "packages"
        (packages / "sglang" / "srt").mkdir(parents=True)
        bin_dir.mkdir()
        shutil.copy(HERE / "fake_launch_server.py", packages / "sglang" / "launch_server.py")
        (packages / "sglang" / "srt" / "server_args.py").write_text(SERVER_ARGS)
        if version is not None:
            for name, number in (("sglang", version), ("torch", "2.13.0")):
                info = packages / f"{name}-{number}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        python = bin_dir / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        return python

    def publish(self, version: int, value: float = 0.5) -> Path:
        """A version of one small tensor."""
        return self.publish_all(version, {"weight": torch.full((2, 2), value)})

    def publish_all(self, version: int, tensors: dict[str, torch.Tensor]) -> Path:
        """A version of float32 tensors."""
        payload = {}
        for name, tensor in tensors.items():
            data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            payload[name] = TensorBytes("float32", tuple(tensor.shape), data)
        return self.store.publish(version, "l0", payload)

    def make(
        self,
        *,
        attach: str | None = None,
        interruption: Any = "recompute",
        starts_empty: bool = False,
        **sglang: Any,
    ) -> SGLangEngine:
        environment = {"FAKE_MARKS": str(self.marks), **{k: v for k, v in os.environ.items() if k.startswith("FAKE_")}}
        settings = {"control_timeout_s": 5.0, "environment": environment, **sglang}
        return SGLangEngine(
            self.model_dir,
            EngineSettings(
                device="cpu",
                kind="sglang",
                num_slots=4,
                max_context=128,
                python=str(self.python),
                sglang=SGLangSettings(**settings),
            ),
            dtype="float32",
            num_threads=1,
            interruption=interruption,
            setup=ServerSetup("w", self.root / "logs" / "w.log", 1, port=sglang.get("port")),
            attach=attach,
            report=self.reports.append,
            starts_empty=starts_empty,
        )

    @asynccontextmanager
    async def engine(self, load: int | None = 0, **more: Any) -> AsyncIterator[SGLangEngine]:
        engine = self.make(**more)
        await engine.start()
        try:
            if load is not None:
                await engine.load_version(self.publish(load), "recompute")
            yield engine
        finally:
            await engine.close()

    def living_servers(self) -> list[psutil.Process]:
        """Children of this process that live and were not there before the test."""
        children = [child for child in psutil.Process().children() if child not in self.children_before]
        return [child for child in children if is_alive(child)]

    @staticmethod
    def ask(request_id: int = 1, max_new_tokens: int = 20, prefix: Segment | None = None, **more: Any) -> Any:
        sampling = {key: more.pop(key) for key in ("stop_token_ids", "ignore_eos") if key in more}
        if "stop" in more:
            more["stops"] = StopStrings(more.pop("stop"), lambda tokens_R: "".join(chr(60 + one) for one in tokens_R))
        return GenerationRequest(
            request_id=request_id, prompt_P=np.array([5, 6, 7], np.int32), prefix=prefix or Segment.empty(),
            sampling=Sampling(max_new_tokens=max_new_tokens, **sampling), seed=1, **more,
        )  # fmt: skip

    @staticmethod
    def expected(start: int, count: int) -> list[int]:
        """Tokens of answer positions `start` to `start + count`."""
        return [(8 + at) % 50 for at in range(start, start + count)]

    @staticmethod
    def check(segment: Segment, start: int = 0) -> None:
        """No token lost or repeated, and each stamped with the version its log-prob tells."""
        assert segment.tokens_R.tolist() == FakeWorld.expected(start, len(segment))
        values = np.rint(-segment.logprobs_R * 100).astype(int) - 1
        assert values.tolist() == segment.versions_R.tolist()

    @staticmethod
    async def server_info(engine: SGLangEngine) -> dict[str, Any]:
        assert engine._keeper is not None
        return await (await engine._keeper.ready()).client.server_info()

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
def fake_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    return FakeWorld(tmp_path, monkeypatch)
