"""The engine adapter against the real, unmodified SGLang server, with a tiny Qwen3 on a CPU.

The oracle is transformers: a plain forward pass of the version stamped on each token (`recompute`, `drain`), and for
`keep_kv` a pass with the new weights over keys and values made with the old ones, which fits only if the boundary is
exact to the token. One server serves all tests of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.errors import UserError, WeightError
from areal_like.messages import Sampling
from areal_like.trajectory import Segment
from areal_like.weights import TensorBytes, WeightStore
from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.engine.sglang.attach import check_attached
from rollout.engine.sglang.engine import SGLangEngine, Whereabouts

pytestmark = pytest.mark.e2e

VOCAB, CONTEXT, SLOTS = 48, 160, 16
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
TOLERANCE_NATS, APART_NATS = 1e-4, 0.1
PATIENCE_S = 1200.0
SLOW_S = 0.02
"""Added to every forward pass of the server, so that answers outlast what the tests do to it."""


class World:
    """Versions of a tiny model, their manifests, and a loop that outlives single tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = AutoConfig.for_model("qwen3", **CONFIG)
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
        for version in range(1, 12):
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

    def make(self, settings: EngineSettings | None = None, **more: Any) -> SGLangEngine:
        return SGLangEngine(
            self.model_dir,
            settings or self.settings(),
            dtype="float32",
            num_threads=1,
            interruption="keep_kv",
            whereabouts=Whereabouts("w", self.root / "logs" / "w-sglang.log", 1),
            **more,
        )

    def settings(self, **more: Any) -> EngineSettings:
        sglang = {"control_timeout_s": 15.0, "stall_timeout_s": 60.0, **more}
        return EngineSettings(
            kind="sglang",
            num_slots=SLOTS,
            max_context=CONTEXT,
            python=os.environ["AREAL_LIKE_SGLANG_PYTHON"],
            sglang=SGLangSettings(**sglang),
        )

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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("sglang"))
    made.engine = made.make()

    async def begin() -> None:
        await made.engine.start()
        await made.load(0)

    made.run(begin)
    yield made
    made.runner.run(made.engine.close())
    made.runner.close()


async def start_all(world: World, requests: list[GenerationRequest]) -> list[asyncio.Task[GenerationOutcome]]:
    """All of them generating, each with tokens."""
    tasks = [asyncio.ensure_future(world.engine.generate(request)) for request in requests]
    await until(lambda: all(len(world.engine.progress().get(request.request_id, ())) for request in requests))
    return tasks


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.01)


def assert_whole(request: GenerationRequest, outcome: GenerationOutcome, length: int = 60) -> None:
    assert outcome.end_reason == "length"
    assert len(outcome.segment) == length
    assert (np.diff(outcome.segment.versions_R) >= 0).all()


def test_log_probs_are_those_of_transformers_at_any_temperature(world: World) -> None:
    async def body() -> None:
        requests = [ask(n, sampling={"temperature": t}) for n, t in enumerate((1.0, 0.7, 1.3))]
        for request, outcome in zip(requests, await asyncio.gather(*map(world.engine.generate, requests)), strict=True):
            assert_whole(request, outcome)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        greedy = ask(9, sampling={"temperature": 0.0, "top_p": 0.5})
        segment = (await world.engine.generate(greedy)).segment
        said = world.logprobs(0, np.concatenate((greedy.prompt_P, segment.tokens_R)), 12, 1.0)
        assert np.abs(said - segment.logprobs_R).max() <= TOLERANCE_NATS

    world.run(body)


def test_an_answer_ends_at_stop_ids_segments_limits_and_the_context_and_nowhere_else(world: World) -> None:
    async def body() -> None:
        stop = (await world.engine.generate(ask(20, sampling={"temperature": 0.0}))).segment
        stop_id = int(stop.tokens_R[30])
        first = stop.tokens_R.tolist().index(stop_id) + 1
        ended = await world.engine.generate(ask(20, sampling={"temperature": 0.0, "stop_token_ids": (stop_id,)}))
        assert (ended.end_reason, ended.segment.tokens_R.tolist()) == ("stop", stop.tokens_R[:first].tolist())
        cut = await world.engine.generate(ask(20, sampling={"temperature": 0.0}, segment_tokens=7))
        assert (cut.end_reason, cut.segment.tokens_R.tolist()) == ("segment", stop.tokens_R[:7].tolist())
        goes_on = await world.engine.generate(ask(20, sampling={"temperature": 0.0}, prefix=cut.segment))
        assert goes_on.segment.tokens_R.tolist() == stop.tokens_R[7:].tolist()
        full = await world.engine.generate(ask(21, max_new_tokens=1000))
        assert (full.end_reason, len(full.segment)) == ("length", CONTEXT - 12)
        with pytest.raises(UserError, match="leave no room"):
            await world.engine.generate(ask(22, prompt_length=CONTEXT))

    world.run(body)


