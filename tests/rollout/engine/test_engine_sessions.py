"""Episodes of several turns over swaps: a log-prob is that of the stamped version, whatever was kept between turns."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.trajectory import Trajectory
from rollout.transcript import Transcript

TOLERANCE = 1e-4
NUM_EPISODES, NUM_TURNS = 6, 5


class Progress:
    """Turns that are done, and versions that are loaded. `last_version`: the one that turns wait for at most."""

    def __init__(self, last_version: int = 3) -> None:
        self.num_turns, self.last_version = 0, last_version
        self.turn_done = asyncio.Condition()
        self.loaded = [asyncio.Event() for _ in range(4)]
        self.loaded[0].set()


async def episode(kit: Any, engine: Any, number: int, progress: Progress) -> Trajectory:
    """Turns of several lengths with given tokens between them; a turn is held until its version is loaded."""
    rng = np.random.default_rng(number)
    transcript = Transcript(rng.integers(0, kit.VOCAB, 2 + number))
    for turn in range(NUM_TURNS):
        length = int(rng.integers(1, 9))
        await progress.loaded[max(0, min(turn - 1, progress.last_version))].wait()
        request = kit.ask(100 * number + turn, prompt_P=transcript.tokens_T, max_new_tokens=length, session_key=number)
        outcome = await engine.generate(request)
        transcript.sampled(outcome.segment)
        transcript.given(rng.integers(0, kit.VOCAB, rng.integers(0, 4)))
        async with progress.turn_done:
            progress.num_turns += 1
            progress.turn_done.notify_all()
    return transcript.close()


async def episodes_with_swaps(kit: Any, bench: Any, engine: Any, interruption: str) -> list[Trajectory]:
    """Each swap comes when half of the turns that had to wait for the one before are done, so that every version
    samples: in mid-answer for some episodes, between turns for others."""
    progress = Progress()
    tasks = [asyncio.ensure_future(episode(kit, engine, number, progress)) for number in range(NUM_EPISODES)]
    for version in (1, 2, 3):
        least = version * NUM_EPISODES + NUM_EPISODES // 2
        async with progress.turn_done:
            await progress.turn_done.wait_for(lambda least=least: progress.num_turns >= least)
        await engine.load_version(bench.manifests[version], interruption)
        progress.loaded[version].set()
    return list(await asyncio.gather(*tasks))


def worst_error(bench: Any, trajectory: Trajectory) -> float:
    """Against one forward pass of each stamped version over the whole trajectory."""
    errors = []
    for version in np.unique(trajectory.versions_T[trajectory.loss_mask_T]).tolist():
        said = bench.logprobs(version, trajectory.tokens_T[:1], trajectory.tokens_T[1:])
        places = np.flatnonzero(trajectory.versions_T == version)
        errors.append(np.abs(said[places - 1] - trajectory.logprobs_T[places]).max())
    return float(max(errors))


@torch.inference_mode()
def worst_error_with_kept_keys(bench: Any, trajectory: Trajectory) -> float:
    """Against forward passes that go on from the keys and values of the versions before: a token's are computed by the
    version that samples the next one."""
    mask, versions = trajectory.loss_mask_T, trajectory.versions_T
    next_sampled = [versions[place:][mask[place:]][0] for place in range(1, np.flatnonzero(mask)[-1] + 1)]
    bounds = [0, *(np.flatnonzero(np.diff(next_sampled)) + 1).tolist(), len(next_sampled)]
    past, errors = None, []
    for start, stop in itertools.pairwise(bounds):
        ids = torch.from_numpy(trajectory.tokens_T[start:stop].astype(np.int64))[None]
        made = bench.models[int(next_sampled[start])](input_ids=ids, past_key_values=past, use_cache=True)
        past = made.past_key_values
        logprobs = torch.log_softmax(made.logits[0].float(), -1).numpy()
        for place in range(start + 1, stop + 1):
            if mask[place]:
                errors.append(
                    abs(logprobs[place - 1 - start, trajectory.tokens_T[place]] - trajectory.logprobs_T[place])
                )
    return float(max(errors))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("interruption", ["recompute", "drain", "keep_kv"])
def test_every_logprob_of_an_episode_is_its_stamped_versions(kit: Any, family: str, interruption: str) -> None:
    gpt2 = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    bench = kit.bench(family, **(gpt2 if family == "gpt2" else {}))
    for version in (1, 2, 3):
        bench.add_other(version)

    async def body() -> Any:
        async with bench.engine(num_slots=4) as engine:
            made = await episodes_with_swaps(kit, bench, engine, interruption)
            return made, engine.counters()

    trajectories, counters = kit.run(body())
    keeps_keys = interruption == "keep_kv" and family != "gpt2"
    check = worst_error_with_kept_keys if keeps_keys else worst_error
    if interruption != "keep_kv" or keeps_keys:  # transformers' own modules keep keys within an answer only
        assert max(check(bench, trajectory) for trajectory in trajectories) < TOLERANCE
    if keeps_keys:
        assert max(worst_error(bench, trajectory) for trajectory in trajectories) > 100 * TOLERANCE, "keys were kept"
    assert {version for one in trajectories for version in one.versions_T.tolist()} == {-1, 0, 1, 2, 3}
    assert (counters["kept_prefill_tokens"] > 0) == (family != "gpt2")
    assert counters["tokens"] == sum(one.num_sampled for one in trajectories)


def test_without_swaps_a_turn_computes_only_what_was_given_since_the_last(kit: Any) -> None:
    bench = kit.bench("qwen3")

    async def body() -> Any:
        async with bench.engine(num_slots=8) as engine:
            made = [await episode(kit, engine, number, Progress(0)) for number in range(2)]
            return made, engine.counters()

    trajectories, counters = kit.run(body())
    assert max(worst_error(bench, trajectory) for trajectory in trajectories) < TOLERANCE
    lengths = [1 + int(np.flatnonzero(one.loss_mask_T)[-1]) for one in trajectories]  # given tokens at the end: unseen
    fed_by_steps = sum(one.num_sampled for one in trajectories)
    # Each token is computed once, in a prefill or by a step, and the last one of an episode never.
    assert counters["prefill_tokens"] + fed_by_steps == sum(lengths) - len(lengths)
    assert counters["session_evictions"] == 0


@pytest.mark.parametrize("cache", [{"session_cache_mb": 0.0}, {"session_cache_mb": 0.02}])
def test_a_small_budget_costs_prefills_and_no_exactness(kit: Any, cache: dict[str, float]) -> None:
    bench = kit.bench("qwen3")
    bench.add_other(1)
    bench.add_other(2)
    bench.add_other(3)

    async def body() -> Any:
        async with bench.engine(num_slots=4, **cache) as engine:
            made = await episodes_with_swaps(kit, bench, engine, "recompute")
            return made, engine.counters()

    trajectories, counters = kit.run(body())
    assert max(worst_error(bench, trajectory) for trajectory in trajectories) < TOLERANCE
    assert (counters["kept_prefill_tokens"] > 0) == (cache["session_cache_mb"] > 0)
    assert (counters["session_evictions"] > 0) == (cache["session_cache_mb"] > 0)
