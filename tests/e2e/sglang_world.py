"""Versions of a tiny Qwen3, the real SGLang server behind the adapter, and transformers as the oracle of both."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config import ModelSettings
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall
from areal_like.weights.weight_store import WeightManifest, WeightStore, map_payload
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.engine.server.process import ServerSetup
from rollout.engine.sglang.client import SGLangClient
from rollout.engine.sglang.engine import SGLangEngine
from trainer.adapter import PolicyAdapter
from trainer.config import LoraSettings
from trainer.export import named_tensors
from trainer.model.lora import is_adapters
from trainer.model.model import load_causal_lm
from trainer.weights.group_root import GroupRoot

VOCAB, CONTEXT, SLOTS = 48, 160, 16
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
TOLERANCE_NATS, APART_NATS = 1e-4, 0.1
PATIENCE_S = 1200.0
BUCKET_BYTES = 4096
"""Of weights that a process group brings."""
FORKED = {"PYTHONPATH": str(Path(__file__).parent / "forked_server")}
"""Variables of a server that starts in half the processor time; what differs: forked_server/sitecustomize.py."""
SLOW_S = 0.02
"""Added to every forward pass of the server, so that answers outlast what the tests do to it."""


class World:
    """Versions of a tiny model, their manifests, and a loop that outlives single tests."""

    def __init__(
        self, root: Path, config: dict[str, Any] = CONFIG, *, model_type: str = "qwen3", num_versions: int = 12
    ) -> None:
        self.root = root
        self.config = AutoConfig.for_model(model_type, **config)
        self.model_dir = root / "model"
        self.config.save_pretrained(self.model_dir)
        self.stores = {kind: WeightStore(root / kind, kind, keep=100) for kind in ("shm", "disk")}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # as initialised, a tiny model is nearly uniform whatever is done to it
                parameter.mul_(6.0)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        self.models = {0: model}
        for version in range(1, num_versions):
            other = copy.deepcopy(model)
            generator = torch.Generator().manual_seed(version)
            for parameter in other.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            self.models[version] = other
        self.manifests = {version: self.publish(version) for version in self.models}
        self.runner = asyncio.Runner()
        self.engine: SGLangEngine = None  # type: ignore[assignment]

    def publish(self, version: int, **replaced: torch.Tensor) -> Path:
        """Shared-memory form for even versions, safetensors for odd ones."""
        payload = {}
        for name, tensor in (dict(self.models[version].named_parameters()) | replaced).items():
            flat = tensor.detach().contiguous()
            data = memoryview(flat.reshape(-1).view(torch.uint8).numpy().data)
            payload[name] = TensorBytes("float32", tuple(flat.shape), data)
        return self.stores["disk" if version % 2 else "shm"].publish(version, "l0", payload)

    def publish_adapter(self, version: int, base: int, publish: Literal["merged", "adapter"], folder: Path) -> Path:
        """The trainer's publication of a random adapter on another version, whose model goes to `folder`/base. The
        version itself is transformers with peft, which reads the trainer's files of the adapter."""
        from peft import PeftModel

        self.models[base].save_pretrained(folder / "base")
        policy = load_causal_lm(folder / "base")
        settings = LoraSettings(rank=4, alpha=8.0, publish=publish)
        spec: Any = SimpleNamespace(model=ModelSettings(path=str(folder / "base")), seed=1, resume_from=None)
        adapter = PolicyAdapter.add(policy, settings, spec)
        generator = torch.Generator().manual_seed(version)
        for name, parameter in policy.named_parameters():
            if is_adapters(name):
                parameter.data.normal_(std=0.2, generator=generator)
        weights = named_tensors(policy)
        (folder / "adapter").mkdir()
        adapter.files(policy).write(folder / "adapter", weights)
        self.models[version] = PeftModel.from_pretrained(
            load_causal_lm(folder / "base"), str(folder / "adapter")
        ).eval()
        return self.stores["shm"].publish(version, "l0", *adapter.version_of(weights))

    def published(self, version: int) -> tuple[WeightManifest, memoryview]:
        """Manifest and payload of a version in shared memory or on disk."""
        path = self.manifests[version]
        manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
        return manifest, map_payload(path.with_name(manifest.payload), manifest.num_bytes)

    def make(self, settings: EngineSettings | None = None, **more: Any) -> SGLangEngine:
        return SGLangEngine(
            self.model_dir,
            settings or self.settings(),
            dtype="float32",
            num_threads=1,
            interruption="keep_kv",
            setup=ServerSetup("w", self.root / "logs" / "w-sglang.log", 1),
            **more,
        )

    def settings(self, **more: Any) -> EngineSettings:
        sglang = {
            "control_timeout_s": 300.0, "stall_timeout_s": 300.0, "checksums": True, "environment": FORKED, **more,
        }  # fmt: skip
        return EngineSettings(
            device="cpu",
            kind="sglang",
            num_slots=SLOTS,
            max_context=CONTEXT,
            python=os.environ["AREAL_LIKE_SGLANG_PYTHON"],
            sglang=SGLangSettings(**sglang),
        )

    def started(self) -> Iterator[World]:
        """This world with a running engine that has loaded version 0; its engine is closed afterwards."""
        self.engine = self.make()

        async def begin() -> None:
            await self.engine.start()
            await self.load(0)

        self.run(begin)
        yield self
        self.runner.run(self.engine.close())
        self.runner.close()

    @asynccontextmanager
    async def embedded(self) -> AsyncIterator[EmbeddedEngine]:
        """Our own engine, which has loaded no version yet."""
        settings = EngineSettings(device="cpu", num_slots=64, max_context=CONTEXT)
        engine = EmbeddedEngine(self.model_dir, settings, dtype="float32", num_threads=1)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def run(self, body: Callable[[], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await body()

        return self.runner.run(bounded())

    async def slow(self, sleep_s: float | None) -> None:
        live = await self.engine._keeper.ready()
        await live.client._post("/slow_down", {"forward_sleep_time": sleep_s})

    async def load(self, version: int, interruption: str = "recompute") -> Any:
        return await self.engine.load_version(self.manifests[version], interruption)

    # ------------------------------------------------------------ oracle

    @torch.inference_mode()
    def logprobs(self, version: int, tokens: np.ndarray, start: int, temperature: float) -> np.ndarray:
        """Of tokens[start:], from one plain forward pass."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits = self.models[version](input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0].numpy()

    @torch.inference_mode()
    def kept_logprobs(self, segments: list[tuple[int, int]], tokens: np.ndarray, start: int, temperature: float) -> Any:
        """Of tokens[start:], each span of (version, length) computed over the keys and values of those before it."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        cache, done, found, end = None, 0, [], start
        for version, length in segments:
            end += length
            out = self.models[version](input_ids=ids[:, done : end - 1], past_key_values=cache, use_cache=True)
            found.append(out.logits[0])
            cache, done = out.past_key_values, end - 1
        logits = torch.cat(found)[start - 1 :] / temperature
        return logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0].numpy()

    def error_nats(self, request: GenerationRequest, segment: Segment) -> float:
        """Largest difference between recorded log-probs and those of the stamped versions."""
        tokens = np.concatenate((request.prompt_P, request.prefix.tokens_R, segment.tokens_R))
        start = len(request.prompt_P) + len(request.prefix)
        said = {
            version: self.logprobs(version, tokens, start, request.sampling.temperature)
            for version in np.unique(segment.versions_R).tolist()
        }
        expected = np.array([said[version][at] for at, version in enumerate(segment.versions_R.tolist())])
        return float(np.abs(expected - segment.logprobs_R).max())

    def assert_exact(self, request: GenerationRequest, segment: Segment, versions: set[int]) -> None:
        """The tokens are stamped with just these versions, and their log-probs are those of the versions."""
        assert set(segment.versions_R.tolist()) == versions
        assert self.error_nats(request, segment) <= TOLERANCE_NATS

    def is_far(self, request: GenerationRequest, segment: Segment) -> bool:
        """It spans versions, and they are further apart than the tolerance could hide."""
        versions = np.unique(segment.versions_R).tolist()
        tokens = np.concatenate((request.prompt_P, segment.tokens_R))
        ends = [self.logprobs(v, tokens, len(request.prompt_P), 1.0) for v in (versions[0], versions[-1])]
        return len(versions) > 1 and float(np.abs(ends[0] - ends[1]).mean()) > APART_NATS


def ask(request_id: int, max_new_tokens: int = 60, prompt_length: int = 12, **more: Any) -> GenerationRequest:
    prompt = np.random.default_rng(more.pop("prompt_seed", request_id)).integers(0, VOCAB, prompt_length)
    sampling = {"temperature": 0.9, **more.pop("sampling", {})}
    return GenerationRequest(
        request_id=request_id,
        prompt_P=prompt.astype(np.int32),
        prefix=more.pop("prefix", Segment.empty()),
        sampling=Sampling(max_new_tokens=max_new_tokens, **sampling),
        seed=request_id,
        **more,
    )


async def start_all(world: World, requests: list[GenerationRequest]) -> list[asyncio.Task[GenerationOutcome]]:
    """All of them generating, each with tokens."""
    tasks = [asyncio.ensure_future(world.engine.generate(request)) for request in requests]
    await until(lambda: all(len(world.engine.progress().get(request.request_id, ())) for request in requests))
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.01)


