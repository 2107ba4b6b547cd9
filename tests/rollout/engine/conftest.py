"""Tiny models made from configs, published as versions, behind a running engine; and what transformers says of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import Sampling
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.port import GenerationOutcome, GenerationRequest

VOCAB = 24
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
DEADLINE_S = 300.0


def publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    """Write tensors as a version."""
    payload = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous()
        data = memoryview(flat.view(torch.uint8).numpy().reshape(-1))
        payload[name] = TensorBytes(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), data)
    return store.publish(version, "l0", payload)


class Bench:
    """One architecture: its folder, its versions (models and manifests), engines over it."""

    def __init__(self, root: Path, model_type: str, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.root, self.dtype = root, dtype
        self.config = AutoConfig.for_model(model_type, **config)
        self.config.save_pretrained(root / "model")
        self.store = WeightStore(root / "weights", "disk", keep=100)
        self.models: dict[Any, torch.nn.Module] = {}
        """By version; with an adapter by its name."""
        self.adapters: dict[str, Path] = {}
        self.manifests: dict[int, Path] = {}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # as initialised, a tiny model is nearly uniform whatever is done to it
                parameter.mul_(6.0)
            elif "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        self.add(0, model)

    def add(self, version: int, model: torch.nn.Module) -> Path:
        """Publish a model as a version."""
        self.models[version] = model
        self.manifests[version] = publish(self.store, version, dict(model.named_parameters()))
        return self.manifests[version]

    def add_other(self, version: int, noise: float = 0.1) -> Path:
        """Publish version 0 with noise on it."""
        model = copy.deepcopy(self.models[0])
        generator = torch.Generator().manual_seed(version)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * noise)
        return self.add(version, model)

    def add_adapter(self, name: str, seed: int, **config: Any) -> Path:
        """Make an adapter on version 0 with peft, and save it."""
        torch.manual_seed(seed)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **config}
        made = peft.get_peft_model(copy.deepcopy(self.models[0]), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        made.save_pretrained(self.root / name)
        self.models[name] = made.eval().requires_grad_(False)
        self.adapters[name] = self.root / name
        return self.adapters[name]

    @asynccontextmanager
    async def engine(
        self, num_slots: int = 4, max_context: int = 128, load: int | None = 0, **settings: Any
    ) -> AsyncIterator[EmbeddedEngine]:
        """A started engine with a version loaded."""
        engine = EmbeddedEngine(
            self.root / "model",
            EngineSettings(device="cpu", num_slots=num_slots, max_context=max_context, **settings),
            dtype=str(self.dtype).removeprefix("torch."),
            num_threads=1,
            adapters=self.adapters,
        )
        await engine.start()
        try:
            if load is not None:
                await engine.load_version(self.manifests[load], "recompute")
            yield engine
        finally:
            await engine.close()

    @torch.inference_mode()
    def logprobs(self, version: Any, prompt: np.ndarray, answer: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """What transformers says of an answer's tokens in one forward pass of one version."""
        ids = torch.from_numpy(np.concatenate((prompt, answer)).astype(np.int64))[None]
        logits = self.models[version](input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def worst_error(self, request: GenerationRequest, segment: Segment) -> float:
        """Largest difference between recorded log-probs and those of each token's stamped version."""
        answer = np.concatenate((request.prefix.tokens_R, segment.tokens_R))
        versions = set(segment.versions_R.tolist())
        temperature = request.sampling.temperature
        said = {v: self.logprobs(v, request.prompt_P, answer, temperature)[len(request.prefix) :] for v in versions}
        expected = np.array([said[v][i] for i, v in enumerate(segment.versions_R.tolist())])
        return float(np.abs(expected - segment.logprobs_R).max()) if len(segment) else 0.0


def ask(request_id: int, prompt_length: int = 5, max_new_tokens: int = 20, **fields: Any) -> GenerationRequest:
    """A request with a random prompt; fields of Sampling go there, others to the request."""
    sampling = {key: fields.pop(key) for key in ("temperature", "top_p", "top_k", "stop_token_ids") if key in fields}
    prompt = np.random.default_rng(fields.get("seed", request_id)).integers(0, VOCAB, prompt_length)
    fields = {"prompt_P": prompt.astype(np.int32), "prefix": Segment.empty(), "seed": request_id, **fields}
    return GenerationRequest(
        request_id=request_id, sampling=Sampling(max_new_tokens=max_new_tokens, **sampling), **fields
    )


async def generate_all(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[GenerationOutcome]:
    """All outcomes, within the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until something is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is another thread's progress
            await asyncio.sleep(0)


async def run_steps(engine: EmbeddedEngine, num_steps: int) -> None:
    """Let a paused engine take so many steps and pause again, however slow this loop is."""
    core = engine._core
    assert core is not None
    left, honest = [num_steps], core.decoder.step

    def counted(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            engine._is_paused = True
            core.decoder.step = honest  # type: ignore[method-assign]
        return honest(*args)

    core.decoder.step = counted  # type: ignore[method-assign]
    before = engine.counters()["steps"]
    await engine.resume()
    await until(lambda: engine.counters()["steps"] == before + num_steps)


async def start(
    engine: EmbeddedEngine, requests: list[GenerationRequest], num_steps: int
) -> list[asyncio.Task[GenerationOutcome]]:
    """Submit requests and let the engine take so many steps; it is paused then."""
    await engine.pause()
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await run_steps(engine, num_steps)
    return tasks


class Kit:
    """What the tests of this folder share."""

    LLAMA_LIKE, VOCAB = LLAMA_LIKE, VOCAB
    ask, generate_all, until, publish = map(staticmethod, (ask, generate_all, until, publish))
    run_steps, start = map(staticmethod, (run_steps, start))

    def __init__(self, root: Path) -> None:
        self.root = root

    def bench(self, model_type: str = "qwen3", **config: Any) -> Bench:
        """A tiny model of this architecture."""
        base = LLAMA_LIKE if "n_embd" not in config else {"bos_token_id": None, "eos_token_id": None}
        return Bench(self.root, model_type, **{**base, **config})

    @staticmethod
    def run(body: Awaitable[Any]) -> Any:
        """Run one test's coroutine."""

        async def bounded() -> Any:
            async with asyncio.timeout(DEADLINE_S):
                return await body

        return asyncio.run(bounded())


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are attended in as many blocks as they have spans, and brought into order at every step."""
    monkeypatch.setattr("rollout.engine.kv_cache.CPU_CALL_BYTES", 1)
    monkeypatch.setattr("rollout.engine.core.LOOK_EVERY", 1)


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    """Helpers over a fresh folder; one compute thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Kit(tmp_path)
    torch.set_num_threads(num_threads)
