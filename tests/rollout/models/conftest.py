"""A rollout worker's parts without its connections: a tiny policy with several versions, and models that it hosts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire.messages import SampleTask, Sampling
from rollout.config import EngineSettings, RolloutSettings
from rollout.engine.embedded import EmbeddedEngine
from rollout.models.hosting import ModelHosts, make_hosts
from rollout.sample import SampleRun
from rollout.sample_context import SampleContext
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids
from rollout.weights.versions import VersionGate
from trainer.model.tokenizers import build_tokenizer

DEADLINE_S = 300.0
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


class Zoo:
    """Model folders with a tokenizer, and the versions of the policy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = WeightStore(root / "weights", "disk", keep=100)
        self.models: dict[Any, torch.nn.Module] = {}
        """By version; with an adapter by its name."""
        self.manifests: dict[int, Path] = {}
        self.policy = self.folder("policy", seed=0)
        for version in range(3):
            self.publish(version, seed=version)

    def model(self, seed: int, **config: Any) -> torch.nn.Module:
        """Weights that make some tokens much likelier than others."""
        torch.manual_seed(seed)
        tokenizer = build_tokenizer("characters:guess_number", None)
        sizes = {**CONFIG, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **config}
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).eval().requires_grad_(False)
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
        return made

    def folder(self, name: str, seed: int, tokenizer: str = "characters:guess_number", **config: Any) -> Path:
        """A model's folder, as a run prepares it."""
        self.model(seed, **config).save_pretrained(self.root / name)
        build_tokenizer(tokenizer, None).save_pretrained(self.root / name)
        return self.root / name

    def adapter(self, name: str, seed: int) -> Path:
        """The folder of an adapter on the starting model, made by peft."""
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        made = peft.get_peft_model(copy.deepcopy(self.models[0]), settings)
        made.save_pretrained(self.root / name)
        self.models[name] = made.eval().requires_grad_(False)
        return self.root / name

    def publish(self, version: int, seed: int) -> None:
        self.models[version] = model = self.model(seed)
        tensors = {}
        for name, tensor in model.named_parameters():
            data = memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))
            tensors[name] = TensorBytes("float32", tuple(tensor.shape), data)
        self.manifests[version] = self.store.publish(version, "l0", tensors)

    @torch.inference_mode()
    def logprobs(self, version: Any, tokens_T: np.ndarray) -> np.ndarray:
        """[T - 1, V]: what transformers says after each token but the last."""
        ids = torch.from_numpy(tokens_T.astype(np.int64))[None]
        logits = self.models[version](input_ids=ids, use_cache=False).logits[0, :-1].float()
        return np.asarray(torch.log_softmax(logits, -1))


class Desk:
    """The policy's engine, hosted models, and samples made with them by a workflow."""

    def __init__(self, zoo: Zoo, tmp_path: Path, models: list[dict[str, Any]], teacher: str = "") -> None:
        self.zoo = zoo
        engine = EngineSettings(device="cpu", num_slots=4, max_context=96)
        self.settings = RolloutSettings.model_validate({"engine": engine.model_dump(), "models": models})
        self.engine = EmbeddedEngine(zoo.policy, engine, dtype="float32", num_threads=1)
        self.gate = VersionGate()
        self.tokenizer = load_tokenizer(zoo.policy, "from_model")
        tokens = PromptTokens(
            self.tokenizer, template=None, add_bos="auto", max_context=96, stop_ids=stop_ids(zoo.policy, self.tokenizer)
        )
        self.spec = spec(tmp_path, teacher_model=teacher)
        self.hosts: ModelHosts = make_hosts(self.spec, self.settings, zoo.policy, self.tokenizer)
        self.bench = SampleContext(
            engine=self.engine, gate=self.gate, tokens=tokens, rewards=SimpleNamespace(), version_deadline_s=DEADLINE_S,
            clock=SimpleNamespace(monotonic_s=lambda: 0.0), tracer=Tracer(tmp_path / "t.jsonl", "w"), models=self.hosts,
        )  # type: ignore[arg-type]  # fmt: skip

    async def load(self, version: int) -> None:
        """As the version loop does: the policy first, then its copies."""
        await self.engine.load_version(self.zoo.manifests[version], "recompute")
        self.gate.set(version)
        await self.hosts.policy_loaded(self.zoo.manifests[version], version)

    async def sample(
        self, workflow: Any, row: dict[str, Any], *, seed: int = 1, purpose: Any = "train",
        prefix: Segment | None = None, **task: Any,
    ) -> Any:  # fmt: skip
        """One sample, as the pool makes it."""
        sampling = Sampling(**{"max_new_tokens": 2, **task})
        made = SampleTask(
            lease_id=seed, group_id=0, sample_index=0, purpose=purpose, min_version=0, row=row, seed=seed,
            sampling=sampling, prefix=prefix or Segment.empty(),
        )  # fmt: skip
        run = SampleRun(made, self.bench, is_resumable=workflow.is_resumable, lane="lane")
        try:
            sample = await workflow.run(made, run)
            run.check_trained(sample)
            return await run.with_teacher_logprobs(sample)
        finally:
            run.end()


def spec(tmp_path: Path, **more: Any) -> ProcessSpec:
    return ProcessSpec(
        role="rollout", name="rollout-0", run_id="r", run_dir=str(tmp_path), hub_address="", parent_pid=1, seed=1,
        model=ModelSettings(path=str(tmp_path)), sampling=SamplingSettings(), staleness=StalenessSettings(),
        groups_per_step=1, group_size=1, num_steps=1, weight_dir=str(tmp_path), settings={}, **more,
    )  # fmt: skip


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("models"))


@pytest.fixture
def at_desk(zoo: Zoo, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`at_desk(test, models=[...])` runs `test(desk)` with everything started and version 0 loaded."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(test: Callable[[Desk], Awaitable[Any]], models: list[dict[str, Any]], teacher: str = "") -> Any:
        async def whole() -> Any:
            desk = Desk(zoo, tmp_path, copy.deepcopy(models), teacher)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await desk.engine.start()
                    await desk.hosts.start()
                    await desk.load(0)
                    return await test(desk)
            finally:
                await desk.hosts.close()
                await desk.engine.close()

        return asyncio.run(whole())

    yield run
    torch.set_num_threads(num_threads)