def test_swaps_inside_answers_are_exact_with_recompute(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        requests = [ask(n, max_new_tokens=80) for n in range(30, 30 + SLOTS)]
        tasks = await start_all(world, requests)
        for version in (1, 2, 3):
            report = await world.load(version)
            assert report.version == world.engine.version == version
            seen = {n: len(s) for n, s in world.engine.progress().items()}
            await until(lambda seen=seen: all(len(s) > seen[n] + 8 for n, s in world.engine.progress().items()))
        await world.slow(None)
        outcomes = await asyncio.gather(*tasks)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert_whole(request, outcome, 80)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        num_far = sum(
            world.is_far(request, outcome.segment) for request, outcome in zip(requests, outcomes, strict=True)
        )
        assert num_far >= len(requests) / 2

    world.run(body)


def test_kept_keys_and_values_have_an_exact_boundary_and_serve_nobody_else(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        requests = [ask(n, prompt_length=40) for n in range(50, 50 + SLOTS)]
        tasks = await start_all(world, requests)
        for version in (4, 5):
            await world.load(version, "keep_kv")
            seen = {n: len(s) for n, s in world.engine.progress().items()}
            await until(lambda seen=seen: all(len(s) > seen[n] + 8 for n, s in world.engine.progress().items()))
        later = [ask(n, prompt_length=40, prompt_seed=n - 50) for n in range(100, 100 + SLOTS)]
        late_tasks = [asyncio.ensure_future(world.engine.generate(request)) for request in later]
        await world.slow(None)
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_whole(request, outcome)
            versions, counts = np.unique(outcome.segment.versions_R, return_counts=True)
            assert versions.tolist() == [3, 4, 5]
            tokens = np.concatenate((request.prompt_P, outcome.segment.tokens_R))
            spans = list(zip(versions.tolist(), counts.tolist(), strict=True))
            said = world.kept_logprobs(spans, tokens, 40, 0.9)
            assert np.abs(said - outcome.segment.logprobs_R).max() <= TOLERANCE_NATS
        for request, outcome in zip(later, await asyncio.gather(*late_tasks), strict=True):  # the same prompts again
            assert set(outcome.segment.versions_R.tolist()) == {5}
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS

    world.run(body)


def test_drain_lets_answers_finish_under_the_version_they_began_with(world: World) -> None:
    async def body() -> None:
        requests = [ask(n) for n in range(130, 134)]
        tasks = await start_all(world, requests)
        loading = asyncio.ensure_future(world.load(6, "drain"))
        await until(lambda: not world.engine._attempts.gate.is_set())
        late = asyncio.ensure_future(world.engine.generate(ask(140)))
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert set(outcome.segment.versions_R.tolist()) == {5}
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        await loading
        assert set((await late).segment.versions_R.tolist()) == {6}

    world.run(body)


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_use(world: World) -> None:
    async def body() -> None:
        wide = torch.zeros(VOCAB + 1, CONFIG["hidden_size"])
        with pytest.raises(WeightError, match=r"lm_head.weight has shape \(49, 32\)"):
            await world.engine.load_version(world.publish(10, **{"lm_head.weight": wide}), "recompute")
        outcome = await world.engine.generate(request := ask(150))
        assert set(outcome.segment.versions_R.tolist()) == {6}
        assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS

    world.run(body)


def test_a_cancelled_answer_frees_its_slot_on_the_server(world: World) -> None:
    async def body() -> None:
        await world.slow(SLOW_S)
        (task,) = await start_all(world, [ask(160, max_new_tokens=140)])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert 160 not in world.engine.progress()
        live = await world.engine._keeper.ready()

        async def is_running() -> bool:
            loads = (await live.client._get("/v1/loads"))["loads"]
            return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads) > 0

        while await is_running():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)
        await world.slow(None)

    world.run(body)


def test_attaching_needs_the_same_model_and_then_works_as_well(world: World, tmp_path: Path) -> None:
    async def body() -> None:
        live = await world.engine._keeper.ready()
        settings = world.settings()
        other = AutoConfig.for_model("qwen3", **{**CONFIG, "hidden_size": 64})
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(UserError, match=r"holds another model .* hidden_size is 32, ours is 64"):
            await check_attached(live.client.url, settings, "recompute", tmp_path / "other", CONTEXT)
        with pytest.raises(UserError, match="no SGLang server answers"):
            await check_attached("http://127.0.0.1:9", settings, "recompute", world.model_dir, CONTEXT)
        guest = world.make(attach=live.client.url)
        await guest.start()
        await guest.load_version(world.manifests[7], "recompute")
        outcome = await guest.generate(request := ask(170))
        assert set(outcome.segment.versions_R.tolist()) == {7}
        assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        await guest.close()
        await world.load(7)

    world.run(body)
