"""Workflows that call several models, with real engines: what is trained, and whose version each token has."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.trajectory import Trajectory
from configs.graphs.critic import DraftCritiqueRevise
from configs.graphs.judge import JudgedSum
from configs.graphs.nim import AgainstRival
from rollout.transcript import Transcript
from rollout.workflow import Sample

ROW = {"prompt": "19:", "stones": 19, "answer": "3"}
RIVAL = {"name": "rival", "source": "policy", "refresh_every": 2, "temperature": 0.0}
ROLES = [{"name": "first", "source": "policy"}, {"name": "second", "source": "policy"}]


class Talk:
    """The policy and another model take turns, two tokens each; between turns the test does what it likes."""

    is_resumable = False

    def __init__(self, name: str, between: Any = None, num_turns: int = 4) -> None:
        self.models, self.between, self.num_turns = (name,), between, num_turns

    async def run(self, task: Any, tools: Any) -> Sample:
        talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        for turn in range(self.num_turns):
            talk.sampled(await tools.generate(talk))
            talk.given(await tools.models[self.models[0]].generate(talk))
            talk.given("?")
            if self.between is not None:
                await self.between(turn)
        return Sample(trajectory=talk.close(), verdict=tools.verdict(1.0), response_text="")


def check_policy_tokens(zoo: Any, trajectory: Trajectory) -> None:
    """The oracle: each trained token has the log-prob that transformers gives it under its stamped version."""
    places = np.flatnonzero(trajectory.loss_mask_T)
    for version in set(trajectory.versions_T[places].tolist()):
        said = zoo.logprobs(version, trajectory.tokens_T)
        for place in places[trajectory.versions_T[places] == version].tolist():
            expected = said[place - 1, trajectory.tokens_T[place]]
            assert trajectory.logprobs_T[place] == pytest.approx(expected, abs=1e-4)


def check_greedy_tokens(zoo: Any, trajectory: Trajectory, model: str, versions: dict[int, Any]) -> None:
    """Each token of a greedy model is the likeliest one under its stamped version. versions: of a stamp, a model of the
    zoo."""
    for source in trajectory.sources:
        if source.model == model:
            assert not trajectory.loss_mask_T[source.start : source.end].any()
            said = zoo.logprobs(versions[source.version], trajectory.tokens_T)
            for place in range(source.start, source.end):
                assert trajectory.tokens_T[place] == said[place - 1].argmax()


def stamps(trajectory: Trajectory, model: str) -> list[int]:
    return [one.version for one in trajectory.sources if one.model == model]


def test_a_copy_keeps_its_version_while_the_policy_goes_on_and_is_replaced_at_the_next_multiple(
    at_desk: Any, zoo: Any
) -> None:
    async def test(desk: Any) -> Sample:
        async def between(turn: int) -> None:
            if turn < 2:
                await desk.load(turn + 1)  # 1 after the first turn, 2 after the second, in the middle of the episode

        sample: Sample = await desk.sample(Talk("rival", between), ROW)
        assert desk.hosts.counters()["model_rival_swaps"] == 2.0, "version 0 and version 2"
        return sample

    trajectory = at_desk(test, [RIVAL]).trajectory
    assert stamps(trajectory, "rival") == [0, 0, 2, 2]
    mask_T = trajectory.loss_mask_T
    assert sorted(set(trajectory.versions_T[mask_T].tolist())) == [0, 1, 2]
    check_policy_tokens(zoo, trajectory)
    check_greedy_tokens(zoo, trajectory, "rival", {0: 0, 2: 2})


def test_a_swap_in_the_middle_of_an_answer_of_a_copy_is_stamped_token_by_token(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> Trajectory:
        host = desk.hosts.hosts["rival"]
        core, honest, begun = host.engine._core, host.engine._core.decoder.step, asyncio.Event()
        loop, num_steps = asyncio.get_running_loop(), 0

        def step(*args: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 4:
                host.engine._is_paused = True  # after this step: the swap finds the answer at four tokens
                loop.call_soon_threadsafe(begun.set)
            return honest(*args)

        core.decoder.step = step

        class Long(Talk):
            async def run(self, task: Any, tools: Any) -> Sample:
                talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
                talk.sampled(await tools.generate(talk))
                rival = tools.models["rival"].generate(talk, max_new_tokens=10, stop_token_ids=[])
                answering = asyncio.ensure_future(rival)
                await begun.wait()
                await desk.load(2)
                await host.engine.resume()
                talk.given(await answering)
                return Sample(trajectory=talk.close("environment"), verdict=tools.verdict(1.0), response_text="")

        sample = await desk.sample(Long("rival"), ROW, ignore_eos=False)
        return sample.trajectory  # type: ignore[no-any-return]

    trajectory = at_desk(test, [RIVAL])
    first, second = (one for one in trajectory.sources if one.model == "rival")
    assert (first.version, second.version, first.end - first.start) == (0, 2, 4)
    check_greedy_tokens(zoo, trajectory, "rival", {0: 0, 2: 2})


def test_a_policy_that_falls_back_takes_its_copy_with_it(at_desk: Any) -> None:
    async def test(desk: Any) -> list[int]:
        rival, seen = desk.hosts.hosts["rival"], []
        for version in (1, 2, 1, 2):
            await desk.load(version)
            seen.append(rival.engine.version)
        return seen

    assert at_desk(test, [RIVAL]) == [0, 2, 1, 2]


def test_a_frozen_model_of_a_folder_and_the_starting_model_answer_by_their_own_weights(at_desk: Any, zoo: Any) -> None:
    other = zoo.folder("other", seed=2)

    async def test(desk: Any) -> tuple[Sample, Sample]:
        await desk.load(1)
        return await desk.sample(Talk("judge"), ROW), await desk.sample(Talk("start"), ROW)

    models = [
        {"name": "judge", "path": str(other), "temperature": 0.0},
        {"name": "start", "source": "start", "temperature": 0.0},
    ]
    judged, started = at_desk(test, models)
    for sample, name, model in ((judged, "judge", 2), (started, "start", 0)):
        assert stamps(sample.trajectory, name) == [0] * 4
        check_greedy_tokens(zoo, sample.trajectory, name, {0: model})
        check_policy_tokens(zoo, sample.trajectory)
        assert set(sample.trajectory.versions_T[sample.trajectory.loss_mask_T].tolist()) == {1}


def adapted(zoo: Any) -> list[dict[str, Any]]:
    """Two adapters on the starting model, the model itself, and one that shares no engine with them."""
    return [
        {"name": "sql", "adapter": str(zoo.adapter("sql", seed=5)), "temperature": 0.0},
        {"name": "chat", "source": "start", "adapter": str(zoo.adapter("chat", seed=6)), "temperature": 0.0},
        {"name": "start", "source": "start", "temperature": 0.0, "num_slots": 4},
        {"name": "apart", "source": "start", "temperature": 0.0, "num_slots": 2},
    ]


def test_models_with_one_base_share_an_engine_and_answer_each_with_its_adapter(at_desk: Any, zoo: Any) -> None:
    models = adapted(zoo)

    async def test(desk: Any) -> list[Sample]:
        hosts = desk.hosts.hosts
        assert hosts["sql"] is hosts["chat"] is hosts["start"] is not hosts["apart"]
        shared, alone = (hosts[name].engine._core.decoder for name in ("sql", "apart"))
        num_weights = alone.num_bytes - alone.cache.num_bytes
        num_adapters = shared.num_bytes - shared.cache.num_bytes - num_weights
        assert 0 < num_adapters < num_weights, "no second copy of the base"
        await desk.load(1)
        samples = await asyncio.gather(
            *(desk.sample(Talk(model["name"]), ROW, seed=number) for number, model in enumerate(models, 1))
        )
        counters = desk.hosts.counters()
        for model, sample in zip(models, samples, strict=True):
            sampled = sum(one.end - one.start for one in sample.trajectory.sources if one.model == model["name"])
            assert counters[f"model_{model['name']}_tokens"] == sampled > 0
        return list(samples)

    for model, sample in zip(models, at_desk(test, models), strict=True):
        assert stamps(sample.trajectory, model["name"]) == [0] * 4
        key = model["name"] if "adapter" in model else 0
        check_greedy_tokens(zoo, sample.trajectory, model["name"], {0: key})
        check_policy_tokens(zoo, sample.trajectory)


def test_one_sample_that_calls_several_adapters_of_one_engine_mixes_no_keys_and_values(at_desk: Any, zoo: Any) -> None:
    class Round(Talk):
        async def run(self, task: Any, tools: Any) -> Sample:
            talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
            talk.sampled(await tools.generate(talk))
            for _ in range(3):
                for name in ("sql", "start", "chat"):
                    talk.given(await tools.models[name].generate(talk, stop_token_ids=[]))
            known = talk.tokens_T
            said = {name: await tools.models[name].logprobs(known[:4], known[4:]) for name in ("sql", "start")}
            for name, key in (("sql", "sql"), ("start", 0)):
                expected = zoo.logprobs(key, known)[np.arange(3, len(known) - 1), known[4:]]
                np.testing.assert_allclose(said[name].logprobs_R, expected, atol=1e-4)
            return Sample(trajectory=talk.close("environment"), verdict=tools.verdict(1.0), response_text="")

    async def test(desk: Any) -> Sample:
        sample: Sample = await desk.sample(Round("sql"), ROW)
        engine = desk.hosts.hosts["sql"].engine
        assert engine.counters()["kept_prefill_tokens"] > 0, "each goes on from its own last turn"
        while len(engine._core.sessions):  # noqa: ASYNC110 - they end with the sample, in the engine's thread
            await asyncio.sleep(0)
        return sample

    trajectory = at_desk(test, adapted(zoo)).trajectory
    for name, key in (("sql", "sql"), ("chat", "chat"), ("start", 0)):
        assert len(stamps(trajectory, name)) == 3
        check_greedy_tokens(zoo, trajectory, name, {0: key})


def test_models_that_share_one_set_of_weights_each_continue_their_own_conversation(at_desk: Any) -> None:
    class Apart(Talk):
        async def run(self, task: Any, tools: Any) -> Sample:
            talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
            talk.sampled(await tools.generate(talk))
            talks = {"one": Transcript([3, 4, 5, 6]), "other": Transcript([7, 8, 9])}
            for _ in range(3):
                for name, own in talks.items():
                    own.given(await tools.models[name].generate(own, stop_token_ids=[]))
            return Sample(trajectory=talk.close("environment"), verdict=tools.verdict(1.0), response_text="")

    async def test(desk: Any) -> None:
        assert desk.hosts.hosts["one"] is desk.hosts.hosts["other"]
        engine = desk.hosts.hosts["one"].engine
        await desk.sample(Apart("one"), ROW, max_new_tokens=2)
        assert engine.counters()["kept_prefill_tokens"] == (5 + 7) + (4 + 6), "all but the newest token of each turn"
        while len(engine._core.sessions):  # noqa: ASYNC110 - they end with the sample, in the engine's thread
            await asyncio.sleep(0)

    at_desk(test, [{"name": name, "source": "start"} for name in ("one", "other")])


def test_log_probs_of_given_tokens_are_those_of_transformers(at_desk: Any, zoo: Any) -> None:
    tokens_T = np.random.default_rng(3).integers(3, 18, 60).astype(np.int32)

    class Ask(Talk):
        async def run(self, task: Any, tools: Any) -> Any:
            return await asyncio.gather(
                *(tools.models["rival"].logprobs(tokens_T[:cut], tokens_T[cut:]) for cut in (1, 30, 60))
            )

    async def test(desk: Any) -> None:
        await desk.load(2)
        task, run = await _run(desk)
        expected = zoo.logprobs(2, tokens_T)[np.arange(59), tokens_T[1:]]
        for cut, found in zip((1, 30, 60), await Ask("rival").run(task, run), strict=True):
            assert (found.model, found.version) == ("rival", 2)
            np.testing.assert_allclose(found.logprobs_R, expected[cut - 1 :], atol=1e-4)
        for prompt, given, words in (
            (tokens_T, np.array([5, 900]), "model rival: token 900 is not in the vocabulary of 19 tokens"),
            (tokens_T[:0], tokens_T, "a prompt of at least one token"),
            (tokens_T, np.tile(tokens_T, 2), "the sequence has 180 tokens, but the context is limited to 96 tokens"),
        ):
            with pytest.raises(UserError, match=words):
                await run.models["rival"].logprobs(prompt, given)

    at_desk(test, [RIVAL])


async def _run(desk: Any) -> tuple[Any, Any]:
    """A task and its tools, without a workflow."""
    seen: list[Any] = []

    class Take(Talk):
        async def run(self, task: Any, tools: Any) -> Sample:
            seen.extend((task, tools))
            talk = Transcript(tools.tokens.prompt(task.row))
            talk.sampled(await tools.generate(talk))
            return Sample(trajectory=talk.close(), verdict=tools.verdict(0.0), response_text="")

    await desk.sample(Take("rival"), ROW)
    return seen[0], seen[1]


class Duet:
    """Both roles talk by turns, whatever they say; each has a trajectory where it is trained."""

    is_resumable = False
    models = ("first", "second")

    async def run(self, task: Any, tools: Any) -> Sample:
        talks = [Transcript(tools.tokens.prompt({"prompt": text})) for text in ("19:", "07:")]
        for turn in range(6):
            speaker = tools.models[self.models[turn % 2]]
            answer = await speaker.generate(talks[turn % 2])
            for place, talk in enumerate(talks):
                if place == turn % 2 and speaker.is_trained:
                    talk.sampled(answer)
                else:
                    talk.given(answer)
        made = [talk.close() for talk in talks if talk.num_sampled]
        return Sample(trajectory=made[0], others=tuple(made[1:]), verdict=tools.verdict(1.0), response_text="")


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_in_self_play_exactly_the_tokens_of_the_declared_roles_are_trained(
    at_desk: Any, zoo: Any, trained: tuple[bool, bool]
) -> None:
    models = [{**role, "trained": flag} for role, flag in zip(ROLES, trained, strict=True)]

    async def test(desk: Any) -> Sample:
        return await desk.sample(Duet(), ROW)  # type: ignore[no-any-return]

    sample = at_desk(test, models)
    expected = [role["name"] for role in models if role["trained"]]
    trajectories = (sample.trajectory, *sample.others)
    assert len(trajectories) == len(expected)
    for one, role in zip(trajectories, expected, strict=True):
        assert [source.model for source in one.sources] == ["first", "second"] * 3
        trained_T = np.zeros(len(one), bool)
        for source in one.sources:
            trained_T[source.start : source.end] = source.model == role
        assert one.loss_mask_T.tolist() == trained_T.tolist()
        check_policy_tokens(zoo, one)
    said = [[one.tokens_T[part.start : part.end].tolist() for part in one.sources] for one in trajectories]
    assert said == [said[0]] * len(said), "both have received the same"


def test_a_critic_that_is_not_trained_is_only_asked(at_desk: Any, zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.graphs.critic.END", "?")  # the vocabulary of these models has no other mark
    row = {"prompt": "7:8?", "answer": "5"}

    async def test(desk: Any) -> Sample:
        return await desk.sample(DraftCritiqueRevise(), row)  # type: ignore[no-any-return]

    models = [{"name": "generator", "source": "policy"}, {"name": "critic", "source": "policy", "trained": False}]
    sample = at_desk(test, models)
    assert sample.others == ()
    assert [(one.model, bool(sample.trajectory.loss_mask_T[one.start])) for one in sample.trajectory.sources] == [
        ("generator", True), ("critic", False), ("generator", True)
    ]  # fmt: skip
    check_policy_tokens(zoo, sample.trajectory)


def test_a_judge_votes_in_parallel_and_is_a_reference(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> list[Any]:
        await desk.load(1)
        row = {"prompt": "12:", "answer": "3"}
        return [await desk.sample(JudgedSum(votes=3), row, seed=seed) for seed in (1, 1, 2)]

    first, again, other = at_desk(test, [{"name": "judge", "source": "start", "temperature": 1.0}])
    assert first.trajectory.tokens_T.tolist() == again.trajectory.tokens_T.tolist()
    assert first.verdict.components == again.verdict.components, "the judge draws by the sample's seed"
    assert first.trajectory.tokens_T.tolist() != other.trajectory.tokens_T.tolist()
    one = first.trajectory
    started = zoo.logprobs(0, one.tokens_T)[np.arange(len(one) - 1), one.tokens_T[1:]]
    drift = (one.logprobs_T[1:] - started)[one.loss_mask_T[1:]].mean()
    assert first.verdict.components["drift"] == pytest.approx(float(drift), abs=1e-4)
    assert abs(drift) > 0.01, "version 1 is another model"
    assert first.trajectory.sources == (), "its opinions are in no trajectory"


class Cheats(Talk):
    """Adds what another model said as if the policy had."""

    async def run(self, task: Any, tools: Any) -> Sample:
        talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        answer = await tools.models[self.models[0]].generate(talk)
        talk.sampled(answer.segment if self.between is None else answer)
        return Sample(trajectory=talk.close(), verdict=tools.verdict(1.0), response_text="")


@pytest.mark.parametrize("model", [RIVAL, {"name": "rival", "source": "policy", "trained": False}])
def test_tokens_of_a_model_that_is_not_trained_cannot_be_trained(at_desk: Any, model: dict[str, Any]) -> None:
    async def test(desk: Any) -> None:
        with pytest.raises(
            UserError, match="marks tokens for training that were not sampled by a trained role of the policy"
        ):
            await desk.sample(Cheats("rival"), ROW)
        with pytest.raises(ValueError, match="an answer of rival cannot be used for training"):
            await desk.sample(Cheats("rival", between=True), ROW)

    models = [model] if "refresh_every" in model else [model, {"name": "first", "source": "policy"}]
    at_desk(test, models)


def test_answers_of_the_policy_in_parallel_are_those_of_one_after_the_other(at_desk: Any, zoo: Any) -> None:
    class Both(Talk):
        is_parallel = False

        async def run(self, task: Any, tools: Any) -> Sample:
            calls = [tools.models[name].generate(Transcript(tools.tokens.prompt(task.row))) for name in self.models]
            answers = await asyncio.gather(*calls) if self.is_parallel else [await call for call in calls]
            made = []
            for answer in answers:
                one = Transcript(tools.tokens.prompt(task.row))
                one.sampled(answer)
                made.append(one.close())
            return Sample(trajectory=made[0], others=tuple(made[1:]), verdict=tools.verdict(1.0), response_text="")

    async def test(desk: Any) -> list[list[Any]]:
        found = []
        for is_parallel in (False, True):
            workflow = Both("first")
            workflow.models, workflow.is_parallel = ("first", "second"), is_parallel
            sample = await desk.sample(workflow, ROW)
            for one in (sample.trajectory, *sample.others):
                check_policy_tokens(zoo, one)
            found.append([one.tokens_T.tolist() for one in (sample.trajectory, *sample.others)])
        return found

    apart, together = at_desk(test, ROLES)
    assert apart == together
    assert apart[0] != apart[1], "each call draws from a stream of its own"


def test_parked_calls_all_go_on_once_the_version_is_there_again(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> None:
        _, run = await _run(desk)
        await desk.engine.pause()
        calls = [
            asyncio.ensure_future(run.generate(Transcript(run.tokens.prompt(ROW)), max_new_tokens=6)) for _ in range(2)
        ]
        while len(run._calls) < 2 or any(call.generation is None for call in run._calls):  # noqa: ASYNC110
            await asyncio.sleep(0)
        desk.gate.set(-1)
        run.park(desk.engine.progress())
        await desk.engine.resume()
        await desk.load(1)
        for answer in await asyncio.gather(*calls):
            assert set(answer.segment.versions_R.tolist()) == {1}

    at_desk(test, [RIVAL])


def test_names_and_roles_are_checked_when_they_are_called(at_desk: Any) -> None:
    async def test(desk: Any) -> None:
        class Ask(Talk):
            async def run(self, task: Any, tools: Any) -> Sample:
                with pytest.raises(UserError, match=r"a model `judge`, which is not declared .*first, second"):
                    tools.models["judge"]
                with pytest.raises(UserError, match="the policy has roles, so the workflow must call one"):
                    await tools.generate(tools.tokens.prompt(task.row))
                with pytest.raises(UserError, match="first is a role of the policy, which does not compute log-probs"):
                    await tools.models["first"].logprobs(np.array([1]), np.array([2]))
                one = Transcript(tools.tokens.prompt(task.row))
                one.sampled(await tools.models["first"].generate(one))
                return Sample(trajectory=one.close(), verdict=tools.verdict(0.0), response_text="")

        await desk.sample(Ask("first"), ROW)

    at_desk(test, ROLES)


def test_a_model_with_another_tokenizer_is_refused_before_anything_is_allocated(at_desk: Any, zoo: Any) -> None:
    folder = zoo.folder("foreign", seed=1, tokenizer="characters:running_sum")
    with pytest.raises(UserError, match=re.escape("the tokenizer of model judge differs from the policy's at token")):
        at_desk(lambda desk: None, [{"name": "judge", "path": str(folder)}])


def test_a_prompt_that_fills_a_models_context_gets_an_empty_answer(at_desk: Any) -> None:
    class Long(Talk):
        async def run(self, task: Any, tools: Any) -> Sample:
            one = Transcript(tools.tokens.prompt(task.row))
            one.sampled(await tools.generate(one))
            one.given([5] * 12)
            answer = await tools.models["judge"].generate(one)
            assert (len(answer.segment), answer.ended_by, answer.model) == (0, "context", "judge")
            one.given(answer)
            return Sample(trajectory=one.close(), verdict=tools.verdict(0.0), response_text="")

    async def test(desk: Any) -> Sample:
        return await desk.sample(Long("judge"), ROW)  # type: ignore[no-any-return]

    assert at_desk(test, [{"name": "judge", "source": "start", "max_context": 16}]).trajectory.sources == ()


def test_a_rival_plays_and_only_the_policys_moves_are_trained(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> list[Any]:
        return [await desk.sample(AgainstRival(), ROW, seed=seed) for seed in range(1, 5)]

    for sample in at_desk(test, [RIVAL]):
        check_policy_tokens(zoo, sample.trajectory)
        assert not any(sample.trajectory.loss_mask_T[one.start : one.end].any() for one in sample.trajectory.sources)
