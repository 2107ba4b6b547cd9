"""Claims about options that matter for RL: the command line they become, sleeping servers, proven loads, experts."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from areal_like.errors import EngineError, UserError, WeightError
from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.server.environment import Argument
from rollout.engine.sglang.arguments import Launch, extra_words


def launch(*, device: str = "cuda", in_turns: bool = False, **sglang) -> Launch:
    settings = EngineSettings(kind="sglang", device=device, sglang=SGLangSettings(**sglang))
    return Launch(Path("python"), settings, "bfloat16", 100, 1, "recompute", (), in_turns)


def words(version: int = 3, **options) -> str:
    return (
        " ".join(
            launch(**options).command(Path("folder"), version, port=1, nccl_port=2, seed=3, key_file=Path("key.yaml"))
        )
        + " "
    )


@pytest.mark.parametrize("version", [-1, 3])
def test_fp8_takes_the_loader_that_can_quantise_again_and_real_weights_to_begin_with(version):
    line = words(version, quantization="fp8")
    assert "--quantization fp8 " in line
    assert "--load-format flash_rl " in line
    assert "--quantization" not in words(version)


def test_layers_left_unquantised_and_the_cache_reach_the_server():
    chosen = {
        "quantization": "fp8",
        "unquantized_layers": ("model.layers.0", "down_proj"),
        "kv_cache_dtype": "fp8_e4m3",
    }
    assert launch(**chosen).variables(Path("/tmp"))["SGLANG_FP8_IGNORED_LAYERS"] == "model.layers.0,down_proj"
    assert "--kv-cache-dtype fp8_e4m3 " in words(**chosen)
    assert "SGLANG_FP8_IGNORED_LAYERS" not in launch().variables(Path("/tmp"))


def test_each_switch_is_one_flag_and_none_is_set_by_default():
    assert "--enable-deterministic-inference " in words(deterministic=True)
    assert "--enable-return-routed-experts " in words(routed_experts=True)
    assert "--enable-memory-saver " in words(release_idle_s=1.0)
    assert "--enable-weights-cpu-backup " not in words(release_idle_s=1.0)
    assert "--enable-weights-cpu-backup " in words(release_idle_s=1.0, release="all")
    assert "--enable-memory-saver" not in words(device="cpu", release_idle_s=1.0), "a CPU has none"
    assert "--enable-memory-saver " in words(in_turns=True)
    assert "--enable-weights-cpu-backup " not in words(in_turns=True), "the next version replaces them"
    assert "--enable-weights-cpu-backup " in words(in_turns=True, quantization="fp8"), "but not their scales"
    assert "--enable-memory-saver" not in words(device="cpu", in_turns=True)
    assert "--enable-" not in words()


def test_a_server_whose_core_others_want_sleeps_while_it_has_nothing_to_do():
    assert "--sleep-on-idle " in words(device="cpu")
    assert "--sleep-on-idle " in words(in_turns=True)
    assert "--sleep-on-idle " not in words()
    assert "--sleep-on-idle " not in words(device="cpu", arguments={"sleep_on_idle": False}), (
        "unless configured otherwise"
    )


def test_an_engine_spread_over_several_servers_is_refused_with_the_reason():
    settings = EngineSettings(
        device="cpu", kind="sglang", sglang=SGLangSettings(arguments={"disaggregation-mode": "prefill"})
    )
    with pytest.raises(UserError, match="the others would continue with the old version"):
        extra_words(settings, {"disaggregation-mode": Argument(True, False)}, "recompute")


async def calls_of(fake_world, engine, *kinds: str) -> list[list[object]]:
    return [call for call in (await fake_world.server_info(engine))["calls"] if call[0] in kinds]


@pytest.mark.processes
def test_an_idle_server_gives_its_memory_back_and_takes_it_again_for_a_request(fake_world):
    async def body():
        async with fake_world.engine(release_idle_s=0.05, release="all") as engine:
            for number in range(2):
                await fake_world.until(lambda number=number: engine.counters()["sleeps"] == number + 1)
                outcome = await engine.generate(fake_world.ask(number))
                fake_world.check(outcome.segment)
            kinds = [call for call in await calls_of(fake_world, engine, "release", "take back", "generate")]
            tags = ["kv_cache", "weights"]
            assert [call[:2] if call[0] != "generate" else call[:1] for call in kinds][:6] == [
                ["release", tags], ["take back", tags], ["generate"], ["release", tags], ["take back", tags],
                ["generate"],
            ]  # fmt: skip

    fake_world.run(body())


@pytest.mark.processes
def test_a_version_wakes_a_sleeping_server_first(fake_world):
    async def body():
        async with fake_world.engine(release_idle_s=0.05) as engine:
            await fake_world.until(lambda: engine.counters()["sleeps"] == 1)
            await engine.load_version(fake_world.publish(1), "recompute")
            assert set((await engine.generate(fake_world.ask())).segment.versions_R.tolist()) == {1}
            await fake_world.until(lambda: engine.counters()["sleeps"] >= 2)

    fake_world.run(body())


@pytest.mark.processes
def test_a_server_that_cannot_take_its_memory_again_is_replaced_and_no_answer_is_lost(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_KEEP_SLEEPING", "1")
        async with fake_world.engine(release_idle_s=0.05) as engine:
            await fake_world.until(lambda: engine.counters()["sleeps"] == 1)
            outcome = await engine.generate(fake_world.ask())
            fake_world.check(outcome.segment)
            assert engine.counters()["server_restarts"] == 1
            assert "did not allocate its memory again" in fake_world.reports[0]

    fake_world.run(body())


@pytest.mark.processes
def test_a_load_that_is_not_what_was_published_fails_and_costs_a_server_and_no_answer(fake_world):
    async def body():
        fake_world.monkeypatch.setenv("FAKE_TICK_S", "0.01")
        fake_world.monkeypatch.setenv("FAKE_WRONG_SUM", "1")
        async with fake_world.engine(checksums=True) as engine:
            running = asyncio.ensure_future(engine.generate(fake_world.ask(1, 60)))
            await fake_world.until(lambda: len(engine.progress().get(1, ())))
            with pytest.raises(
                WeightError, match=r"1 of 1 tensors on the server differ from the published ones.*weight"
            ):
                await engine.load_version(fake_world.publish(1), "recompute")
            assert (engine.version, engine.counters()["proven_swaps"]) == (0, 1)
            assert "the weights of the server differ from version 1" in fake_world.reports[0]
            await engine.load_version(fake_world.publish(2, 0.25), "recompute")
            assert (engine.version, engine.counters()["proven_swaps"]) == (2, 2)
            outcome = await running
            fake_world.check(outcome.segment)
            assert len(outcome.segment) == 60

    fake_world.run(body())


def test_a_seed_is_sent_where_the_server_samples_by_it(fake_world):
    engine = fake_world.make(deterministic=True)
    assert engine.capabilities.per_request_seed
    assert not fake_world.make().capabilities.per_request_seed


@pytest.mark.processes
def test_routed_experts_must_be_of_every_position_and_a_model_without_any_is_refused(fake_world):
    async def body():
        with pytest.raises(UserError, match=r"routed_experts: model type qwen3 has no experts"):
            await fake_world.make(routed_experts=True).start()
        async with fake_world.engine() as engine:
            attempts = engine._attempts
            attempts._experts_shape = (2, 3)
            running = type("Running", (), {"request": fake_world.ask(), "answer": range(5), "routed_experts": None})
            assert attempts._experts_of(running) is None
            experts = np.arange((3 + 5 - 1) * 2 * 3, dtype=np.int32)
            running.routed_experts = 5, base64.b64encode(experts.tobytes()).decode()
            found = attempts._experts_of(running)
            assert found.shape == (7, 2, 3)
            assert found.ravel().tolist() == experts.tolist()
            running.answer = range(6)
            assert attempts._experts_of(running) is None, "said before the last token"
            running.routed_experts = 6, running.routed_experts[1]
            with pytest.raises(EngineError, match=r"42 routed expert ids, but .* for each of 8 positions"):
                attempts._experts_of(running)

    fake_world.run(body())
