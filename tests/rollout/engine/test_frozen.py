"""An engine of a model that is not the policy: a folder's weights, one set of them, log-probs of given tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.errors import EngineError, PolicyDiverged, UserError
from rollout.config import EngineSettings
from rollout.engine.frozen import FrozenEngine

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 24, "n_positions": 128}


def frozen(bench: Any, *, is_refreshed: bool = False) -> FrozenEngine:
    settings = EngineSettings(device="cpu", num_slots=4, max_context=128)
    return FrozenEngine(
        bench.root / "model", settings, dtype="float32", num_threads=1, is_refreshed=is_refreshed
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_a_folders_weights_answer_and_score_as_transformers_does(kit: Any, family: str) -> None:
    bench = kit.bench(family, **(GPT2 if family == "gpt2" else {}))
    bench.models[0].save_pretrained(bench.root / "model")

    async def body() -> None:
        engine = frozen(bench)
        await engine.start()
        try:
            await engine.load_folder(0)
            request = kit.ask(1)
            outcome = (await kit.generate_all(engine, [request]))[0]
            assert bench.worst_error(request, outcome.segment) < 1e-4
            tokens = np.random.default_rng(1).integers(0, 24, 128).astype(np.int32)
            for start, temperature in ((1, 1.0), (100, 0.5)):
                found, version = await engine.logprobs(tokens[:start], tokens[start:], temperature)
                expected = bench.logprobs(0, tokens[:start], tokens[start:], temperature)
                np.testing.assert_allclose(found, expected, atol=1e-4)
                assert (version, found.dtype) == (0, np.float32)
            with pytest.raises(UserError, match="a temperature above 0"):
                await engine.logprobs(tokens[:1], tokens[1:], 0.0)
        finally:
            await engine.close()

    kit.run(body())


def test_only_a_copy_that_is_refreshed_has_a_second_set_of_weights(kit: Any) -> None:
    bench = kit.bench()

    async def num_bytes(*, is_refreshed: bool) -> int:
        engine = frozen(bench, is_refreshed=is_refreshed)
        await engine.start()
        try:
            await engine.load_version(bench.manifests[0], "recompute")
            assert engine._core is not None
            return engine._core.decoder.num_bytes
        finally:
            await engine.close()

    one, two = kit.run(num_bytes(is_refreshed=False)), kit.run(num_bytes(is_refreshed=True))
    num_weights = sum(parameter.nbytes for parameter in bench.models[0].parameters())
    assert two - one == pytest.approx(num_weights, rel=0.05), "fused, with a few numbers more"


@pytest.mark.parametrize("is_refreshed", [False, True])
def test_only_a_copy_of_the_policy_can_have_diverged(kit: Any, is_refreshed: bool) -> None:
    bench = kit.bench()

    async def body() -> None:
        engine = frozen(bench, is_refreshed=is_refreshed)
        await engine.start()
        try:
            await engine.load_version(bench.manifests[0], "recompute")
            assert engine._core is not None
            step = engine._core.decoder.step
            engine._core.decoder.step = lambda *args: step(*args) * float("nan")  # type: ignore[method-assign]
            with pytest.raises(EngineError) as caught:
                await engine.generate(kit.ask(1))
            assert isinstance(caught.value, PolicyDiverged) is is_refreshed
            assert (str(bench.root / "model") in str(caught.value)) is not is_refreshed
        finally:
            await engine.close()

    kit.run(body())


def test_a_folder_without_weights_is_a_mistake_of_the_user(kit: Any) -> None:
    bench = kit.bench()

    async def body() -> None:
        engine = frozen(bench)
        await engine.start()
        try:
            with pytest.raises(UserError, match="cannot load a model from"):
                await engine.load_folder(0)
        finally:
            await engine.close()

    kit.run(body())