async def all_grow(world: World, count: int) -> None:
    """Every running answer has got more than `count` further tokens."""
    seen = {number: len(segment) for number, segment in world.engine.progress().items()}
    await until(lambda: all(len(one) > seen[number] + count for number, one in world.engine.progress().items()))


def group_call(root: GroupRoot, manifest: WeightManifest, *, is_new: bool) -> GroupCall:
    """What asks a server to take a version from `root`."""
    return GroupCall(
        version=manifest.version, lineage="l0", group=root.name, is_new=is_new, host=root.host, port=root.port,
        rank=1, size=root.size, backend="gloo", bucket_bytes=BUCKET_BYTES, deadline_s=120.0,
        manifest=msgspec.json.encode(manifest),
    )  # fmt: skip


def assert_whole(request: GenerationRequest, outcome: GenerationOutcome, length: int = 60) -> None:
    assert outcome.end_reason == "length"
    assert len(outcome.segment) == length
    assert (np.diff(outcome.segment.versions_R) >= 0).all()


OPEN_ROUTES = ("/health", "/ready", "/metrics")
"""SGLang wants no key for these."""


async def routes_for_strangers(client: SGLangClient) -> dict[str, list[int]]:
    """What a caller without the key is answered, by path of a route that should want one, for each of its methods."""
    async with client._session.get(f"{client.url}/openapi.json") as response:
        assert response.status == 200
        paths = (await response.json())["paths"]
    found: dict[str, list[int]] = {path: [] for path in paths if not path.startswith(OPEN_ROUTES)}
    async with aiohttp.ClientSession() as stranger:
        for path, statuses in found.items():
            for method in paths[path]:
                async with stranger.request(method, client.url + path.replace("{", "").replace("}", "")) as response:
                    statuses.append(response.status)
    return found
