"""Log-probs of a teacher that come with a sample: of each trained token, as transformers computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_like.trajectory import Segment, Trajectory
from rollout.engine.frozen import FrozenEngine
from rollout.models.hosting import make_hosts
from rollout.transcript import Transcript
from rollout.workflow import Sample

ROW = {"prompt": "19:"}
START = {"name": "start", "source": "start", "num_slots": 1}


class Turns:
    """Two answers of the policy with given tokens between and after them, in one trajectory; the second again in
    another one, after a longer prompt."""

    is_resumable = False

    async def run(self, task: Any, tools: Any) -> Sample:
        talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        other = Transcript(tools.tokens.prompt({"prompt": "07:19:"}))
        for part in (talk, talk, other):
            part.sampled(await tools.generate(part, stop_token_ids=[]))
            if part is talk:
                part.given("?")
        made = [part.close("environment") for part in (talk, other)]
        return Sample(trajectory=made[0], others=(made[1],), verdict=tools.verdict(1.0), response_text="")


class Once:
    """One answer, which may be continued by another worker."""

    is_resumable = True

    async def run(self, task: Any, tools: Any) -> Sample:
        prompt_P = tools.tokens.prompt(task.row)
        answer = await tools.generate(prompt_P)
        trajectory = Trajectory.from_prompt(prompt_P, answer.segment, answer.finish_reason)
        return Sample(trajectory=trajectory, verdict=tools.verdict(1.0), response_text="")


def check(zoo: Any, trajectory: Trajectory, version: int, temperature: float = 1.0) -> None:
    """The oracle: transformers' log-probs of one version, with logits divided by the temperature."""
    ids = torch.from_numpy(trajectory.tokens_T.astype(np.int64))[None]
    with torch.inference_mode():
        logits = zoo.models[version](input_ids=ids, use_cache=False).logits[0, :-1].float()
    said = torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    expected_T = np.where(trajectory.loss_mask_T, np.concatenate([[0.0], said]), 0.0)
    assert trajectory.teacher_logprobs_T is not None
    np.testing.assert_allclose(trajectory.teacher_logprobs_T, expected_T, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_trained_token_has_the_teachers_log_prob_at_the_temperature_of_sampling(
    at_desk: Any, zoo: Any, temperature: float
) -> None:
    async def test(desk: Any) -> tuple[Sample, dict[str, float]]:
        await desk.load(1)
        return await desk.sample(Turns(), ROW, temperature=temperature), desk.hosts.counters()

    sample, counters = at_desk(test, [START], "start")
    main, other = sample.trajectory, *sample.others
    assert (main.num_sampled, bool(main.loss_mask_T[-1])) == (4, False), "given tokens follow each answer"
    for one in (main, other):
        check(zoo, one, 0, temperature)
        drift = (one.logprobs_T - one.teacher_logprobs_T)[one.loss_mask_T]
        assert np.abs(drift).max() > 0.01, "version 1 sampled it, version 0 is the teacher"
    num_scored = sum(len(one) - int(one.loss_mask_T.argmax()) for one in (main, other))
    assert counters["model_start_logprobs"] == num_scored
    assert counters["model_start_logprobs_s"] > 0.0
    assert counters["model_start_tokens"] == 0.0


def test_a_sample_of_an_evaluation_and_one_without_a_teacher_have_none(at_desk: Any) -> None:
    async def test(desk: Any) -> list[Sample]:
        evaluated = await desk.sample(Turns(), ROW, purpose="eval")
        desk.hosts.teacher = ""
        return [evaluated, await desk.sample(Turns(), ROW)]

    for sample in at_desk(test, [START], "start"):
        assert all(one.teacher_logprobs_T is None for one in (sample.trajectory, *sample.others))


def test_an_answer_that_another_worker_began_has_them_from_its_first_token_on(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> tuple[Sample, Sample]:
        whole = await desk.sample(Once(), ROW, max_new_tokens=6, ignore_eos=True)
        answer = whole.trajectory
        begun = Segment(
            *(getattr(answer, f"{name}_T")[answer.loss_mask_T][:4] for name in ("tokens", "logprobs", "versions"))
        )
        await desk.load(2)
        return whole, await desk.sample(Once(), ROW, max_new_tokens=6, ignore_eos=True, prefix=begun)

    for sample in at_desk(test, [START], "start"):
        assert sample.trajectory.num_sampled == 6
        check(zoo, sample.trajectory, 0)


def test_a_copy_of_the_policy_teaches_with_the_version_that_it_has(at_desk: Any, zoo: Any) -> None:
    async def test(desk: Any) -> list[Sample]:
        found = []
        for version in (0, 1, 2):
            await desk.load(version)
            found.append(await desk.sample(Once(), ROW))
        return found

    copies = at_desk(test, [{"name": "old", "source": "policy", "refresh_every": 2}], "old")
    for sample, version in zip(copies, (0, 0, 2), strict=True):
        check(zoo, sample.trajectory, version)


def test_a_worker_whose_policy_is_in_sglang_hosts_its_teacher_in_the_embedded_engine(
    at_desk: Any, zoo: Any, tmp_path: Any
) -> None:
    """The kind of the policy's engine has no part in it."""

    async def test(desk: Any) -> Sample:
        engine = desk.settings.engine.model_copy(update={"kind": "sglang"})
        settings = desk.settings.model_copy(update={"engine": engine})
        made = make_hosts(desk.spec, settings, zoo.policy, desk.tokenizer)
        assert isinstance(made.hosts["start"].engine, FrozenEngine)
        await made.start()
        try:
            desk.bench.models = made
            return await desk.sample(Once(), ROW)
        finally:
            await made.close()

    check(zoo, at_desk(test, [START], "start").trajectory, 0)
